/* Booleans of one byte each, packed to one bit each; the first item is the lowest bit of the first byte. */
#include "simd.h"

#define ONES 0x0101010101010101u

PACK_EXPORT int port_pack_best_level(void) {
#ifdef PACK_X86
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")))
        return PACK_BASELINE;
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? PACK_AVX512 : PACK_AVX2;
#else
    return PACK_BASELINE;
#endif
}

/* Each function handles the items from `done` on that fill whole vectors, and returns where it stopped. `*strange`
 * collects all bits that a boolean may not have. */

static size_t pack_tail(const uint8_t *items, size_t done, size_t count, uint8_t *packed, uint8_t *strange) {
    for (; done < count; done += 8) {
        uint8_t byte = 0;
        for (size_t i = done; i < count && i < done + 8; i++) {
            *strange |= items[i] & 0xFEu;
            byte = (uint8_t)(byte | (items[i] & 1u) << (i - done));
        }
        packed[done / 8] = byte;
    }
    return count;
}

static void unpack_tail(const uint8_t *packed, size_t done, size_t count, uint8_t *items) {
    for (; done < count; done++)
        items[done] = packed[done / 8] >> (done % 8) & 1u;
}

#ifdef PACK_X86
static size_t pack_sse2(const uint8_t *items, size_t count, uint8_t *packed, uint8_t *strange) {
    __m128i seen = _mm_setzero_si128();
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(items + done));
        seen = _mm_or_si128(seen, v);
        uint16_t word = (uint16_t)_mm_movemask_epi8(_mm_slli_epi16(v, 7));
        memcpy(packed + done / 8, &word, sizeof word);
    }
    __m128i wrong = _mm_andnot_si128(_mm_set1_epi8(1), seen);
    *strange |= _mm_movemask_epi8(_mm_cmpeq_epi8(wrong, _mm_setzero_si128())) != 0xFFFF;
    return done;
}

TARGET_AVX2 static size_t pack_avx2(const uint8_t *items, size_t count, uint8_t *packed, uint8_t *strange) {
    __m256i seen = _mm256_setzero_si256();
    size_t done = 0;
    for (; count - done >= 32; done += 32) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(items + done));
        seen = _mm256_or_si256(seen, v);
        uint32_t word = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(v, 7));
        memcpy(packed + done / 8, &word, sizeof word);
    }
    *strange |= !_mm256_testz_si256(seen, _mm256_set1_epi8((char)0xFE));
    return done;
}

TARGET_AVX2 static size_t unpack_avx2(const uint8_t *packed, uint8_t *items, size_t count) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                            3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    size_t done = 0;
    for (; count - done >= 32; done += 32) {
        int32_t word;
        memcpy(&word, packed + done / 8, sizeof word);
        __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), bit);
        v = _mm256_and_si256(_mm256_cmpeq_epi8(v, bit), _mm256_set1_epi8(1));
        _mm256_storeu_si256((__m256i *)(items + done), v);
    }
    return done;
}
#endif

#ifdef PACK_NEON
static const uint8_t NEON_BITS[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};

static size_t pack_neon(const uint8_t *items, size_t count, uint8_t *packed, uint8_t *strange) {
    const uint8x16_t bits = vld1q_u8(NEON_BITS);
    uint8x16_t seen = vdupq_n_u8(0);
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint8x16_t v = vld1q_u8(items + done);
        seen = vorrq_u8(seen, v);
        v = vandq_u8(vtstq_u8(v, vdupq_n_u8(1)), bits);
        packed[done / 8] = vaddv_u8(vget_low_u8(v));
        packed[done / 8 + 1] = vaddv_u8(vget_high_u8(v));
    }
    *strange |= vmaxvq_u8(seen) & 0xFEu;
    return done;
}

static size_t unpack_neon(const uint8_t *packed, uint8_t *items, size_t count) {
    const uint8x16_t bits = vld1q_u8(NEON_BITS);
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint8x16_t v = vcombine_u8(vdup_n_u8(packed[done / 8]), vdup_n_u8(packed[done / 8 + 1]));
        vst1q_u8(items + done, vandq_u8(vtstq_u8(v, bits), vdupq_n_u8(1)));
    }
    return done;
}
#endif

/* Eight booleans at a time in a 64-bit word: byte i keeps bit i of the packed byte, then becomes 0 or 1. */
static size_t unpack_words(const uint8_t *packed, uint8_t *items, size_t count) {
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint64_t word = (packed[done / 8] * ONES) & 0x8040201008040201u;
        store_word(items + done, ((word + 0x7F7F7F7F7F7F7F7Fu) >> 7) & ONES);
    }
    return done;
}

PACK_EXPORT int64_t port_bits_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity) {
    size_t bytes = count / 8 + (count % 8 != 0), done = 0;
    uint8_t strange = 0;
    if (bytes > capacity)
        return PACK_OVERFLOW;
#if defined(PACK_X86)
    if (level >= PACK_AVX2)
        done = pack_avx2(items, count, packed, &strange);
    else if (level >= PACK_BASELINE)
        done = pack_sse2(items, count, packed, &strange);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = pack_neon(items, count, packed, &strange);
#else
    (void)level;
#endif
    pack_tail(items, done, count, packed, &strange);
    return strange ? PACK_UNSUITABLE : (int64_t)bytes;
}

PACK_EXPORT int64_t port_bits_unpack(int level, const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count) {
    size_t done = 0;
    if (packed_bytes != count / 8 + (count % 8 != 0))
        return PACK_CORRUPT;
    if (count % 8 && packed[packed_bytes - 1] >> (count % 8))
        return PACK_CORRUPT; /* bits after the last item */
#if defined(PACK_X86)
    if (level >= PACK_AVX2)
        done = unpack_avx2(packed, items, count);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = unpack_neon(packed, items, count);
#endif
    if (level >= PACK_BASELINE && !done)
        done = unpack_words(packed, items, count);
    unpack_tail(packed, done, count, items);
    return (int64_t)count;
}
