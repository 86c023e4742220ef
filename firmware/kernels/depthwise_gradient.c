/* Backward of the depthwise convolution. Sums run over taps (input) or pixels (weights) in ascending order. */
#include "geometry.h"
#include "kernels.h"
#include "update.h"

enum { LANES = 4 };

/* Which of `extent` outputs a tap reaches from `at` = input + pad - tap; negative: none. */
static inline int32_t reached(int32_t at, int32_t stride, int32_t extent) {
    if (stride != 1 && at >= 0) { /* most strides are 1, and a division costs as much as the rest */
        if (at % stride) return -1;
        at /= stride;
    }
    return at < extent ? at : -1;
}

/* Channels c .. c + lanes - 1 of one input pixel: scale[c] * sum over the taps (u, v) of dy[c] * w[u][v][c]. */
static void input_lanes(const port_bound *bound, const float *gradient, int32_t y, int32_t x, int32_t c, int32_t lanes, float *sums) {
    const port_op *op = bound->op;
    const int8_t *weight = (op->trained_rows ? bound->trained : bound->frozen) + c;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int32_t u = 0; u < op->kernel_h; u++) {
        int32_t i = reached(y + op->pad_top - u, op->stride_h, op->out_h);
        if (i < 0) continue;
        const float *row = gradient + i * op->out_w * op->out_c + c;
        for (int32_t v = 0; v < op->kernel_w; v++) {
            int32_t j = reached(x + op->pad_left - v, op->stride_w, op->out_w);
            if (j < 0) continue;
            const float *dy = row + j * op->out_c;
            const int8_t *w = weight + (u * op->kernel_w + v) * op->in_c;
            s0 += dy[0] * (float)w[0];
            if (lanes < LANES) continue;
            s1 += dy[1] * (float)w[1];
            s2 += dy[2] * (float)w[2];
            s3 += dy[3] * (float)w[3];
        }
    }
    sums[0] = s0 * op->weight_scale[c];
    if (lanes < LANES) return;
    sums[1] = s1 * op->weight_scale[c + 1];
    sums[2] = s2 * op->weight_scale[c + 2];
    sums[3] = s3 * op->weight_scale[c + 3];
}

void port_depthwise_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    float sums[LANES];
    const int32_t last = bound->last, in_w = op->in_w, in_c = op->in_c;
    for (int32_t y = bound->first; y < last; y++) {
        for (int32_t x = 0; x < in_w; x++) {
            float *dx = target + (y * in_w + x) * in_c;
            for (int32_t c = 0; c < in_c;) {
                int32_t lanes = in_c - c >= LANES ? LANES : 1;
                input_lanes(bound, gradient, y, x, c, lanes, sums);
                for (int32_t l = 0; l < lanes; l++, c++) dx[c] = accumulate ? dx[c] + sums[l] : sums[l];
            }
        }
    }
}

/* Sum over the pixels (i, j) of dy[c] * (x[c] - zero), for one tap and one channel. */
static float weight_value(const port_bound *bound, const float *gradient, int32_t u, int32_t v, int32_t c, float sum) {
    const port_op *op = bound->op;
    for (int32_t i = bound->first; i < bound->last; i++) {
        int32_t y = i * op->stride_h + u - op->pad_top;
        if (y < 0 || y >= op->in_h) continue;
        for (int32_t j = 0; j < op->out_w; j++) {
            int32_t x = j * op->stride_w + v - op->pad_left;
            float g = gradient[(i * op->out_w + j) * op->out_c + c];
            if (x < 0 || x >= op->in_w || g == 0.0f) continue;
            sum += g * (float)(bound->in[(y * op->in_w + x) * op->in_c + c] - op->in_zero);
        }
    }
    return sum;
}

void port_depthwise_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update) {
    const port_op *op = bound->op;
    int32_t at = 0;
    for (int32_t u = 0; u < op->kernel_h; u++) {
        for (int32_t v = 0; v < op->kernel_w; v++) {
            for (int32_t c = 0; c < op->in_c; c++, at++) {
                if (groups && groups[c / PORT_GROUP] != PORT_CHOSEN) {
                    port_skip_draws(&update->generator, 1u);
                    continue;
                }
                float sum = weight_value(bound, gradient, u, v, c, bound->resumed ? bound->resumed[at] : 0.0f);
                if (bound->suspended) {
                    bound->suspended[at] = sum;
                    continue;
                }
                float size = port_step_size(update, op->weight_scale[c]) * op->in_scale;
                port_apply_weight(update, bound, at, size * sum);
            }
        }
    }
}
