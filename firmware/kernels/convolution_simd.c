/* Convolution with dual 16-bit multiply-accumulate: two output pixels times two output channels at a time.
 *
 * The input window of each pixel is expanded once to int16, zero point subtracted, in scratch (a "column"); every group of
 * four values is stored as bytes 0, 2, 1, 3, which is how SXTB16 splits a word of weights.
 */
#include "kernels.h"

#if PORT_SIMD

#include "arithmetic.h"
#include "geometry.h"
#include "simd.h"

enum {
    GROUP = 4,  /* values per group of one column */
    PAIR = 8,   /* values per group of both columns, side by side */
    CHUNK = 16, /* rows whose sums wait on the stack: few enough for a small stack, many enough to keep the loops apart */
};

typedef struct column_plan {
    int32_t length, groups; /* values per column; whole and broken groups */
    uint32_t offset;        /* -zero, twice */
} column_plan;

/* Groups of one column; the other column's groups lie between them. */
static void expand_groups(int16_t *column, const int8_t *x, int32_t groups, uint32_t offset) {
    uint32_t *word = (uint32_t *)(void *)column;
    for (; groups > 0; groups--, x += GROUP, word += PAIR / 2) {
        uint32_t bytes = port_load4(x);
        word[0] = port_sxtab16(offset, bytes);
        word[1] = port_sxtab16_odd(offset, bytes);
    }
}

/* A run of values that starts or ends inside a group. */
static void expand_bytes(int16_t *column, int32_t at, const int8_t *x, int32_t count, int32_t zero) {
    static const uint8_t place[GROUP] = {0, 2, 1, 3};
    for (int32_t i = 0; i < count; i++, at++) column[(at >> 2) * PAIR + place[at & 3]] = (int16_t)(x[i] - zero);
}

static void clear_groups(int16_t *column, int32_t groups) { /* padding is the real zero */
    for (; groups > 0; groups--, column += PAIR) memset(column, 0, GROUP * sizeof *column);
}

/* 1x1, stride 1: the window is the pixel itself. */
static void expand_pixel(const port_op *op, const column_plan *plan, int16_t *column, const int8_t *x) {
    int32_t whole = plan->length / GROUP, tail = plan->length % GROUP;
    expand_groups(column, x, whole, plan->offset);
    if (!tail) return;
    clear_groups(column + whole * PAIR, 1);
    expand_bytes(column, whole * GROUP, x + whole * GROUP, tail, op->in_zero);
}

static void expand_window(const port_bound *bound, const column_plan *plan, int16_t *column, int32_t i, int32_t j) {
    const port_op *op = bound->op;
    port_taps vertical = port_window(i, op->stride_h, op->pad_top, op->kernel_h, op->in_h);
    port_taps horizontal = port_window(j, op->stride_w, op->pad_left, op->kernel_w, op->in_w);
    int32_t run = (horizontal.last - horizontal.first) * op->in_c, row = op->kernel_w * op->in_c;
    int clipped = run != row || vertical.last - vertical.first != op->kernel_h;
    if (clipped)
        clear_groups(column, plan->groups);
    else if (plan->length % GROUP)
        clear_groups(column + (plan->groups - 1) * PAIR, 1);
    for (int32_t u = vertical.first; u < vertical.last; u++) {
        const int8_t *x = bound->in + ((vertical.start + u) * op->in_w + horizontal.start + horizontal.first) * op->in_c;
        int32_t at = u * row + horizontal.first * op->in_c;
        if (op->in_c % GROUP == 0)
            expand_groups(column + at * 2, x, run / GROUP, plan->offset);
        else
            expand_bytes(column, at, x, run, op->in_zero);
    }
}

/* The last, broken group of a row of weights. */
static inline uint32_t load_tail(const int8_t *w, int32_t count) {
    uint32_t word = (uint8_t)w[0];
    if (count > 1) word |= (uint32_t)(uint8_t)w[1] << 8;
    if (count > 2) word |= (uint32_t)(uint8_t)w[2] << 16;
    return word;
}

