/* Quantized frozen weights: a code for each weight, a scale for each block along a row. They are decoded to floats one
 * rectangle at a time.
 *
 * Two codes of four bits share a byte, the first in its low half. Every level rounds as the scalar reference does: the
 * product in 32 bits, then to bfloat16, to the nearest, ties to even.
 */
#include "simd.h"

enum { NF4_LEVELS = 16, NF4_BLOCK = 64, INT8_BLOCK = 128 };

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* A function decodes one block; `to` needs no alignment. */
typedef void decode_block(const uint8_t *codes, float scale, const float *levels, uint8_t *to);

FOR_EVERY_LEVEL void round_levels(const float *levels, float scale, uint16_t *rounded) {
    for (int i = 0; i < NF4_LEVELS; i++)
        rounded[i] = to_bfloat16(levels[i] * scale);
}

FOR_EVERY_LEVEL void nf4_float(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    float scaled[NF4_LEVELS], two[2];
    for (int i = 0; i < NF4_LEVELS; i++)
        scaled[i] = levels[i] * scale;
    for (int i = 0; i < NF4_BLOCK / 2; i++) {
        two[0] = scaled[codes[i] & 15u];
        two[1] = scaled[codes[i] >> 4];
        memcpy(to + 8 * i, two, sizeof two);
    }
}

FOR_EVERY_LEVEL void nf4_bfloat16(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    uint16_t rounded[NF4_LEVELS], two[2];
    round_levels(levels, scale, rounded);
    for (int i = 0; i < NF4_BLOCK / 2; i++) {
        two[0] = rounded[codes[i] & 15u];
        two[1] = rounded[codes[i] >> 4];
        memcpy(to + 4 * i, two, sizeof two);
    }
}

FOR_EVERY_LEVEL void int8_float(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    float made[INT8_BLOCK];
    (void)levels;
    for (int i = 0; i < INT8_BLOCK; i++)
        made[i] = (float)(int8_t)codes[i] * scale;
    memcpy(to, made, sizeof made);
}

FOR_EVERY_LEVEL void int8_bfloat16(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    uint16_t made[INT8_BLOCK];
    (void)levels;
    for (int i = 0; i < INT8_BLOCK; i++)
        made[i] = to_bfloat16((float)(int8_t)codes[i] * scale);
    memcpy(to, made, sizeof made);
}

/* The rounded levels as two tables of bytes, so that a byte shuffle looks up sixteen codes at once. */
FOR_EVERY_LEVEL void split_levels(const float *levels, float scale, uint8_t *low, uint8_t *high) {
    uint16_t rounded[NF4_LEVELS];
    round_levels(levels, scale, rounded);
    for (int i = 0; i < NF4_LEVELS; i++) {
        low[i] = (uint8_t)rounded[i];
        high[i] = (uint8_t)(rounded[i] >> 8);
    }
}

#ifdef PACK_X86
TARGET_AVX2 static inline void nf4_bfloat16_avx2(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256i half = _mm256_set1_epi32(0x7FFF), one = _mm256_set1_epi32(1);
    __m256i rounded[2];
    for (int i = 0; i < 2; i++) {
        __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(levels + 8 * i), factor));
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
        rounded[i] = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half, odd)), 16);
    }
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded[0], rounded[1]), 0xD8);
    __m256i apart = _mm256_shuffle_epi8(words, _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6,
                                                                8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    __m128i first = _mm256_castsi256_si128(apart), second = _mm256_extracti128_si256(apart, 1);
    __m128i low = _mm_unpacklo_epi64(first, second), high = _mm_unpackhi_epi64(first, second);
    for (int i = 0; i < NF4_BLOCK / 32; i++) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + 16 * i));
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        __m128i in_order[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (int k = 0; k < 2; k++) {
            __m128i l = _mm_shuffle_epi8(low, in_order[k]), h = _mm_shuffle_epi8(high, in_order[k]);
            _mm_storeu_si128((__m128i *)(to + 64 * i + 32 * k), _mm_unpacklo_epi8(l, h));
            _mm_storeu_si128((__m128i *)(to + 64 * i + 32 * k + 16), _mm_unpackhi_epi8(l, h));
        }
    }
}

TARGET_AVX2 static inline void nf4_float_avx2(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    __m256 lower = _mm256_mul_ps(_mm256_loadu_ps(levels), factor), upper = _mm256_mul_ps(_mm256_loadu_ps(levels + 8), factor);
    for (int i = 0; i < NF4_BLOCK / 8; i++) {
        int32_t eight;
        memcpy(&eight, codes + 4 * i, sizeof eight);
        __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
        __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)); /* bit 3 of a code to the sign */
        __m256 found = _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, code), _mm256_permutevar8x32_ps(upper, code), is_upper);
        _mm256_storeu_ps((float *)(void *)(to + 32 * i), found);
    }
}
#endif

