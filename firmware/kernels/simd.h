/* The DSP instructions the kernels use, one function each; emulated in C elsewhere, so that the same loops can be tested on
 * any host (-DPORT_SIMD_EMULATE). */
#ifndef PORT_SIMD_H
#define PORT_SIMD_H

#include <stdint.h>
#include <string.h>

#include "arithmetic.h"
#include "port_model.h"

static inline uint32_t port_load4(const void *bytes) { /* unaligned: one LDR on Cortex-M4 */
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

#if defined(__ARM_FEATURE_DSP)

/* bytes 0 and 2, sign extended to halfwords */
static inline uint32_t port_sxtb16(uint32_t x) {
    uint32_t r;
    __asm__("sxtb16 %0, %1" : "=r"(r) : "r"(x));
    return r;
}

/* bytes 1 and 3 */
static inline uint32_t port_sxtb16_odd(uint32_t x) {
    uint32_t r;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(r) : "r"(x));
    return r;
}

/* base + bytes 0 and 2, per halfword */
static inline uint32_t port_sxtab16(uint32_t base, uint32_t x) {
    uint32_t r;
    __asm__("sxtab16 %0, %1, %2" : "=r"(r) : "r"(base), "r"(x));
    return r;
}

static inline uint32_t port_sxtab16_odd(uint32_t base, uint32_t x) {
    uint32_t r;
    __asm__("sxtab16 %0, %1, %2, ror #8" : "=r"(r) : "r"(base), "r"(x));
    return r;
}

/* sum + low * low + high * high */
static inline int32_t port_smlad(uint32_t x, uint32_t y, int32_t sum) {
    int32_t r;
    __asm__("smlad %0, %1, %2, %3" : "=r"(r) : "r"(x), "r"(y), "r"(sum));
    return r;
}

static inline int32_t port_smlabb(uint32_t x, uint32_t y, int32_t sum) {
    int32_t r;
    __asm__("smlabb %0, %1, %2, %3" : "=r"(r) : "r"(x), "r"(y), "r"(sum));
    return r;
}

static inline int32_t port_smlatt(uint32_t x, uint32_t y, int32_t sum) {
    int32_t r;
    __asm__("smlatt %0, %1, %2, %3" : "=r"(r) : "r"(x), "r"(y), "r"(sum));
    return r;
}

/* high word of the 64-bit product */
static inline int32_t port_high_product(int32_t x, int32_t y) {
    int32_t r;
    __asm__("smmul %0, %1, %2" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

static inline int32_t port_saturate8(int32_t x) {
    int32_t r;
    __asm__("ssat %0, #8, %1" : "=r"(r) : "r"(x));
    return r;
}

#else

static inline int32_t port_high_product(int32_t x, int32_t y) { return (int32_t)(((int64_t)x * y) >> 32); }
static inline int32_t port_saturate8(int32_t x) { return x < -128 ? -128 : x > 127 ? 127 : x; }
static inline int32_t port_low(uint32_t x) { return (int16_t)(x & 0xFFFFu); }
static inline int32_t port_high(uint32_t x) { return (int16_t)(x >> 16); }
static inline uint32_t port_pair(int32_t low, int32_t high) { return ((uint32_t)low & 0xFFFFu) | ((uint32_t)high << 16); }
static inline int32_t port_byte(uint32_t x, int i) { return (int8_t)(x >> (8 * i) & 0xFFu); }

static inline uint32_t port_sxtb16(uint32_t x) { return port_pair(port_byte(x, 0), port_byte(x, 2)); }
static inline uint32_t port_sxtb16_odd(uint32_t x) { return port_pair(port_byte(x, 1), port_byte(x, 3)); }
static inline uint32_t port_sxtab16(uint32_t base, uint32_t x) {
    return port_pair(port_low(base) + port_byte(x, 0), port_high(base) + port_byte(x, 2));
}
static inline uint32_t port_sxtab16_odd(uint32_t base, uint32_t x) {
    return port_pair(port_low(base) + port_byte(x, 1), port_high(base) + port_byte(x, 3));
}
static inline int32_t port_smlad(uint32_t x, uint32_t y, int32_t sum) {
    return port_wrapping_sum(sum, port_wrapping_sum(port_low(x) * port_low(y), port_high(x) * port_high(y)));
}
static inline int32_t port_smlabb(uint32_t x, uint32_t y, int32_t sum) { return port_wrapping_sum(sum, port_low(x) * port_low(y)); }
static inline int32_t port_smlatt(uint32_t x, uint32_t y, int32_t sum) { return port_wrapping_sum(sum, port_high(x) * port_high(y)); }

#endif

/* port_requantize, offset and clamp with its constants in registers. Where the clamp is plain saturation (`narrow` 0, known
 * at compile time), one instruction does it. */
static inline __attribute__((always_inline)) int8_t port_finish(const port_op *op, int32_t zero, int32_t sum, int32_t multiplier,
                                                                int32_t half, int32_t shift, int narrow) {
    int32_t value = ((port_high_product(sum, multiplier) + half) >> shift) + zero;
    if (!narrow) return (int8_t)port_saturate8(value);
    return (int8_t)(value < op->out_min ? op->out_min : value > op->out_max ? op->out_max : value);
}

static inline int port_narrow(const port_op *op) { return op->out_min != -128 || op->out_max != 127; }

/* -zero in both halfwords: adding it while expanding costs nothing */
static inline uint32_t port_offset_pair(int8_t zero) {
    uint32_t offset = (uint32_t)(-zero) & 0xFFFFu;
    return offset | offset << 16;
}

#endif
