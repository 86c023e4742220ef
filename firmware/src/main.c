/* The firmware: one model, one engine, one device. All memory is here, sized by the compiler of the model. */
#include "device.h"
#include "model.h"
#include "port.h"
#include "snapshot.h"

static uint8_t arena[PORT_MODEL_ARENA_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
static port_engine engine;
static struct device device;

#ifdef PORT_MODEL_PAGES_PARAMETERS
static port_status bind_engine(void)
{
    const port_medium *medium = port_page_medium();
    port_status status = port_engine_init(&engine, &port_generated_model, arena, sizeof arena, medium->mapped, medium->bytes);

    return status == PORT_OK ? port_medium_set(&engine, medium) : status;
}
#else
/* An inference-only model has no parameters, and C does not allow empty arrays. */
#define PARAMETER_BYTES (PORT_MODEL_PARAMETER_BYTES > 0 ? PORT_MODEL_PARAMETER_BYTES : 1)

static uint8_t parameters[PARAMETER_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));

static port_status bind_engine(void)
{
    port_status status = port_engine_init(&engine, &port_generated_model, arena, sizeof arena, parameters, sizeof parameters);

#ifdef PORT_MODEL_MEDIUM
    if (status == PORT_OK) {
        (void)port_medium_set(&engine, port_page_medium()); /* without one, samples are rejected with an error of their own */
    }
#endif
    return status;
}
#endif

int main(void)
{
    struct snapshot_info info;

    port_init();
    if (bind_engine() != PORT_OK || port_parameters_reset(&engine) != PORT_OK) {
        port_reset(); /* tables for another engine are a build error that no host can repair over the wire */
    }
    (void)snapshot_restore(&engine, &info); /* the saved parameters, or the initial weights of the image */
    device_init(&device, &engine);
    for (;;) {
        int byte = port_uart_get();
        port_watchdog_feed();
        if (byte < 0) {
            port_idle();
        } else {
            device_receive(&device, (uint8_t)byte);
        }
    }
}