#ifdef PACK_NEON
static inline void nf4_bfloat16_neon(const uint8_t *codes, float scale, const float *levels, uint8_t *to) {
    uint8_t low_bytes[NF4_LEVELS], high_bytes[NF4_LEVELS];
    split_levels(levels, scale, low_bytes, high_bytes);
    const uint8x16_t low = vld1q_u8(low_bytes), high = vld1q_u8(high_bytes);
    for (int i = 0; i < NF4_BLOCK / 32; i++) {
        uint8x16_t pairs = vld1q_u8(codes + 16 * i);
        uint8x16x2_t in_order = vzipq_u8(vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4));
        for (int k = 0; k < 2; k++) {
            uint8x16x2_t words = vzipq_u8(vqtbl1q_u8(low, in_order.val[k]), vqtbl1q_u8(high, in_order.val[k]));
            vst1q_u8(to + 64 * i + 32 * k, words.val[0]);
            vst1q_u8(to + 64 * i + 32 * k + 16, words.val[1]);
        }
    }
}
#endif

struct rectangle {
    const uint8_t *codes;
    const float *scales;
    size_t row_items, first_row, rows, first_item, items;
};

FOR_EVERY_LEVEL void decode_rectangle(const struct rectangle *part, const float *levels, size_t block, size_t code_bits,
                                      size_t item_bytes, uint8_t *to, decode_block *decode) {
    for (size_t row = part->first_row; row < part->first_row + part->rows; row++) {
        for (size_t item = part->first_item; item < part->first_item + part->items; item += block) {
            size_t at = row * part->row_items + item;
            decode(part->codes + at * code_bits / 8, part->scales[at / block], levels, to);
            to += block * item_bytes;
        }
    }
}

#define DECODE(name, target)                                                                                           \
    target static void name(const struct rectangle *part, const float *levels, size_t item_bytes, uint8_t *to)

#define CHOOSE(nf4_words, nf4_floats)                                                                                  \
    {                                                                                                                  \
        if (levels && item_bytes == 2)                                                                                 \
            decode_rectangle(part, levels, NF4_BLOCK, 4, 2, to, nf4_words);                                            \
        else if (levels)                                                                                               \
            decode_rectangle(part, levels, NF4_BLOCK, 4, 4, to, nf4_floats);                                           \
        else if (item_bytes == 2)                                                                                      \
            decode_rectangle(part, levels, INT8_BLOCK, 8, 2, to, int8_bfloat16);                                       \
        else                                                                                                           \
            decode_rectangle(part, levels, INT8_BLOCK, 8, 4, to, int8_float);                                          \
    }

DECODE(decode_scalar, TARGET_SCALAR) CHOOSE(nf4_bfloat16, nf4_float)
#if defined(PACK_X86)
DECODE(decode_baseline, ) CHOOSE(nf4_bfloat16, nf4_float)
DECODE(decode_avx2, TARGET_AVX2) CHOOSE(nf4_bfloat16_avx2, nf4_float_avx2)
#elif defined(PACK_NEON)
DECODE(decode_baseline, ) CHOOSE(nf4_bfloat16_neon, nf4_float)
#else
DECODE(decode_baseline, ) CHOOSE(nf4_bfloat16, nf4_float)
#endif

PACK_EXPORT int64_t port_grid_decode(int level, const uint8_t *codes, const float *scales, const float *levels, size_t row_items,
                                     size_t first_row, size_t rows, size_t first_item, size_t items, size_t item_bytes,
                                     uint8_t *to) {
    const struct rectangle part = {codes, scales, row_items, first_row, rows, first_item, items};
    size_t block = levels ? NF4_BLOCK : INT8_BLOCK;
    if ((item_bytes != 2 && item_bytes != 4) || row_items % block || first_item % block || items % block)
        return PACK_UNSUITABLE;
    if (first_item > row_items || items > row_items - first_item)
        return PACK_UNSUITABLE;
    if (level <= PACK_SCALAR)
        decode_scalar(&part, levels, item_bytes, to);
#if defined(PACK_X86)
    else if (level >= PACK_AVX2)
        decode_avx2(&part, levels, item_bytes, to);
#endif
    else
        decode_baseline(&part, levels, item_bytes, to);
    return (int64_t)(rows * items * item_bytes);
}

/* -- weights that lie on a grid already */

