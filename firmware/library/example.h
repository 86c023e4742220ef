/* Commands of the examples' console: "t LABEL" trains on the sensor's sample as that class, "i" infers, "s" saves. */
#ifndef PORT_EXAMPLE_H
#define PORT_EXAMPLE_H

#include <stdio.h>
#include <stdlib.h>

#include "port_library.h"

/* Execute one command with a sample of real values; write the outcome to `answer`. */
static inline void port_example_do(const char *command, const float *values, char *answer, size_t size)
{
    static int8_t sample[PORT_MODEL_INPUT_BYTES];
    port_result result = {0, 0, 0};
    port_status status = PORT_OK;

    port_library_quantize(values, sample);
    if (command[0] == 't') {
        status = port_library_train(sample, (uint16_t)atoi(command + 1), &result);
        snprintf(answer, size, "status %d, was class %u", (int)status, (unsigned)result.predicted);
    } else if (command[0] == 's') {
        snprintf(answer, size, "status %d", (int)port_library_save());
    } else {
        snprintf(answer, size, "class %d", port_library_infer(sample));
    }
}

#endif
