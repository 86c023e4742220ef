/* Convolution with groups, dilation or several outputs a channel, and transposed convolution, forward and backward.
 * Scalar; every fp32 sum starts at +0 and runs in ascending order: over pixels (weights), or over output channels
 * and then taps (input). A transposed convolution exchanges the input and output positions of a convolution; nothing
 * else differs. */
#include "arithmetic.h"
#include "kernels.h"
#include "update.h"

static int32_t group_inputs(const port_op *op) { return op->in_c / op->groups; }
static int32_t group_outputs(const port_op *op) { return op->out_c / op->groups; }
static int32_t row_bytes(const port_op *op) { return op->kernel_h * op->kernel_w * group_inputs(op); }

static const int8_t *row_of(const port_bound *bound, int32_t o) {
    int32_t trained = bound->op->trained_rows;
    return o < trained ? bound->trained + o * row_bytes(bound->op) : bound->frozen + (o - trained) * row_bytes(bound->op);
}

static int32_t strided(int32_t position, int32_t stride, int32_t tap, int32_t dilation, int32_t pad, int32_t extent) {
    int32_t at = position * stride + tap * dilation - pad;
    return at < extent ? at : -1;
}

static int32_t unstrided(int32_t position, int32_t stride, int32_t tap, int32_t dilation, int32_t pad, int32_t extent) {
    int32_t at = position + pad - tap * dilation;
    return at < 0 || at % stride || at / stride >= extent ? -1 : at / stride;
}

static int is_transposed(const port_op *op) { return PORT_HAS(PORT_OP_TRANSPOSED) && op->kind == PORT_OP_TRANSPOSED; }

/* Return the input line that a tap of an output line reads; negative: none. */
static int32_t line_read(const port_op *op, int32_t i, int32_t tap) {
    if (is_transposed(op)) return unstrided(i, op->stride_h, tap, op->dilation_h, op->pad_top, op->in_h);
    return strided(i, op->stride_h, tap, op->dilation_h, op->pad_top, op->in_h);
}

static int32_t column_read(const port_op *op, int32_t j, int32_t tap) {
    if (is_transposed(op)) return unstrided(j, op->stride_w, tap, op->dilation_w, op->pad_left, op->in_w);
    return strided(j, op->stride_w, tap, op->dilation_w, op->pad_left, op->in_w);
}

/* Return the output line whose tap reads an input line; negative: none. */
static int32_t line_reached(const port_op *op, int32_t y, int32_t tap) {
    if (is_transposed(op)) return strided(y, op->stride_h, tap, op->dilation_h, op->pad_top, op->out_h);
    return unstrided(y, op->stride_h, tap, op->dilation_h, op->pad_top, op->out_h);
}

static int32_t column_reached(const port_op *op, int32_t x, int32_t tap) {
    if (is_transposed(op)) return strided(x, op->stride_w, tap, op->dilation_w, op->pad_left, op->out_w);
    return unstrided(x, op->stride_w, tap, op->dilation_w, op->pad_left, op->out_w);
}

static int32_t window_sum(const port_bound *bound, const int8_t *row, int32_t i, int32_t j, int32_t first_c) {
    const port_op *op = bound->op;
    int32_t sum = 0, count = group_inputs(op);
    for (int32_t u = 0; u < op->kernel_h; u++) {
        int32_t y = line_read(op, i, u);
        for (int32_t v = 0; v < op->kernel_w; v++, row += count) {
            int32_t x = column_read(op, j, v);
            if (y < 0 || x < 0) continue;
            const int8_t *in = bound->in + (y * op->in_w + x) * op->in_c + first_c;
            for (int32_t c = 0; c < count; c++) sum += (in[c] - op->in_zero) * row[c];
        }
    }
    return sum;
}

void port_grouped_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    int8_t *out = bound->out + bound->first * op->out_w * op->out_c;
    for (int32_t i = bound->first; i < bound->last; i++) {
        for (int32_t j = 0; j < op->out_w; j++) {
            for (int32_t o = 0; o < op->out_c; o++) {
                int32_t first_c = o / group_outputs(op) * group_inputs(op);
                int32_t sum = port_wrapping_sum(bound->bias[o], window_sum(bound, row_of(bound, o), i, j, first_c));
                int32_t value = port_requantize(sum, op->multiplier[o], op->shift[o]) + op->out_zero;
                *out++ = port_clamp(value, op->out_min, op->out_max);
            }
        }
    }
}

static float input_value(const port_bound *bound, const float *gradient, int32_t y, int32_t x, int32_t c) {
    const port_op *op = bound->op;
    int32_t inputs = group_inputs(op), outputs = group_outputs(op), first = c / inputs * outputs;
    float sum = 0.0f;
    for (int32_t o = first; o < first + outputs; o++) {
        const int8_t *row = row_of(bound, o) + c % inputs;
        for (int32_t u = 0; u < op->kernel_h; u++) {
            int32_t i = line_reached(op, y, u);
            for (int32_t v = 0; v < op->kernel_w && i >= 0; v++) {
                int32_t j = column_reached(op, x, v);
                if (j < 0) continue;
                float dy = gradient[(i * op->out_w + j) * op->out_c + o];
                if (dy != 0.0f) sum += dy * op->weight_scale[o] * (float)row[(u * op->kernel_w + v) * inputs];
            }
        }
    }
    return sum;
}

void port_grouped_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    for (int32_t y = bound->first; y < bound->last; y++)
        for (int32_t x = 0; x < op->in_w; x++)
            for (int32_t c = 0; c < op->in_c; c++) {
                float sum = input_value(bound, gradient, y, x, c), *dx = target + (y * op->in_w + x) * op->in_c + c;
                *dx = accumulate ? *dx + sum : sum;
            }
}

static float weight_value(const port_bound *bound, const float *gradient, int32_t o, int32_t u, int32_t v, int32_t c) {
    const port_op *op = bound->op;
    float sum = 0.0f;
    for (int32_t i = bound->first; i < bound->last; i++) {
        int32_t y = line_read(op, i, u);
        for (int32_t j = 0; j < op->out_w && y >= 0; j++) {
            int32_t x = column_read(op, j, v);
            float dy = gradient[(i * op->out_w + j) * op->out_c + o];
            if (x >= 0 && dy != 0.0f) sum += dy * (float)(bound->in[(y * op->in_w + x) * op->in_c + c] - op->in_zero);
        }
    }
    return sum;
}

void port_grouped_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update) {
    const port_op *op = bound->op;
    int32_t inputs = group_inputs(op), at = 0;
    for (int32_t o = 0; o < op->trained_rows; o++) {
        if (groups && groups[o / PORT_GROUP] != PORT_CHOSEN) {
            port_skip_draws(&update->generator, (uint32_t)row_bytes(op));
            at += row_bytes(op);
            continue;
        }
        int32_t first_c = o / group_outputs(op) * inputs;
        float size = port_step_size(update, op->weight_scale[o]) * op->in_scale;
        for (int32_t u = 0; u < op->kernel_h; u++)
            for (int32_t v = 0; v < op->kernel_w; v++)
                for (int32_t c = first_c; c < first_c + inputs; c++, at++)
                    port_apply_weight(update, bound, at, size * weight_value(bound, gradient, o, u, v, c));
    }
}
