/* Stores of 32-bit floats only what the backward pass of hardtanh (ReLU6) needs: whether each lies between two
 * numbers. One bit an item, read by port_sign_select. Torch's result for a NaN depends on its place in a vector, so
 * items with a NaN are not packed. */
#include "simd.h"

/* Each function packs the items that fill whole vectors and returns where it stopped, a multiple of 8. `nan` is set
 * if any of them is NaN. */

#ifdef PACK_X86
static size_t pack_sse2(const uint8_t *items, size_t count, float low, float high, uint8_t *packed, int *nan) {
    const __m128 above = _mm_set1_ps(low), below = _mm_set1_ps(high);
    __m128 unordered = _mm_setzero_ps();
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m128 a = _mm_loadu_ps((const float *)(const void *)(items + 4 * done));
        __m128 b = _mm_loadu_ps((const float *)(const void *)(items + 4 * done + 16));
        unordered = _mm_or_ps(unordered, _mm_cmpunord_ps(a, b));
        int first = _mm_movemask_ps(_mm_and_ps(_mm_cmpgt_ps(a, above), _mm_cmplt_ps(a, below)));
        int second = _mm_movemask_ps(_mm_and_ps(_mm_cmpgt_ps(b, above), _mm_cmplt_ps(b, below)));
        packed[done / 8] = (uint8_t)(first | second << 4);
    }
    *nan = _mm_movemask_ps(unordered) != 0;
    return done;
}

TARGET_AVX2 static size_t pack_avx2(const uint8_t *items, size_t count, float low, float high, uint8_t *packed, int *nan) {
    const __m256 above = _mm256_set1_ps(low), below = _mm256_set1_ps(high);
    __m256 unordered = _mm256_setzero_ps();
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m256 v = _mm256_loadu_ps((const float *)(const void *)(items + 4 * done));
        __m256 inside = _mm256_and_ps(_mm256_cmp_ps(v, above, _CMP_GT_OQ), _mm256_cmp_ps(v, below, _CMP_LT_OQ));
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        packed[done / 8] = (uint8_t)_mm256_movemask_ps(inside);
    }
    *nan = _mm256_movemask_ps(unordered) != 0;
    return done;
}

TARGET_AVX512 static size_t pack_avx512(const uint8_t *items, size_t count, float low, float high, uint8_t *packed, int *nan) {
    const __m512 above = _mm512_set1_ps(low), below = _mm512_set1_ps(high);
    unsigned unordered = 0;
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        __m512 v = _mm512_loadu_ps(items + 4 * done);
        uint16_t word = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, above, _CMP_GT_OQ), v, below, _CMP_LT_OQ);
        unordered |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        memcpy(packed + done / 8, &word, sizeof word);
    }
    *nan = unordered != 0;
    return done;
}
#endif

#ifdef PACK_NEON
static size_t pack_neon(const uint8_t *items, size_t count, float low, float high, uint8_t *packed, int *nan) {
    static const uint32_t LOW[4] = {1, 2, 4, 8}, HIGH[4] = {16, 32, 64, 128};
    const float32x4_t above = vdupq_n_f32(low), below = vdupq_n_f32(high);
    const uint32x4_t low_bits = vld1q_u32(LOW), high_bits = vld1q_u32(HIGH);
    uint32x4_t ordered = vdupq_n_u32(UINT32_MAX);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        float32x4_t a = vreinterpretq_f32_u8(vld1q_u8(items + 4 * done));
        float32x4_t b = vreinterpretq_f32_u8(vld1q_u8(items + 4 * done + 16));
        uint32x4_t first = vandq_u32(vandq_u32(vcgtq_f32(a, above), vcltq_f32(a, below)), low_bits);
        uint32x4_t second = vandq_u32(vandq_u32(vcgtq_f32(b, above), vcltq_f32(b, below)), high_bits);
        ordered = vandq_u32(ordered, vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b)));
        packed[done / 8] = (uint8_t)vaddvq_u32(vorrq_u32(first, second));
    }
    *nan = vminvq_u32(ordered) == 0;
    return done;
}
#endif

PACK_EXPORT int64_t port_inside_pack(int level, const uint8_t *items, size_t count, float low, float high, uint8_t *packed,
                                     size_t capacity) {
    size_t bytes = count / 8 + (count % 8 != 0), done = 0;
    int nan = 0;
    if (bytes > capacity)
        return PACK_OVERFLOW;
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = pack_avx512(items, count, low, high, packed, &nan);
    else if (level >= PACK_AVX2)
        done = pack_avx2(items, count, low, high, packed, &nan);
    else if (level >= PACK_BASELINE)
        done = pack_sse2(items, count, low, high, packed, &nan);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = pack_neon(items, count, low, high, packed, &nan);
#else
    (void)level;
#endif
    for (; done < count; done += 8) {
        uint8_t byte = 0;
        for (size_t i = done; i < count && i < done + 8; i++) {
            float value;
            memcpy(&value, items + 4 * i, sizeof value);
            nan |= value != value;
            byte = (uint8_t)(byte | (value > low && value < high) << (i - done));
        }
        packed[done / 8] = byte;
    }
    return nan ? PACK_UNSUITABLE : (int64_t)bytes;
}
