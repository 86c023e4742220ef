/* Depthwise convolution 3x3, 5x5, 7x7 (1-D: 1xk), weights [kernel_h][kernel_w][channel]. Scalar reference. */
#include "arithmetic.h"
#include "geometry.h"
#include "kernels.h"

static int32_t window_sum(const port_op *op, const int8_t *in, const int8_t *weight, port_taps vertical, port_taps horizontal) {
    int32_t sum = 0;
    for (int32_t u = vertical.first; u < vertical.last; u++) {
        for (int32_t v = horizontal.first; v < horizontal.last; v++) {
            int32_t x = in[((vertical.start + u) * op->in_w + horizontal.start + v) * op->in_c];
            sum += (x - op->in_zero) * weight[(u * op->kernel_w + v) * op->in_c];
        }
    }
    return sum;
}

void port_depthwise_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    const int8_t *weight = op->trained_rows ? bound->trained : bound->frozen;
    int8_t *out = bound->out + bound->first * op->out_w * op->out_c;
    for (int32_t i = bound->first; i < bound->last; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            for (uint16_t c = 0; c < op->out_c; c++) {
                int32_t sum = port_wrapping_sum(bound->bias[c], window_sum(op, bound->in + c, weight + c, vertical, horizontal));
                int32_t value = port_requantize(sum, op->multiplier[c], op->shift[c]) + op->out_zero;
                *out++ = port_clamp(value, op->out_min, op->out_max);
            }
        }
    }
}
