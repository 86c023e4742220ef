/* Convolution kxk, stride 1 or 2 (pointwise and fully connected are 1x1), and the classifier. Scalar reference. */
#include "arithmetic.h"
#include "geometry.h"
#include "kernels.h"

/* Sum of (x - zero) * w over `count` neighbouring bytes. */
static int32_t dot(const int8_t *x, const int8_t *w, int32_t count, int32_t zero) {
    int32_t sum = 0;
    for (int32_t i = 0; i < count; i++) sum += (x[i] - zero) * w[i];
    return sum;
}

static int32_t window_sum(const port_op *op, const int8_t *in, const int8_t *row, port_taps vertical, port_taps horizontal) {
    int32_t sum = 0, run = (horizontal.last - horizontal.first) * op->in_c;
    for (int32_t u = vertical.first; u < vertical.last; u++) {
        const int8_t *x = in + ((vertical.start + u) * op->in_w + horizontal.start + horizontal.first) * op->in_c;
        sum += dot(x, row + (u * op->kernel_w + horizontal.first) * op->in_c, run, op->in_zero);
    }
    return sum;
}

static void convolve_rows(const port_bound *bound, const int8_t *weight, uint16_t first, uint16_t last) {
    const port_op *op = bound->op;
    int32_t row_bytes = op->kernel_h * op->kernel_w * op->in_c;
    if (first == last) return;
    for (int32_t i = bound->first; i < bound->last; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            int8_t *out = bound->out + (i * op->out_w + j) * op->out_c;
            const int8_t *row = weight;
            for (uint16_t o = first; o < last; o++, row += row_bytes) {
                int32_t sum = port_wrapping_sum(bound->bias[o], window_sum(op, bound->in, row, vertical, horizontal));
                int32_t value = port_requantize(sum, op->multiplier[o], op->shift[o]) + op->out_zero;
                out[o] = port_clamp(value, op->out_min, op->out_max);
            }
        }
    }
}

void port_conv_forward(const port_bound *bound) {
    convolve_rows(bound, bound->trained, 0, bound->op->trained_rows);
    convolve_rows(bound, bound->frozen, bound->op->trained_rows, bound->op->out_c);
}

static void classify_rows(const port_bound *bound, const int8_t *weight, uint16_t first, uint16_t last) {
    const port_op *op = bound->op;
    int32_t row_bytes = op->in_h * op->in_w * op->in_c;
    float *logits = (float *)(void *)bound->out;
    for (uint16_t o = first; o < last; o++, weight += row_bytes) {
        int32_t sum = port_wrapping_sum(bound->bias[o], dot(bound->in, weight, row_bytes, op->in_zero));
        logits[o] = (float)sum * (op->in_scale * op->weight_scale[o]);
    }
}

void port_classifier_forward(const port_bound *bound) {
    classify_rows(bound, bound->trained, 0, bound->op->trained_rows);
    classify_rows(bound, bound->frozen, bound->op->trained_rows, bound->op->out_c);
}
