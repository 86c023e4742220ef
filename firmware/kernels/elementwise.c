/* Residual add and the two poolings, forward. */
#include "arithmetic.h"
#include "geometry.h"
#include "kernels.h"

/* out = zero + round half up of (a * add_in + b * add_other) / 2^add_shift; the compiler keeps the sum within 31 bits. */
void port_add_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    int32_t half = (int32_t)1 << (op->add_shift - 1);
    for (uint32_t i = 0; i < count; i++) {
        int32_t sum = (bound->in[i] - op->in_zero) * op->add_in + (bound->other[i] - op->other_zero) * op->add_other;
        bound->out[i] = port_clamp(((sum + half) >> op->add_shift) + op->out_zero, op->out_min, op->out_max);
    }
}

void port_average_pool_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    int32_t window = op->kernel_h * op->kernel_w;
    for (int32_t i = 0; i < op->out_h; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            for (uint16_t c = 0; c < op->out_c; c++) {
                int32_t sum = 0;
                for (int32_t u = vertical.first; u < vertical.last; u++)
                    for (int32_t v = horizontal.first; v < horizontal.last; v++)
                        sum += bound->in[((vertical.start + u) * op->in_w + horizontal.start + v) * op->in_c + c] - op->in_zero;
                int32_t value = port_rounded_mean(sum, window) + op->out_zero;
                bound->out[(i * op->out_w + j) * op->out_c + c] = port_clamp(value, op->out_min, op->out_max);
            }
        }
    }
}

void port_max_pool_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    for (int32_t i = 0; i < op->out_h; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            for (uint16_t c = 0; c < op->out_c; c++) {
                int8_t largest = op->out_min;
                for (int32_t u = vertical.first; u < vertical.last; u++) {
                    for (int32_t v = horizontal.first; v < horizontal.last; v++) {
                        int8_t x = bound->in[((vertical.start + u) * op->in_w + horizontal.start + v) * op->in_c + c];
                        if (x > largest) largest = x;
                    }
                }
                bound->out[(i * op->out_w + j) * op->out_c + c] = largest > op->out_max ? op->out_max : largest;
            }
        }
    }
}