static float item_of(const uint8_t *items, size_t i, size_t item_bytes) {
    uint32_t bits = 0;
    float value;
    memcpy((uint8_t *)&bits + 4 - item_bytes, items + item_bytes * i, item_bytes);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return the value halfway to the next larger magnitude (`step` 1) or the next smaller one (-1) of the item's type. */
static double halfway(float magnitude, size_t item_bytes, int step) {
    uint32_t bits;
    float next;
    memcpy(&bits, &magnitude, sizeof bits);
    bits += (uint32_t)step << 8 * (4 - item_bytes);
    memcpy(&next, &bits, sizeof next);
    return ((double)magnitude + (double)next) / 2;
}

/* Count the codes whose levels lie from `least` to `most`, both above zero, and find one of them. */
static int codes_between(const float *levels, int negative, double least, double most, int *code) {
    int found = 0;
    if (!levels) {
        int first = (int)least + ((double)(int)least < least), last = most < 127 ? (int)most : 127;
        *code = negative ? -first : first;
        return last - first + 1;
    }
    for (int i = 0; i < NF4_LEVELS; i++) {
        double level = negative ? -(double)levels[i] : (double)levels[i];
        if (level >= least && level <= most) {
            found++;
            *code = i;
        }
    }
    return found;
}

static int block_is(const uint8_t *items, size_t along, size_t item_bytes, const float *levels, const int8_t *codes, float scale) {
    for (size_t i = 0; i < along; i++) {
        float made = (levels ? levels[codes[i]] : (float)codes[i]) * scale;
        uint16_t rounded = to_bfloat16(made);
        if (memcmp(items + item_bytes * i, item_bytes == 4 ? (void *)&made : (void *)&rounded, item_bytes))
            return 0;
    }
    return 1;
}

enum { PASSES = 8 };

/* Find codes and a scale that decode to a block's items, bit for bit; the largest item has the largest level. For
 * each code that an item may have, the scales that round to the item form an interval. An item with only one
 * possible code narrows the interval, which leaves fewer codes for the others. */
static int encode_block(const uint8_t *items, size_t along, size_t item_bytes, const float *levels, int8_t *codes, float *scale) {
    const double margin = 1e-12, top = levels ? 1.0 : 127.0;
    uint8_t known[INT8_BLOCK];
    float largest = 0.0f;
    for (size_t i = 0; i < along; i++) {
        float value = item_of(items, i, item_bytes), magnitude = value < 0 ? -value : value;
        if (!(magnitude < 3e38f))
            return 0;
        largest = magnitude > largest ? magnitude : largest;
        known[i] = magnitude == 0;
        codes[i] = levels ? 7 : 0; /* the level zero */
    }
    if (largest == 0) {
        *scale = 0.0f;
        return block_is(items, along, item_bytes, levels, codes, *scale);
    }
    double low = halfway(largest, item_bytes, -1) / top, high = halfway(largest, item_bytes, 1) / top;
    for (int pass = 0, left = 1; pass < PASSES && left; pass++) {
        left = 0;
        for (size_t i = 0; i < along; i++) {
            float value = item_of(items, i, item_bytes), magnitude = value < 0 ? -value : value;
            int code = 0;
            if (known[i])
                continue;
            double least = halfway(magnitude, item_bytes, -1), most = halfway(magnitude, item_bytes, 1);
            int found = codes_between(levels, value < 0, least / high * (1 - margin), most / low * (1 + margin), &code);
            if (found < 1)
                return 0;
            codes[i] = (int8_t)code;
            left += found > 1;
            if (found > 1)
                continue;
            known[i] = 1;
            double level = levels ? (double)levels[code] : (double)code;
            level = level < 0 ? -level : level;
            low = least / level > low ? least / level : low;
            high = most / level < high ? most / level : high;
        }
    }
    const float tried[] = {(float)((double)largest / top), (float)((low + high) / 2), (float)low, (float)high};
    for (size_t k = 0; k < sizeof tried / sizeof *tried; k++) {
        *scale = tried[k];
        if (block_is(items, along, item_bytes, levels, codes, *scale))
            return 1;
    }
    return 0;
}

PACK_EXPORT int64_t port_grid_encode(const uint8_t *items, size_t count, size_t item_bytes, const float *levels, uint8_t *codes,
                                     float *scales) {
    size_t along = levels ? NF4_BLOCK : INT8_BLOCK;
    int8_t block[INT8_BLOCK];
    if (count % along || (item_bytes != 2 && item_bytes != 4))
        return PACK_UNSUITABLE;
    for (size_t b = 0; b < count / along; b++) {
        if (!encode_block(items + item_bytes * along * b, along, item_bytes, levels, block, scales + b))
            return PACK_UNSUITABLE;
        for (size_t i = 0; levels && i < along / 2; i++)
            codes[along / 2 * b + i] = (uint8_t)(block[2 * i] | block[2 * i + 1] << 4);
        if (!levels)
            memcpy(codes + along * b, block, along);
    }
    return (int64_t)(levels ? count / 2 : count);
}
