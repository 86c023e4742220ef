/* 32-bit floats that are each +0 or one other value, such as a scaled dropout mask: that value, then one bit an
 * item. Products are computed directly from the bits, with the same bits as torch's mul of the items. */
#include "simd.h"

#define HEADER_BYTES 8u

static uint32_t item_at(const uint8_t *items, size_t i) {
    uint32_t bits;
    memcpy(&bits, items + 4 * i, sizeof bits);
    return bits;
}

static uint32_t other_value(const uint8_t *items, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (item_at(items, i))
            return item_at(items, i);
    return 0;
}

static int pack_tail(const uint8_t *items, size_t done, size_t count, uint32_t value, uint8_t *packed) {
    int strange = 0;
    for (; done < count; done += 8) {
        uint8_t byte = 0;
        for (size_t i = done; i < count && i < done + 8; i++) {
            uint32_t bits = item_at(items, i);
            strange |= bits != 0 && bits != value;
            byte = (uint8_t)(byte | (bits != 0) << (i - done));
        }
        packed[done / 8] = byte;
    }
    return strange;
}

static void unpack_tail(const uint8_t *packed, size_t done, size_t count, uint32_t value, uint8_t *items) {
    for (; done < count; done++) {
        uint32_t bits = value & (0u - (packed[done / 8] >> (done % 8) & 1u));
        memcpy(items + 4 * done, &bits, sizeof bits);
    }
}

static void multiply_tail(const uint8_t *packed, const uint8_t *factors, size_t done, size_t count, uint32_t value, uint8_t *to) {
    for (; done < count; done++) {
        uint32_t bits = value & (0u - (packed[done / 8] >> (done % 8) & 1u));
        float item, factor;
        memcpy(&item, &bits, sizeof item);
        memcpy(&factor, factors + 4 * done, sizeof factor);
        factor = factor * item;
        memcpy(to + 4 * done, &factor, sizeof factor);
    }
}

/* Each function handles the items that fill whole vectors and returns where it stopped, a multiple of 8. */

#ifdef PACK_X86
TARGET_AVX2 static __m256i items_avx2(uint8_t byte, __m256i value) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_and_si256(value, _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), bits), bits));
}

TARGET_AVX2 static size_t pack_avx2(const uint8_t *items, size_t count, uint32_t value, uint8_t *packed, int *strange) {
    const __m256i other = _mm256_set1_epi32((int)value), zero = _mm256_setzero_si256();
    __m256i known = _mm256_set1_epi32(-1);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(items + 4 * done));
        __m256i none = _mm256_cmpeq_epi32(v, zero);
        known = _mm256_and_si256(known, _mm256_or_si256(none, _mm256_cmpeq_epi32(v, other)));
        packed[done / 8] = (uint8_t)~_mm256_movemask_ps(_mm256_castsi256_ps(none));
    }
    *strange |= _mm256_movemask_epi8(known) != -1;
    return done;
}

TARGET_AVX2 static size_t unpack_avx2(const uint8_t *packed, size_t count, uint32_t value, uint8_t *items) {
    const __m256i other = _mm256_set1_epi32((int)value);
    size_t done = 0;
    for (; count - done >= 8; done += 8)
        _mm256_storeu_si256((__m256i *)(void *)(items + 4 * done), items_avx2(packed[done / 8], other));
    return done;
}

TARGET_AVX2 static size_t multiply_avx2(const uint8_t *packed, const uint8_t *factors, size_t count, uint32_t value, uint8_t *to) {
    const __m256i other = _mm256_set1_epi32((int)value);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m256 item = _mm256_castsi256_ps(items_avx2(packed[done / 8], other));
        __m256 factor = _mm256_loadu_ps((const float *)(const void *)(factors + 4 * done));
        _mm256_storeu_ps((float *)(void *)(to + 4 * done), _mm256_mul_ps(factor, item));
    }
    return done;
}

TARGET_AVX512 static size_t pack_avx512(const uint8_t *items, size_t count, uint32_t value, uint8_t *packed, int *strange) {
    const __m512i other = _mm512_set1_epi32((int)value), zero = _mm512_setzero_si512();
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        __m512i v = _mm512_loadu_si512(items + 4 * done);
        uint16_t word = _mm512_cmpneq_epi32_mask(v, zero);
        *strange |= (word & _mm512_cmpneq_epi32_mask(v, other)) != 0;
        memcpy(packed + done / 8, &word, sizeof word);
    }
    return done;
}

TARGET_AVX512 static size_t unpack_avx512(const uint8_t *packed, size_t count, uint32_t value, uint8_t *items) {
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint16_t mask;
        memcpy(&mask, packed + done / 8, sizeof mask);
        _mm512_storeu_si512(items + 4 * done, _mm512_maskz_set1_epi32(mask, (int)value));
    }
    return done;
}

TARGET_AVX512 static size_t multiply_avx512(const uint8_t *packed, const uint8_t *factors, size_t count, uint32_t value, uint8_t *to) {
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint16_t mask;
        memcpy(&mask, packed + done / 8, sizeof mask);
        __m512 item = _mm512_castsi512_ps(_mm512_maskz_set1_epi32(mask, (int)value));
        _mm512_storeu_ps(to + 4 * done, _mm512_mul_ps(_mm512_loadu_ps(factors + 4 * done), item));
    }
    return done;
}
#endif

