/* The number formats, each rounding rule in one place. tests/planner/mcu/reference.py states the same in torch int64. */
#ifndef PORT_ARITHMETIC_H
#define PORT_ARITHMETIC_H

#include <stdint.h>

/* a + b with wrap-around: parameters come from outside, and no value may be undefined behaviour. Values that the
 * compiler writes stay below 2^30 and never wrap. */
static inline int32_t port_wrapping_sum(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }

static inline int8_t port_clamp(int32_t value, int8_t low, int8_t high) {
    return (int8_t)(value < low ? low : value > high ? high : value);
}

/* floor((sum * multiplier + 2^(shift-1)) / 2^shift): round half up, exact in 64 bits. With shift >= 33 the low word of the
 * product cannot change the result, so one high multiply is enough. */
static inline int32_t port_requantize(int32_t sum, int32_t multiplier, uint8_t shift) {
    int32_t high = (int32_t)(((int64_t)sum * multiplier) >> 32);
    return (high + ((int32_t)1 << (shift - 33))) >> (shift - 32);
}

/* floor((2 sum + count) / (2 count)): the mean, rounded half up, also for negative sums. */
static inline int32_t port_rounded_mean(int32_t sum, int32_t count) {
    int32_t numerator = 2 * sum + count, denominator = 2 * count;
    int32_t quotient = numerator / denominator;
    return quotient - (numerator % denominator < 0);
}

/* Limit to [-bound, bound]; a NaN becomes bound, so that every build converts it to the same integer. */
static inline float port_limit(float value, float bound) {
    if (!(value <= bound)) return bound;
    return value < -bound ? -bound : value;
}

static inline int32_t port_round_half_away(float value) {
    return (int32_t)(value >= 0.0f ? value + 0.5f : value - 0.5f);
}

static inline int32_t port_floor(float value) {
    int32_t whole = (int32_t)value;
    return whole - ((float)whole > value);
}

/* Numerical Recipes' 32-bit linear congruential generator. */
static inline uint32_t port_draw(uint32_t *generator) { return *generator = *generator * 1664525u + 1013904223u; }

/* The generator after `count` draws: a step of n draws is x -> a^n x + c (a^(n-1) + ... + 1), built up bit by bit. */
static inline void port_skip_draws(uint32_t *generator, uint32_t count) {
    uint32_t factor = 1664525u, summand = 1013904223u;
    for (; count > 0; count >>= 1) {
        if (count & 1u) *generator = *generator * factor + summand;
        summand *= factor + 1u;
        factor *= factor;
    }
}

/* The upper 24 bits of a draw as a float in [0, 1). */
static inline float port_uniform(uint32_t drawn) { return (float)(drawn >> 8) * (1.0f / 16777216.0f); }

#endif
