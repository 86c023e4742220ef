/* Reads commands from the console (example.h) and trains on a sensor. */
#include "example.h"
#ifdef PORT_EXAMPLE_PICO
#include "pico/stdlib.h"
#endif

/* Put one sample of your sensor here: PORT_SAMPLE_VALUES real values, channel by channel. */
static void read_sensor(float *values)
{
    for (unsigned i = 0; i < PORT_SAMPLE_VALUES; i++) {
        values[i] = 0.0f;
    }
}

static void run(void)
{
    static float values[PORT_SAMPLE_VALUES];
    char line[32], answer[64];

    if (port_library_begin(NULL) != PORT_OK) { /* pass a port_library_storage to keep the trained parameters */
        puts("the model does not start: is -ffp-contract=off among the flags?");
        return;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        read_sensor(values);
        port_example_do(line, values, answer, sizeof answer);
        puts(answer);
    }
}

#ifdef PORT_EXAMPLE_ESP_IDF
void app_main(void)
{
    run();
}
#else
int main(void)
{
#ifdef PORT_EXAMPLE_PICO
    stdio_init_all();
#endif
    run();
    return 0;
}
#endif