/* Adds one group to the sums of two rows (w, v) times two columns: s[0], s[1] of row w, s[2], s[3] of row v. */
static inline void multiply_group(int32_t *s, uint32_t w, uint32_t v, const uint32_t *x) {
    uint32_t even = port_sxtb16(w), odd = port_sxtb16_odd(w);
    s[0] = port_smlad(odd, x[1], port_smlad(even, x[0], s[0]));
    s[1] = port_smlad(odd, x[3], port_smlad(even, x[2], s[1]));
    even = port_sxtb16(v), odd = port_sxtb16_odd(v);
    s[2] = port_smlad(odd, x[1], port_smlad(even, x[0], s[2]));
    s[3] = port_smlad(odd, x[3], port_smlad(even, x[2], s[3]));
}

/* Adds `groups` > 0 groups to four sums; leaves w and v behind the last one. The hot loop: 18 instructions for 16 products,
 * by hand because compilers spill one of its fourteen registers. */
#if defined(__ARM_FEATURE_DSP)
#define MULTIPLY_GROUPS(s00, s01, s10, s11, w, v, x, groups)                                                             \
    do {                                                                                                                 \
        const int8_t *end_ = (w) + (groups) * GROUP;                                                                     \
        uint32_t x0_, x1_, y0_, y1_, word_, even_;                                                                       \
        __asm__ volatile("1:\n"                                                                                          \
                         "ldrd %[x0], %[x1], [%[at]], #8\n"                                                              \
                         "ldr %[word], [%[p]], #4\n"                                                                     \
                         "ldrd %[y0], %[y1], [%[at]], #8\n"                                                              \
                         "sxtb16 %[even], %[word]\n"                                                                     \
                         "sxtb16 %[word], %[word], ror #8\n"                                                             \
                         "smlad %[a], %[even], %[x0], %[a]\n"                                                            \
                         "smlad %[b], %[even], %[y0], %[b]\n"                                                            \
                         "smlad %[a], %[word], %[x1], %[a]\n"                                                            \
                         "smlad %[b], %[word], %[y1], %[b]\n"                                                            \
                         "ldr %[word], [%[q]], #4\n"                                                                     \
                         "cmp %[p], %[end]\n"                                                                            \
                         "sxtb16 %[even], %[word]\n"                                                                     \
                         "sxtb16 %[word], %[word], ror #8\n"                                                             \
                         "smlad %[c], %[even], %[x0], %[c]\n"                                                            \
                         "smlad %[d], %[even], %[y0], %[d]\n"                                                            \
                         "smlad %[c], %[word], %[x1], %[c]\n"                                                            \
                         "smlad %[d], %[word], %[y1], %[d]\n"                                                            \
                         "bne 1b\n"                                                                                      \
                         : [a] "+r"(s00), [b] "+r"(s01), [c] "+r"(s10), [d] "+r"(s11), [p] "+r"(w), [q] "+r"(v),         \
                           [at] "+r"(x), [x0] "=&r"(x0_), [x1] "=&r"(x1_), [y0] "=&r"(y0_), [y1] "=&r"(y1_),             \
                           [word] "=&r"(word_), [even] "=&r"(even_)                                                      \
                         : [end] "r"(end_)                                                                               \
                         : "cc", "memory");                                                                              \
    } while (0)
#else
#define MULTIPLY_GROUPS(s00, s01, s10, s11, w, v, x, groups)                              \
    do {                                                                                  \
        int32_t s_[4] = {s00, s01, s10, s11};                                             \
        for (int32_t left_ = groups; left_ > 0; left_--, w += GROUP, v += GROUP, x += 4)  \
            multiply_group(s_, port_load4(w), port_load4(v), x);                          \
        s00 = s_[0], s01 = s_[1], s10 = s_[2], s11 = s_[3];                               \
    } while (0)
#endif

/* sums[row][column] of `count` rows; an odd last row is computed twice. */
static __attribute__((noinline)) void sum_rows(const int8_t *w, int32_t length, const uint32_t *columns, const int32_t *bias,
                                               int32_t *sums, int32_t count) {
    const int32_t whole = length / GROUP, tail = length % GROUP;
    for (; count > 0; count -= 2) {
        const uint32_t *x = columns;
        const int8_t *v = count > 1 ? w + length : w;
        int32_t s00 = *bias++, s01 = s00, s10 = count > 1 ? *bias++ : s00, s11 = s10;
        if (whole) MULTIPLY_GROUPS(s00, s01, s10, s11, w, v, x, whole);
        *sums++ = s00, *sums++ = s01, *sums++ = s10, *sums++ = s11;
        w = v + tail;
    }
}

