/* Depthwise convolution, four channels at a time: each tap is one word of input and one word of weights. */
#include "kernels.h"

#if PORT_SIMD

#include "arithmetic.h"
#include "geometry.h"
#include "simd.h"

/* Four channels of one output. */
typedef struct lanes {
    int32_t s0, s1, s2, s3;
} lanes;

static inline void add_tap(lanes *l, const int8_t *x, const int8_t *w, uint32_t offset) {
    uint32_t xs = port_load4(x), ws = port_load4(w);
    uint32_t even = port_sxtab16(offset, xs), odd = port_sxtab16_odd(offset, xs);
    uint32_t even_w = port_sxtb16(ws), odd_w = port_sxtb16_odd(ws);
    l->s0 = port_smlabb(even, even_w, l->s0), l->s1 = port_smlabb(odd, odd_w, l->s1);
    l->s2 = port_smlatt(even, even_w, l->s2), l->s3 = port_smlatt(odd, odd_w, l->s3);
}

#define TAP_ASM(address_x, address_w)                   \
    "ldr %[xs], [%[x]" address_x "]\n"                  \
    "ldr %[ws], [%[w]" address_w "]\n"                  \
    "sxtab16 %[even], %[offset], %[xs]\n"               \
    "sxtab16 %[xs], %[offset], %[xs], ror #8\n"         \
    "sxtb16 %[weven], %[ws]\n"                          \
    "sxtb16 %[ws], %[ws], ror #8\n"                     \
    "smlabb %[s0], %[even], %[weven], %[s0]\n"          \
    "smlatt %[s2], %[even], %[weven], %[s2]\n"          \
    "smlabb %[s1], %[xs], %[ws], %[s1]\n"               \
    "smlatt %[s3], %[xs], %[ws], %[s3]\n"

/* Three taps of one kernel row: 30 instructions for 12 products. */
static inline void add_three_taps(lanes *l, const int8_t *x, const int8_t *w, int32_t step, uint32_t offset) {
#if defined(__ARM_FEATURE_DSP)
    uint32_t xs, ws, even, weven;
    __asm__ volatile(TAP_ASM("", "") TAP_ASM(", %[step]", ", %[step]") TAP_ASM(", %[step], lsl #1", ", %[step], lsl #1")
                     : [s0] "+r"(l->s0), [s1] "+r"(l->s1), [s2] "+r"(l->s2), [s3] "+r"(l->s3), [xs] "=&r"(xs), [ws] "=&r"(ws),
                       [even] "=&r"(even), [weven] "=&r"(weven)
                     : [x] "r"(x), [w] "r"(w), [step] "r"(step), [offset] "r"(offset)
                     : "memory");
#else
    for (int v = 0; v < 3; v++) add_tap(l, x + v * step, w + v * step, offset);
#endif
}

static inline __attribute__((always_inline)) int8_t finish(const port_op *op, int32_t zero, int32_t sum, int32_t c, int narrow) {
    int32_t shift = op->shift[c];
    return port_finish(op, zero, sum, op->multiplier[c], (int32_t)1 << (shift - 33), shift - 32, narrow);
}

/* The taps of one output pixel that fall inside the input. */
typedef struct window {
    const int8_t *x, *w; /* at the first such tap, channel 0 */
    int32_t rows, columns, step, x_row, w_row;
} window;

static lanes sum_window(const window *at, int32_t c, const int32_t *bias, uint32_t offset) {
    lanes l = {bias[c], bias[c + 1], bias[c + 2], bias[c + 3]};
    const int8_t *x = at->x + c, *w = at->w + c;
    const int32_t step = at->step, x_row = at->x_row, w_row = at->w_row;
    if (at->columns == 3) {
        for (int32_t u = at->rows; u > 0; u--, x += x_row, w += w_row) add_three_taps(&l, x, w, step, offset);
        return l;
    }
    for (int32_t u = at->rows; u > 0; u--, x += x_row, w += w_row)
        for (int32_t v = 0; v < at->columns; v++) add_tap(&l, x + v * step, w + v * step, offset);
    return l;
}

static inline __attribute__((always_inline)) void four_channels(const port_op *op, const window *at, const int32_t *bias,
                                                                uint32_t offset, int8_t *out, int narrow) {
    const int32_t zero = op->out_zero;
    for (int32_t c = 0; c + 4 <= op->out_c; c += 4) {
        lanes l = sum_window(at, c, bias, offset);
        int8_t first = finish(op, zero, l.s0, c, narrow), second = finish(op, zero, l.s1, c + 1, narrow);
        int8_t third = finish(op, zero, l.s2, c + 2, narrow), fourth = finish(op, zero, l.s3, c + 3, narrow);
        out[c] = first, out[c + 1] = second, out[c + 2] = third, out[c + 3] = fourth;
    }
}

static void pixel_saturated(const port_op *op, const window *at, const int32_t *bias, uint32_t offset, int8_t *out) {
    four_channels(op, at, bias, offset, out, 0);
}

static void pixel_clamped(const port_op *op, const window *at, const int32_t *bias, uint32_t offset, int8_t *out) {
    four_channels(op, at, bias, offset, out, 1);
}

static int8_t one_channel(const port_op *op, const window *at, int32_t bias, int32_t c) {
    int32_t sum = bias;
    for (int32_t u = 0; u < at->rows; u++)
        for (int32_t v = 0; v < at->columns; v++)
            sum = port_wrapping_sum(
                sum, (at->x[u * at->x_row + v * at->step + c] - op->in_zero) * at->w[u * at->w_row + v * at->step + c]);
    return finish(op, op->out_zero, sum, c, 1);
}

void port_depthwise_forward_simd(const port_bound *bound) {
    const port_op *op = bound->op;
    const int8_t *weight = op->trained_rows ? bound->trained : bound->frozen;
    const int32_t *bias = bound->bias;
    const uint32_t offset = port_offset_pair(op->in_zero);
    const int narrow = port_narrow(op);
    window at = {0, 0, 0, 0, op->in_c, op->in_w * op->in_c, op->kernel_w * op->in_c};
    int8_t *out = bound->out + bound->first * op->out_w * op->out_c;
    for (int32_t i = bound->first; i < bound->last; i++) {
        port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
        at.rows = vertical.last - vertical.first;
        for (int32_t j = 0; j < op->out_w; j++, out += op->out_c) {
            port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
            at.columns = horizontal.last - horizontal.first;
            at.x = bound->in + ((vertical.start + vertical.first) * op->in_w + horizontal.start + horizontal.first) * op->in_c;
            at.w = weight + (vertical.first * op->kernel_w + horizontal.first) * op->in_c;
            narrow ? pixel_clamped(op, &at, bias, offset, out) : pixel_saturated(op, &at, bias, offset, out);
            for (int32_t c = op->out_c & ~3; c < op->out_c; c++) out[c] = one_channel(op, &at, bias[c], c);
        }
    }
}

#endif
