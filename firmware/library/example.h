/* Commands of the examples' console: "t LABEL" trains on the sensor's sample as that class, "t TARGET TARGET ..." to those
 * targets if the model has them, "i" infers, "s" saves. */
#ifndef PORT_EXAMPLE_H
#define PORT_EXAMPLE_H

#include <stdio.h>
#include <stdlib.h>

#include "port_library.h"

#ifdef PORT_MODEL_TARGET_COUNT
static inline port_status port_example_train(const char *text, const int8_t *sample, port_result *result)
{
    static float targets[PORT_MODEL_TARGET_COUNT];
    char *rest;

    for (unsigned i = 0; i < PORT_MODEL_TARGET_COUNT; i++, text = rest) {
        targets[i] = (float)strtod(text, &rest);
        if (rest == text) { /* fewer numbers than targets */
            return PORT_ERROR_ARGUMENT;
        }
    }
    return port_library_train_to(sample, targets, result);
}
#else
static inline port_status port_example_train(const char *text, const int8_t *sample, port_result *result)
{
    char *rest;
    long label = strtol(text, &rest, 10);

    while (*rest == '\r' || *rest == '\n' || *rest == ' ') {
        rest++;
    }
    if (rest == text || *rest != 0 || (unsigned long)label >= PORT_MODEL_CLASS_COUNT) { /* no number, or no class */
        return PORT_ERROR_ARGUMENT;
    }
    return port_library_train(sample, (uint16_t)label, result);
}
#endif

/* Outcome of a sample: its class, or the first of its outputs in thousandths (not every printf has %f). */
static inline void port_example_show(int found, char *answer, size_t size)
{
#ifdef PORT_MODEL_TARGET_COUNT
    snprintf(answer, size, "%s %ld / 1000", found < 0 ? "refused" : "output", (long)(port_library_logits()[0] * 1000.0f));
#else
    snprintf(answer, size, "class %d", found);
#endif
}

/* Execute one command with a sample of real values; write the outcome to `answer`. */
static inline void port_example_do(const char *command, const float *values, char *answer, size_t size)
{
    static int8_t sample[PORT_MODEL_INPUT_BYTES];
    port_result result = {0, 0, 0};
    port_status status = PORT_OK;

    long clipped = (long)port_library_quantize(values, sample);

    if (clipped < 0 && command[0] != 's') {
        snprintf(answer, size, "a value of the sensor is not a number");
    } else if (command[0] == 't') {
        status = port_example_train(command + 1, sample, &result);
        snprintf(answer, size, "status %d, was class %u, %ld values clipped", (int)status, (unsigned)result.predicted, clipped);
    } else if (command[0] == 's') {
        snprintf(answer, size, "status %d", (int)port_library_save());
    } else {
        port_example_show(port_library_infer(sample), answer, size);
    }
}

#endif
