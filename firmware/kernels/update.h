/* The in-place update of one parameter. The rule is chosen per call: it is never in an inner loop of products. */
#ifndef PORT_UPDATE_H
#define PORT_UPDATE_H

#include "arithmetic.h"
#include "kernels.h"

/* Quantised step per unit of real gradient. With quantisation-aware scaling (arXiv 2206.15472, section 2.1, in the real
 * domain) one learning rate fits every layer: w_q -= rate * gradient / scale. Without: d(loss)/d(w_q) = gradient * scale. */
static inline float port_step_size(const port_update *update, float scale) {
    return update->scaling ? update->rate / scale : update->rate * scale;
}

static inline int32_t port_q88_step(float step) { return port_round_half_away(port_limit(step * 256.0f, 65280.0f)); }

/* Q8.8: value = weight * 256 + low - 128, so that weight is the value rounded half up. */
static inline void port_apply_q88(int8_t *weight, uint8_t *low, float step) {
    int32_t value = *weight * 256 + *low - port_q88_step(step);
    if (value > 127 * 256 + 255) value = 127 * 256 + 255;
    if (value < -127 * 256) value = -127 * 256;
    *weight = (int8_t)(value >> 8);
    *low = (uint8_t)(value & 255);
}

/* One draw per parameter whatever its step and rule; the stochastic rule adds it, in [0, 1), before rounding down. */
static inline uint32_t port_next_draw(port_update *update) { return port_draw(&update->generator) ^ update->flip; }

/* weight[at] -= step, rounded by the rule, kept within [-127, 127]. */
static inline void port_apply_weight(port_update *update, const port_bound *bound, int32_t at, float step) {
    int8_t *weight = bound->trained + at;
    uint32_t drawn = port_next_draw(update);
    if (step == 0.0f) return;
    if (update->rule == PORT_RULE_Q88) {
        port_apply_q88(weight, bound->low_bytes + at, step);
        return;
    }
    int32_t value = *weight;
    step = port_limit(step, 255.0f);
    if (update->rule == PORT_RULE_STOCHASTIC) {
        value += port_floor(port_uniform(drawn) - step);
    } else if (update->rule == PORT_RULE_NEAREST) {
        value -= port_round_half_away(step);
    } else {
        value = (int32_t)((float)value - step);
    }
    *weight = port_clamp(value, -127, 127);
}

static inline int32_t port_within_bias(int32_t bias) {
    const int32_t limit = (int32_t)1 << 30;
    return bias > limit ? limit : bias < -limit ? -limit : bias;
}

/* Bias is int32 at `scale`, finer than the weights, but the rule holds for it too. `sum`: its gradient. */
static inline void port_apply_bias(port_update *update, const port_bound *bound, int32_t at, float scale, float sum) {
    uint32_t drawn = port_next_draw(update);
    if (sum == 0.0f) return;
    float step = port_limit(port_step_size(update, scale) * sum, 1.0e8f);
    int32_t change = update->rule == PORT_RULE_STOCHASTIC ? port_floor(port_uniform(drawn) - step)
                     : update->rule == PORT_RULE_TRUNCATE ? -(int32_t)step
                                                          : -port_round_half_away(step);
    bound->trained_bias[at] = port_within_bias(port_within_bias(bound->trained_bias[at]) + change); /* 2^30 + 10^8: no overflow */
}

#endif
