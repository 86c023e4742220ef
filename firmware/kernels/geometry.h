/* Which inputs an output position reads. */
#ifndef PORT_GEOMETRY_H
#define PORT_GEOMETRY_H

#include <stdint.h>

#include "port_model.h"

/* Input positions start + first .. start + last - 1 exist; taps first .. last - 1 of the kernel touch them. */
typedef struct port_taps {
    int32_t start, first, last;
} port_taps;

static inline port_taps port_window(int32_t position, int32_t stride, int32_t pad, int32_t kernel, int32_t extent) {
    port_taps taps;
    taps.start = position * stride - pad;
    taps.first = taps.start < 0 ? -taps.start : 0;
    taps.last = taps.start + kernel > extent ? extent - taps.start : kernel;
    return taps;
}

/* Whether each output pixel reads the input pixel of the same number, which zero padding would shift; in one sum, which takes
 * the fewest registers. Padding is the same on both sides. */
static inline int port_is_pointwise(const port_op *op) {
    return op->kernel_h * op->kernel_w * op->stride_h * op->stride_w + (op->pad_top | op->pad_left) == 1;
}

#endif
