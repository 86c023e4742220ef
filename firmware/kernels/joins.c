/* Ops that join two tensors or repeat one: concatenation, products, nearest-neighbour upsampling. */
#include "arithmetic.h"
#include "kernels.h"

/* ---- concatenation: `runs` times a run of one input, then a run of the other --------------------------------------- */

typedef struct runs {
    uint32_t count, first, second; /* runs, and values in a run of either input */
} runs;

static runs runs_of(const port_op *op) {
    uint32_t in_line = (uint32_t)op->in_w * op->in_c, out_line = (uint32_t)op->out_w * op->out_c;
    if (op->in_c != op->out_c) return (runs){(uint32_t)op->out_h * op->out_w, op->in_c, op->out_c - op->in_c};
    if (op->in_w != op->out_w) return (runs){op->out_h, in_line, out_line - in_line};
    return (runs){1, op->in_h * in_line, (uint32_t)(op->out_h - op->in_h) * in_line};
}

static void requantize_run(const port_op *op, const int8_t *from, int32_t zero, int32_t multiplier, int8_t *to, uint32_t count) {
    int32_t half = (int32_t)1 << (op->add_shift - 1);
    for (uint32_t i = 0; i < count; i++)
        to[i] = port_clamp((((from[i] - zero) * multiplier + half) >> op->add_shift) + op->out_zero, op->out_min, op->out_max);
}

void port_concat_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    const int8_t *first = bound->in, *second = bound->other;
    int8_t *out = bound->out;
    runs r = runs_of(op);
    for (uint32_t i = 0; i < r.count; i++, first += r.first, second += r.second) {
        requantize_run(op, first, op->in_zero, op->add_in, out, r.first);
        requantize_run(op, second, op->other_zero, op->add_other, out + r.first, r.second);
        out += r.first + r.second;
    }
}

void port_concat_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate, int second) {
    runs r = runs_of(bound->op);
    uint32_t length = second ? r.second : r.first;
    gradient += second ? r.first : 0;
    for (uint32_t i = 0; i < r.count; i++, gradient += r.first + r.second, target += length)
        for (uint32_t k = 0; k < length; k++) target[k] = accumulate ? target[k] + gradient[k] : gradient[k];
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* Which value of `other` belongs to value `i` of `in`. */
static uint32_t other_index(const port_op *op, uint32_t i) { return op->kind == PORT_OP_SCALE ? i % op->out_c : i; }

void port_product_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    for (uint32_t i = 0; i < count; i++) {
        int32_t product = (bound->in[i] - op->in_zero) * (bound->other[other_index(op, i)] - op->other_zero);
        bound->out[i] = port_clamp(port_requantize(product, op->add_in, op->add_shift) + op->out_zero, op->out_min, op->out_max);
    }
}

void port_product_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate, int second) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    if (!accumulate)
        for (uint32_t i = 0; i < (second && op->kind == PORT_OP_SCALE ? op->out_c : count); i++) target[i] = 0.0f;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = other_index(op, i);
        if (second)
            target[at] += gradient[i] * ((float)(bound->in[i] - op->in_zero) * op->in_scale);
        else
            target[i] += gradient[i] * ((float)(bound->other[at] - op->other_zero) * op->other_scale);
    }
}

/* ---- upsampling ---------------------------------------------------------------------------------------------------- */

static uint32_t source_of(const port_op *op, uint32_t i, uint32_t j) {
    return (i / op->kernel_h * op->in_w + j / op->kernel_w) * op->in_c;
}

void port_upsample_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    int8_t *out = bound->out;
    for (uint32_t i = 0; i < op->out_h; i++)
        for (uint32_t j = 0; j < op->out_w; j++) {
            const int8_t *in = bound->in + source_of(op, i, j);
            for (uint32_t c = 0; c < op->out_c; c++) *out++ = port_clamp(in[c], op->out_min, op->out_max);
        }
}

void port_upsample_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->in_h * op->in_w * op->in_c;
    for (uint32_t i = 0; i < count && !accumulate; i++) target[i] = 0.0f;
    for (uint32_t i = 0; i < op->out_h; i++)
        for (uint32_t j = 0; j < op->out_w; j++, gradient += op->out_c) {
            float *dx = target + source_of(op, i, j);
            for (uint32_t c = 0; c < op->out_c; c++) dx[c] += gradient[c];
        }
}
