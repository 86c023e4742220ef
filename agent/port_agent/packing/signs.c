/* Stores of 32-bit floats only what the backward pass of ReLU needs: whether each is above zero, or NaN. One bit an
 * item. Gradients are computed directly from the bits, with the same bits as torch's threshold_backward of the
 * items. */
#include "simd.h"

static int passes(const uint8_t *item) {
    float value;
    memcpy(&value, item, sizeof value);
    return !(value <= 0.0f);
}

static void pack_tail(const uint8_t *items, size_t done, size_t count, uint8_t *packed) {
    for (; done < count; done += 8) {
        uint8_t byte = 0;
        for (size_t i = done; i < count && i < done + 8; i++)
            byte = (uint8_t)(byte | passes(items + 4 * i) << (i - done));
        packed[done / 8] = byte;
    }
}

static void select_tail(const uint8_t *packed, uint8_t flip, const uint8_t *gradients, size_t done, size_t count, uint8_t *to) {
    for (; done < count; done++) {
        uint32_t bits;
        memcpy(&bits, gradients + 4 * done, sizeof bits);
        bits &= 0u - ((packed[done / 8] ^ flip) >> (done % 8) & 1u);
        memcpy(to + 4 * done, &bits, sizeof bits);
    }
}

/* Each function handles the items that fill whole vectors and returns where it stopped, a multiple of 8. */

#ifdef PACK_X86
static size_t pack_sse2(const uint8_t *items, size_t count, uint8_t *packed) {
    const __m128 zero = _mm_setzero_ps();
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        int low = _mm_movemask_ps(_mm_cmpnle_ps(_mm_loadu_ps((const float *)(const void *)(items + 4 * done)), zero));
        int high = _mm_movemask_ps(_mm_cmpnle_ps(_mm_loadu_ps((const float *)(const void *)(items + 4 * done + 16)), zero));
        packed[done / 8] = (uint8_t)(low | high << 4);
    }
    return done;
}

TARGET_AVX2 static size_t pack_avx2(const uint8_t *items, size_t count, uint8_t *packed) {
    const __m256 zero = _mm256_setzero_ps();
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m256 v = _mm256_loadu_ps((const float *)(const void *)(items + 4 * done));
        packed[done / 8] = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(v, zero, _CMP_NLE_UQ));
    }
    return done;
}

TARGET_AVX512 static size_t pack_avx512(const uint8_t *items, size_t count, uint8_t *packed) {
    const __m512 zero = _mm512_setzero_ps();
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint16_t word = _mm512_cmp_ps_mask(_mm512_loadu_ps(items + 4 * done), zero, _CMP_NLE_UQ);
        memcpy(packed + done / 8, &word, sizeof word);
    }
    return done;
}

TARGET_AVX2 static size_t select_avx2(const uint8_t *packed, uint8_t flip, const uint8_t *gradients, size_t count, uint8_t *to) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        __m256i mask = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(packed[done / 8] ^ flip), bits), bits);
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(gradients + 4 * done));
        _mm256_storeu_si256((__m256i *)(void *)(to + 4 * done), _mm256_and_si256(v, mask));
    }
    return done;
}

TARGET_AVX512 static size_t select_avx512(const uint8_t *packed, uint8_t flip, const uint8_t *gradients, size_t count, uint8_t *to) {
    size_t done = 0;
    for (; count - done >= 16; done += 16) {
        uint16_t mask;
        memcpy(&mask, packed + done / 8, sizeof mask);
        mask ^= (uint16_t)(flip * 0x101u);
        _mm512_storeu_si512(to + 4 * done, _mm512_maskz_loadu_epi32(mask, gradients + 4 * done));
    }
    return done;
}
#endif

#ifdef PACK_NEON
static const uint32_t NEON_LOW[4] = {1, 2, 4, 8}, NEON_HIGH[4] = {16, 32, 64, 128};

static uint32x4_t neon_passes(const uint8_t *items) {
    return vmvnq_u32(vcleq_f32(vreinterpretq_f32_u8(vld1q_u8(items)), vdupq_n_f32(0.0f)));
}

static size_t pack_neon(const uint8_t *items, size_t count, uint8_t *packed) {
    const uint32x4_t low = vld1q_u32(NEON_LOW), high = vld1q_u32(NEON_HIGH);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint32x4_t first = vandq_u32(neon_passes(items + 4 * done), low);
        uint32x4_t second = vandq_u32(neon_passes(items + 4 * done + 16), high);
        packed[done / 8] = (uint8_t)vaddvq_u32(vorrq_u32(first, second));
    }
    return done;
}

static size_t select_neon(const uint8_t *packed, uint8_t flip, const uint8_t *gradients, size_t count, uint8_t *to) {
    const uint32x4_t low = vld1q_u32(NEON_LOW), high = vld1q_u32(NEON_HIGH);
    size_t done = 0;
    for (; count - done >= 8; done += 8) {
        uint32x4_t byte = vdupq_n_u32(packed[done / 8] ^ flip);
        uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(gradients + 4 * done));
        uint32x4_t second = vreinterpretq_u32_u8(vld1q_u8(gradients + 4 * done + 16));
        vst1q_u8(to + 4 * done, vreinterpretq_u8_u32(vandq_u32(first, vtstq_u32(byte, low))));
        vst1q_u8(to + 4 * done + 16, vreinterpretq_u8_u32(vandq_u32(second, vtstq_u32(byte, high))));
    }
    return done;
}
#endif

PACK_EXPORT int64_t port_sign_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity) {
    size_t bytes = count / 8 + (count % 8 != 0), done = 0;
    if (bytes > capacity)
        return PACK_OVERFLOW;
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = pack_avx512(items, count, packed);
    else if (level >= PACK_AVX2)
        done = pack_avx2(items, count, packed);
    else if (level >= PACK_BASELINE)
        done = pack_sse2(items, count, packed);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = pack_neon(items, count, packed);
#else
    (void)level;
#endif
    pack_tail(items, done, count, packed);
    return (int64_t)bytes;
}

PACK_EXPORT int64_t port_sign_select(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients,
                                     uint8_t *to, size_t count, int inverted) {
    size_t done = 0;
    uint8_t flip = inverted ? 0xFF : 0;
    if (packed_bytes != count / 8 + (count % 8 != 0))
        return PACK_CORRUPT;
    if (count % 8 && packed[packed_bytes - 1] >> (count % 8))
        return PACK_CORRUPT; /* bits after the last item */
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        done = select_avx512(packed, flip, gradients, count, to);
    else if (level >= PACK_AVX2)
        done = select_avx2(packed, flip, gradients, count, to);
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        done = select_neon(packed, flip, gradients, count, to);
#else
    (void)level;
#endif
    select_tail(packed, flip, gradients, done, count, to);
    return (int64_t)(4 * count);
}
