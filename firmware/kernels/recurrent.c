/* A gated recurrent unit (torch.nn.GRU) over its gates' inputs x_r, x_z, x_n of each step, forward and back through time:
 *
 *     r = sigmoid(x_r + W_r h + b_r)    z = sigmoid(x_z + W_z h + b_z)    n = tanh(x_n + r (W_n h + b_n))    h' = n + z (h - n)
 *
 * Products read the state as int8; between steps it is kept in fp32, because a slow gate moves it by less than a code. Integer
 * sums are exact and every fp32 sum runs in ascending order, so bits are equal everywhere. */
#include "arithmetic.h"
#include "kernels.h"
#include "update.h"

enum { RESET, UPDATE, NEW, GATES };

typedef struct unit {
    float r, z, n;
    float recurrent; /* W_n h + b_n */
} unit;

static int32_t step_count(const port_op *op) { return op->out_h * op->out_w; }

static const int8_t *row_of(const port_bound *bound, int32_t row) {
    return (bound->op->trained_rows ? bound->trained : bound->frozen) + row * bound->op->out_c;
}

static float sigmoid(float x) {
    float small = port_exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

static float hyperbolic_tangent(float x) {
    float small = port_exp_negative(2.0f * (x < 0.0f ? x : -x)), value = (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -value : value;
}

/* The states before a step; null: zeros. */
static const int8_t *states_before(const port_bound *bound, int32_t step) {
    return step ? bound->out + (step - 1) * bound->op->out_c : 0;
}

static float recurrent_sum(const port_bound *bound, const int8_t *states, int32_t row) {
    const port_op *op = bound->op;
    const int8_t *weights = row_of(bound, row);
    int32_t sum = 0;
    for (int32_t c = 0; states && c < op->out_c; c++) sum += (states[c] - op->out_zero) * weights[c];
    return (float)port_wrapping_sum(sum, bound->bias[row]) * (op->other_scale * op->weight_scale[row]);
}

static unit unit_at(const port_bound *bound, int32_t step, int32_t c) {
    const port_op *op = bound->op;
    const int8_t *in = bound->in + step * op->in_c + c, *states = states_before(bound, step);
    float sums[GATES], inputs[GATES];
    for (int32_t gate = 0; gate < GATES; gate++) {
        sums[gate] = recurrent_sum(bound, states, gate * op->out_c + c);
        inputs[gate] = (float)(in[gate * op->out_c] - op->in_zero) * op->in_scale;
    }
    unit u;
    u.r = sigmoid(inputs[RESET] + sums[RESET]);
    u.z = sigmoid(inputs[UPDATE] + sums[UPDATE]);
    u.recurrent = sums[NEW];
    u.n = hyperbolic_tangent(inputs[NEW] + u.r * u.recurrent);
    return u;
}

void port_gru_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    float *state = (float *)(void *)bound->scratch;
    for (int32_t c = 0; c < op->out_c; c++) state[c] = 0.0f;
    for (int32_t step = 0; step < step_count(op); step++)
        for (int32_t c = 0; c < op->out_c; c++) {
            unit u = unit_at(bound, step, c);
            state[c] = u.n + u.z * (state[c] - u.n);
            int32_t code = port_floor(state[c] / op->other_scale + 0.5f) + op->out_zero;
            bound->out[step * op->out_c + c] = port_clamp(code, op->out_min, op->out_max);
        }
}

/* The gradients of one row's recurrent sum, step after step, as port_gru_input_gradient leaves them. */
typedef struct row_gradient {
    const float *first;
    int32_t stride;
} row_gradient;

static row_gradient gradient_of(const port_op *op, const float *gradient, const float *target, int32_t row) {
    int32_t new_rows = NEW * op->out_c;
    if (row < new_rows) return (row_gradient){target + row, op->in_c};
    return (row_gradient){gradient + row - new_rows, op->out_c};
}

/* Add to the gradient of the states before a step what comes through its products. */
static void pass_back(const port_bound *bound, const float *gradient, const float *target, int32_t step, float *before) {
    const port_op *op = bound->op;
    for (int32_t row = 0; row < GATES * op->out_c; row++) {
        row_gradient dy = gradient_of(op, gradient, target, row);
        float passed = dy.first[step * dy.stride] * op->weight_scale[row];
        const int8_t *weights = row_of(bound, row);
        for (int32_t c = 0; c < op->out_c; c++) before[c] += passed * (float)weights[c];
    }
}

/* `gradient` is that of the states. It collects what comes back from later steps, and then holds the gradient of W_n h + b_n,
 * which differs from that of x_n by r. */
void port_gru_input_gradient(const port_bound *bound, float *gradient, float *target) {
    const port_op *op = bound->op;
    int32_t count = op->out_c;
    for (int32_t step = step_count(op) - 1; step >= 0; step--) {
        const int8_t *states = states_before(bound, step);
        float *dh = gradient + step * count, *before = step ? dh - count : 0, *dx = target + step * op->in_c;
        for (int32_t c = 0; c < count; c++) {
            unit u = unit_at(bound, step, c);
            float state = states ? (float)(states[c] - op->out_zero) * op->other_scale : 0.0f;
            float dn = dh[c] * (1.0f - u.z) * (1.0f - u.n * u.n);
            dx[RESET * count + c] = dn * u.recurrent * u.r * (1.0f - u.r);
            dx[UPDATE * count + c] = dh[c] * (state - u.n) * u.z * (1.0f - u.z);
            dx[NEW * count + c] = dn;
            if (before) before[c] += dh[c] * u.z;
            dh[c] = dn * u.r;
        }
        if (before) pass_back(bound, gradient, target, step, before);
    }
}

void port_gru_weight_update(const port_bound *bound, const float *gradient, const float *target, port_update *update) {
    const port_op *op = bound->op;
    int32_t steps = step_count(op);
    for (int32_t row = 0; row < op->trained_rows; row++) {
        row_gradient dy = gradient_of(op, gradient, target, row);
        float size = port_step_size(update, op->weight_scale[row]) * op->other_scale;
        for (int32_t c = 0; c < op->out_c; c++) {
            const int8_t *state = bound->out + c;
            float sum = 0.0f;
            for (int32_t step = 1; step < steps; step++, state += op->out_c)
                sum += dy.first[step * dy.stride] * (float)(*state - op->out_zero);
            port_apply_weight(update, bound, row * op->out_c + c, size * sum);
        }
    }
}

void port_gru_bias_update(const port_bound *bound, const float *gradient, const float *target, port_update *update) {
    const port_op *op = bound->op;
    for (int32_t row = 0; row < GATES * op->out_c; row++) {
        row_gradient dy = gradient_of(op, gradient, target, row);
        float sum = 0.0f;
        for (int32_t step = 0; step < step_count(op); step++) sum += dy.first[step * dy.stride];
        port_apply_bias(update, bound, row, op->other_scale * op->weight_scale[row], sum);
    }
}