static __attribute__((noinline)) void add_tails(const int8_t *weight, int32_t length, const uint32_t *columns, int32_t *sums, int32_t count) {
    const int32_t whole = length / GROUP, tail = length % GROUP;
    columns += whole * (PAIR / 2);
    weight += whole * GROUP;
    for (; count > 0; count -= 2, sums += 4, weight += 2 * length)
        multiply_group(sums, load_tail(weight, tail), load_tail(count > 1 ? weight + length : weight, tail), columns);
}

static inline __attribute__((always_inline)) void finish_rows(const port_op *op, int32_t first, const int32_t *sums, int32_t count,
                                                              int8_t *out_a, int8_t *out_b, int narrow) {
    const int32_t *multiplier = op->multiplier + first, zero = op->out_zero;
    const uint8_t *shift = op->shift + first;
    for (out_a += first, out_b += first; count > 0; count--, sums += 2) {
        int32_t factor = *multiplier++, bits = *shift++ - 32, half = (int32_t)1 << (bits - 1);
        *out_a++ = port_finish(op, zero, sums[0], factor, half, bits, narrow);
        *out_b++ = port_finish(op, zero, sums[1], factor, half, bits, narrow);
    }
}

static __attribute__((noinline)) void finish_saturated(const port_op *op, int32_t first, const int32_t *sums, int32_t count,
                                                       int8_t *out_a, int8_t *out_b) {
    finish_rows(op, first, sums, count, out_a, out_b, 0);
}

static __attribute__((noinline)) void finish_clamped(const port_op *op, int32_t first, const int32_t *sums, int32_t count,
                                                     int8_t *out_a, int8_t *out_b) {
    finish_rows(op, first, sums, count, out_a, out_b, 1);
}

/* Rows [first, last), whose weights start at `weight`, for both columns. */
static void multiply_rows(const port_bound *bound, const int8_t *weight, int32_t length, int32_t first, int32_t last, int8_t *out_a,
                          int8_t *out_b) {
    const uint32_t *columns = (const uint32_t *)(const void *)bound->scratch;
    const int narrow = port_narrow(bound->op);
    int32_t sums[2 * CHUNK];
    for (; first < last; first += CHUNK, weight += CHUNK * length) {
        int32_t count = last - first < CHUNK ? last - first : CHUNK;
        sum_rows(weight, length, columns, bound->bias + first, sums, count);
        if (length % GROUP) add_tails(weight, length, columns, sums, count);
        (narrow ? finish_clamped : finish_saturated)(bound->op, first, sums, count, out_a, out_b);
    }
}

void port_conv_forward_simd(const port_bound *bound) {
    const port_op *op = bound->op;
    column_plan plan = {op->kernel_h * op->kernel_w * op->in_c, 0, port_offset_pair(op->in_zero)};
    plan.groups = (plan.length + GROUP - 1) / GROUP;
    int32_t pixels = bound->last * op->out_w;
    int pointwise = port_is_pointwise(op);
    for (int32_t p = bound->first * op->out_w; p < pixels; p += 2) {
        int32_t q = p + 1 < pixels ? p + 1 : p; /* an odd last pixel is computed twice */
        for (int side = 0; side < 2; side++) {
            int32_t at = side ? q : p;
            int16_t *column = bound->scratch + side * GROUP;
            if (pointwise)
                expand_pixel(op, &plan, column, bound->in + at * op->in_c);
            else
                expand_window(bound, &plan, column, at / op->out_w, at % op->out_w);
        }
        int8_t *out_a = bound->out + p * op->out_c, *out_b = bound->out + q * op->out_c;
        multiply_rows(bound, bound->trained, plan.length, 0, op->trained_rows, out_a, out_b);
        multiply_rows(bound, bound->frozen, plan.length, op->trained_rows, op->out_c, out_a, out_b);
    }
}

#endif
