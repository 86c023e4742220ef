/* Gradients that need no weights: clamp mask, poolings, residual copy. */
#include "geometry.h"
#include "kernels.h"

void port_mask_gradient(const port_bound *bound, float *gradient) {
    const port_op *op = bound->op;
    const int8_t *out = bound->out;
    int32_t line = op->out_w * op->out_c, end = bound->last * line;
    for (int32_t i = bound->first * line; i < end; i++)
        if (out[i] <= op->out_min || out[i] >= op->out_max) gradient[i] = 0.0f;
}

void port_copy_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    for (uint32_t i = 0; i < count; i++) target[i] = accumulate ? target[i] + gradient[i] : gradient[i];
}

static void clear_input(const port_op *op, float *target) {
    uint32_t count = (uint32_t)op->in_h * op->in_w * op->in_c;
    for (uint32_t i = 0; i < count; i++) target[i] = 0.0f;
}

void port_average_pool_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    float share = 1.0f / (float)(op->kernel_h * op->kernel_w);
    if (!accumulate) clear_input(op, target);
    for (int32_t i = 0; i < op->out_h; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            const float *dy = gradient + (i * op->out_w + j) * op->out_c;
            for (int32_t u = vertical.first; u < vertical.last; u++) {
                for (int32_t v = horizontal.first; v < horizontal.last; v++) {
                    float *dx = target + ((vertical.start + u) * op->in_w + horizontal.start + v) * op->in_c;
                    for (uint16_t c = 0; c < op->in_c; c++) dx[c] += dy[c] * share;
                }
            }
        }
    }
}

/* The first of equal maxima gets the gradient, as in torch. */
void port_max_pool_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    if (!accumulate) clear_input(op, target);
    for (int32_t i = 0; i < op->out_h; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        for (int32_t j = 0; j < op->out_w; j++) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            for (uint16_t c = 0; c < op->out_c; c++) {
                int32_t best = -1;
                for (int32_t u = vertical.first; u < vertical.last; u++) {
                    for (int32_t v = horizontal.first; v < horizontal.last; v++) {
                        int32_t at = ((vertical.start + u) * op->in_w + horizontal.start + v) * op->in_c + c;
                        if (best < 0 || bound->in[at] > bound->in[best]) best = at;
                    }
                }
                target[best] += gradient[(i * op->out_w + j) * op->out_c + c];
            }
        }
    }
}
