/* Which kernel taps fall inside the input, for one output position. */
#ifndef PORT_GEOMETRY_H
#define PORT_GEOMETRY_H

#include <stdint.h>

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

#endif