#ifdef PACK_NEON
static const uint32_t NEON_LOW[4] = {1, 2, 4, 8}, NEON_HIGH[4] = {16, 32, 64, 128};

static size_t pack_neon(const uint8_t *items, size_t count, uint32_t value, uint8_t *packed, int *strange) {
    const uint32x4_t low = vld1q_u32(NEON_LOW), high = vld1q_u32(NEON_HIGH), other = vdupq_n_u32(value);
    uint32x4_t wrong = vdupq_n_u32(0);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(items + 4 * done)), b = vreinterpretq_u32_u8(vld1q_u8(items + 4 * done + 16));
        uint32x4_t first = vtstq_u32(a, a), second = vtstq_u32(b, b);
        wrong = vorrq_u32(wrong, vbicq_u32(first, vceqq_u32(a, other)));
        wrong = vorrq_u32(wrong, vbicq_u32(second, vceqq_u32(b, other)));
        packed[done / 8] = (uint8_t)vaddvq_u32(vorrq_u32(vandq_u32(first, low), vandq_u32(second, high)));
    }
    *strange |= vmaxvq_u32(wrong) != 0;
    return done;
}

static size_t unpack_neon(const uint8_t *packed, size_t count, uint32_t value, uint8_t *items) {
    const uint32x4_t low = vld1q_u32(NEON_LOW), high = vld1q_u32(NEON_HIGH), other = vdupq_n_u32(value);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint32x4_t byte = vdupq_n_u32(packed[done / 8]);
        vst1q_u8(items + 4 * done, vreinterpretq_u8_u32(vandq_u32(other, vtstq_u32(byte, low))));
        vst1q_u8(items + 4 * done + 16, vreinterpretq_u8_u32(vandq_u32(other, vtstq_u32(byte, high))));
    }
    return done;
}

static size_t multiply_neon(const uint8_t *packed, const uint8_t *factors, size_t count, uint32_t value, uint8_t *to) {
    const uint32x4_t low = vld1q_u32(NEON_LOW), high = vld1q_u32(NEON_HIGH), other = vdupq_n_u32(value);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint32x4_t byte = vdupq_n_u32(packed[done / 8]);
        float32x4_t a = vreinterpretq_f32_u8(vld1q_u8(factors + 4 * done)), b = vreinterpretq_f32_u8(vld1q_u8(factors + 4 * done + 16));
        float32x4_t first = vreinterpretq_f32_u32(vandq_u32(other, vtstq_u32(byte, low)));
        float32x4_t second = vreinterpretq_f32_u32(vandq_u32(other, vtstq_u32(byte, high)));
        vst1q_u8(to + 4 * done, vreinterpretq_u8_f32(vmulq_f32(a, first)));
        vst1q_u8(to + 4 * done + 16, vreinterpretq_u8_f32(vmulq_f32(b, second)));
    }
    return done;
}
#endif

PACK_EXPORT int64_t port_pair_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity) {
    size_t bytes = HEADER_BYTES + count / 8 + (count % 8 != 0), done = 0;
    uint32_t value = other_value(items, count);
    uint8_t *bits = packed + HEADER_BYTES;
    int strange = 0;
    if (bytes > capacity)
        return PACK_OVERFLOW;
    store_word(packed, value);
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = pack_avx512(items, count, value, bits, &strange);
    else if (level >= PACK_AVX2)
        done = pack_avx2(items, count, value, bits, &strange);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = pack_neon(items, count, value, bits, &strange);
#else
    (void)level;
#endif
    strange |= pack_tail(items, done, count, value, bits);
    return strange ? PACK_UNSUITABLE : (int64_t)bytes;
}

static int is_pair(const uint8_t *packed, size_t packed_bytes, size_t count) {
    if (packed_bytes != HEADER_BYTES + count / 8 + (count % 8 != 0) || load_word(packed) >> 32)
        return 0;
    return !(count % 8 && packed[packed_bytes - 1] >> (count % 8)); /* bits after the last item */
}

PACK_EXPORT int64_t port_pair_unpack(int level, const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count) {
    size_t done = 0;
    if (!is_pair(packed, packed_bytes, count))
        return PACK_CORRUPT;
    uint32_t value = (uint32_t)load_word(packed);
    const uint8_t *bits = packed + HEADER_BYTES;
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = unpack_avx512(bits, count, value, items);
    else if (level >= PACK_AVX2)
        done = unpack_avx2(bits, count, value, items);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = unpack_neon(bits, count, value, items);
#else
    (void)level;
#endif
    unpack_tail(bits, done, count, value, items);
    return (int64_t)(4 * count);
}

PACK_EXPORT int64_t port_pair_multiply(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *factors,
                                       uint8_t *to, size_t count) {
    size_t done = 0;
    if (!is_pair(packed, packed_bytes, count))
        return PACK_CORRUPT;
    uint32_t value = (uint32_t)load_word(packed);
    const uint8_t *bits = packed + HEADER_BYTES;
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = multiply_avx512(bits, factors, count, value, to);
    else if (level >= PACK_AVX2)
        done = multiply_avx2(bits, factors, count, value, to);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = multiply_neon(bits, factors, count, value, to);
#else
    (void)level;
#endif
    multiply_tail(bits, factors, done, count, value, to);
    return (int64_t)(4 * count);
}
