/* The firmware: one model, one engine, one device. All memory is here, sized by the compiler of the model. */
#include "device.h"
#include "model.h"
#include "port.h"

/* An inference-only model has no parameters, and C no empty array. */
#define PARAMETER_BYTES (PORT_MODEL_PARAMETER_BYTES > 0 ? PORT_MODEL_PARAMETER_BYTES : 1)

static uint8_t arena[PORT_MODEL_ARENA_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
static uint8_t parameters[PARAMETER_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
static port_engine engine;
static struct device device;

int main(void)
{
    port_init();
    if (port_engine_init(&engine, &port_generated_model, arena, sizeof arena, parameters, sizeof parameters) != PORT_OK
        || port_parameters_reset(&engine) != PORT_OK) {
        port_reset(); /* tables of another engine: a build error that no host could repair over the wire */
    }
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
