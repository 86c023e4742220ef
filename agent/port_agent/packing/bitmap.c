/* A flag for each item, and the items that are not zero. Works in blocks of 64 items, one word of flags each. */
#include "simd.h"

#define BLOCK 64u

static size_t word_count(size_t count) { return count / BLOCK + (count % BLOCK != 0); }

static size_t block_items(size_t count, size_t block) {
    size_t left = count - BLOCK * block;
    return left < BLOCK ? left : BLOCK;
}

/* For every item type: compute the flags of up to 64 items, move the flagged items together (`squeeze`), and back
 * (`spread`). `squeeze` may store one item more than are flagged, and `spread` may read one more; the caller knows
 * whether it fits. */
#define ITEMS(type)                                                                                         \
    FOR_EVERY_LEVEL type load_##type(const uint8_t *from, size_t index) {                                   \
        type item;                                                                                          \
        memcpy(&item, from + sizeof item * index, sizeof item);                                             \
        return item;                                                                                        \
    }                                                                                                       \
    FOR_EVERY_LEVEL void store_##type(uint8_t *to, size_t index, type item) {                               \
        memcpy(to + sizeof item * index, &item, sizeof item);                                               \
    }                                                                                                       \
    FOR_EVERY_LEVEL uint64_t flags_##type(const uint8_t *items, size_t count) {                             \
        uint64_t flags = 0;                                                                                 \
        for (size_t i = 0; i < count; i++)                                                                  \
            flags |= (uint64_t)(load_##type(items, i) != 0) << i;                                           \
        return flags;                                                                                       \
    }                                                                                                       \
    FOR_EVERY_LEVEL void gather_##type(const uint8_t *items, uint64_t flags, uint8_t *to) {                 \
        for (size_t kept = 0; flags; flags &= flags - 1)                                                    \
            store_##type(to, kept++, load_##type(items, (size_t)__builtin_ctzll(flags)));                   \
    }                                                                                                       \
    FOR_EVERY_LEVEL void squeeze_##type(const uint8_t *items, uint64_t flags, uint8_t *to) {                \
        size_t kept = 0;                                                                                    \
        for (size_t i = 0; i < BLOCK; i++, flags >>= 1) {                                                   \
            store_##type(to, kept, load_##type(items, i));                                                  \
            kept += flags & 1;                                                                              \
        }                                                                                                   \
    }                                                                                                       \
    FOR_EVERY_LEVEL void scatter_##type(const uint8_t *from, uint64_t flags, uint8_t *items, size_t count) { \
        memset(items, 0, sizeof(type) * count);                                                             \
        for (size_t taken = 0; flags; flags &= flags - 1)                                                   \
            store_##type(items, (size_t)__builtin_ctzll(flags), load_##type(from, taken++));                \
    }                                                                                                       \
    FOR_EVERY_LEVEL void spread_##type(const uint8_t *from, uint64_t flags, uint8_t *items) {               \
        size_t taken = 0;                                                                                   \
        for (size_t i = 0; i < BLOCK; i++, flags >>= 1) {                                                   \
            store_##type(items, i, (type)(load_##type(from, taken) & (type)(0 - (type)(flags & 1))));       \
            taken += flags & 1;                                                                             \
        }                                                                                                   \
    }

ITEMS(uint8_t)
ITEMS(uint16_t)
ITEMS(uint32_t)
ITEMS(uint64_t)

/* ---- the items that activations are made of, with the instructions of each level ------------------------------------- */

#ifdef PACK_X86
TARGET_AVX2 static inline uint64_t flags_avx2(const uint8_t *items) {
    uint64_t flags = 0;
    for (unsigned i = 0; i < BLOCK; i += 8) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(items + 4 * i));
        __m256i zero = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
        flags |= (uint64_t)(uint8_t)~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) << i;
    }
    return flags;
}

/* Byte i of the result is 0xFF where bit i of the eight flags is set. */
TARGET_AVX2 static inline uint64_t byte_mask(uint64_t eight_flags) {
    return _pdep_u64(eight_flags, 0x0101010101010101u) * 0xFFu;
}

TARGET_AVX2 static inline void squeeze_avx2(const uint8_t *items, uint64_t flags, uint8_t *to) {
    for (unsigned i = 0; i < BLOCK; i += 8, flags >>= 8) {
        uint64_t chosen = _pext_u64(0x0706050403020100u, byte_mask(flags & 0xFF));
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)chosen));
        __m256i v = _mm256_loadu_si256((const __m256i *)(items + 4 * i));
        _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(v, order));
        to += 4 * _mm_popcnt_u64(flags & 0xFF);
    }
}

TARGET_AVX2 static inline void spread_avx2(const uint8_t *from, uint64_t flags, uint8_t *items) {
    for (unsigned i = 0; i < BLOCK; i += 8, flags >>= 8) {
        uint64_t mask = byte_mask(flags & 0xFF), source = _pdep_u64(0x0706050403020100u, mask);
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)source));
        __m256i keep = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)mask));
        __m256i v = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)from), order);
        _mm256_storeu_si256((__m256i *)(items + 4 * i), _mm256_and_si256(v, keep));
        from += 4 * _mm_popcnt_u64(flags & 0xFF);
    }
}

TARGET_AVX512 static inline uint64_t flags_avx512(const uint8_t *items) {
    uint64_t flags = 0;
    for (unsigned i = 0; i < BLOCK; i += 16) {
        __m512i v = _mm512_loadu_si512(items + 4 * i);
        flags |= (uint64_t)_mm512_test_epi32_mask(v, v) << i;
    }
    return flags;
}

TARGET_AVX512 static inline void squeeze_avx512(const uint8_t *items, uint64_t flags, uint8_t *to) {
    for (unsigned i = 0; i < BLOCK; i += 16, flags >>= 16) {
        __m512i v = _mm512_loadu_si512(items + 4 * i);
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)flags, v));
        to += 4 * _mm_popcnt_u64(flags & 0xFFFF);
    }
}

TARGET_AVX512 static inline void spread_avx512(const uint8_t *from, uint64_t flags, uint8_t *items) {
    for (unsigned i = 0; i < BLOCK; i += 16, flags >>= 16) {
        __m512i v = _mm512_maskz_expand_epi32((__mmask16)flags, _mm512_loadu_si512(from));
        _mm512_storeu_si512(items + 4 * i, v);
        from += 4 * _mm_popcnt_u64(flags & 0xFFFF);
    }
}

/* Two-byte items are moved as four-byte lanes: moving 16-bit lanes needs an extension that few CPUs have. */
TARGET_AVX512 static inline uint64_t flags16_avx512(const uint8_t *items) {
    __m512i low = _mm512_loadu_si512(items), high = _mm512_loadu_si512(items + 64);
    return (uint64_t)_mm512_test_epi16_mask(low, low) | (uint64_t)_mm512_test_epi16_mask(high, high) << 32;
}

TARGET_AVX512 static inline void squeeze16_avx512(const uint8_t *items, uint64_t flags, uint8_t *to) {
    for (unsigned i = 0; i < BLOCK; i += 16, flags >>= 16) {
        __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(items + 2 * i)));
        v = _mm512_maskz_compress_epi32((__mmask16)flags, v);
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(v));
        to += 2 * _mm_popcnt_u64(flags & 0xFFFF);
    }
}

TARGET_AVX512 static inline void spread16_avx512(const uint8_t *from, uint64_t flags, uint8_t *items) {
    for (unsigned i = 0; i < BLOCK; i += 16, flags >>= 16) {
        __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
        v = _mm512_maskz_expand_epi32((__mmask16)flags, v);
        _mm256_storeu_si256((__m256i *)(items + 2 * i), _mm512_cvtepi32_epi16(v));
        from += 2 * _mm_popcnt_u64(flags & 0xFFFF);
    }
}
#endif

#ifdef PACK_NEON
/* Byte indices of one lane; those of lane 4 lie outside the vector, where the table lookup returns zero. */
#define LANE(lane) 4 * lane, 4 * lane + 1, 4 * lane + 2, 4 * lane + 3

/* For each value of four flags: which lane moves to which position. */
static const uint8_t SQUEEZED[16][16] = {
    {LANE(4), LANE(4), LANE(4), LANE(4)},
    {LANE(0), LANE(4), LANE(4), LANE(4)},
    {LANE(1), LANE(4), LANE(4), LANE(4)},
    {LANE(0), LANE(1), LANE(4), LANE(4)},
    {LANE(2), LANE(4), LANE(4), LANE(4)},
    {LANE(0), LANE(2), LANE(4), LANE(4)},
    {LANE(1), LANE(2), LANE(4), LANE(4)},
    {LANE(0), LANE(1), LANE(2), LANE(4)},
    {LANE(3), LANE(4), LANE(4), LANE(4)},
    {LANE(0), LANE(3), LANE(4), LANE(4)},
    {LANE(1), LANE(3), LANE(4), LANE(4)},
    {LANE(0), LANE(1), LANE(3), LANE(4)},
    {LANE(2), LANE(3), LANE(4), LANE(4)},
    {LANE(0), LANE(2), LANE(3), LANE(4)},
    {LANE(1), LANE(2), LANE(3), LANE(4)},
    {LANE(0), LANE(1), LANE(2), LANE(3)},
};
static const uint8_t SPREAD[16][16] = {
    {LANE(4), LANE(4), LANE(4), LANE(4)},
    {LANE(0), LANE(4), LANE(4), LANE(4)},
    {LANE(4), LANE(0), LANE(4), LANE(4)},
    {LANE(0), LANE(1), LANE(4), LANE(4)},
    {LANE(4), LANE(4), LANE(0), LANE(4)},
    {LANE(0), LANE(4), LANE(1), LANE(4)},
    {LANE(4), LANE(0), LANE(1), LANE(4)},
    {LANE(0), LANE(1), LANE(2), LANE(4)},
    {LANE(4), LANE(4), LANE(4), LANE(0)},
    {LANE(0), LANE(4), LANE(4), LANE(1)},
    {LANE(4), LANE(0), LANE(4), LANE(1)},
    {LANE(0), LANE(1), LANE(4), LANE(2)},
    {LANE(4), LANE(4), LANE(0), LANE(1)},
    {LANE(0), LANE(4), LANE(1), LANE(2)},
    {LANE(4), LANE(0), LANE(1), LANE(2)},
    {LANE(0), LANE(1), LANE(2), LANE(3)},
};

static inline uint64_t flags_neon(const uint8_t *items) {
    static const uint32_t WEIGHTS[4] = {1, 2, 4, 8};
    const uint32x4_t weights = vld1q_u32(WEIGHTS);
    uint64_t flags = 0;
    for (unsigned i = 0; i < BLOCK; i += 4) {
        uint32x4_t v = vreinterpretq_u32_u8(vld1q_u8(items + 4 * i));
        flags |= (uint64_t)vaddvq_u32(vandq_u32(vtstq_u32(v, v), weights)) << i;
    }
    return flags;
}

static inline void squeeze_neon(const uint8_t *items, uint64_t flags, uint8_t *to) {
    for (unsigned i = 0; i < BLOCK; i += 4, flags >>= 4) {
        vst1q_u8(to, vqtbl1q_u8(vld1q_u8(items + 4 * i), vld1q_u8(SQUEEZED[flags & 15])));
        to += 4 * __builtin_popcountll(flags & 15);
    }
}

static inline void spread_neon(const uint8_t *from, uint64_t flags, uint8_t *items) {
    for (unsigned i = 0; i < BLOCK; i += 4, flags >>= 4) {
        vst1q_u8(items + 4 * i, vqtbl1q_u8(vld1q_u8(from), vld1q_u8(SPREAD[flags & 15])));
        from += 4 * __builtin_popcountll(flags & 15);
    }
}
#endif

/* ---- the three operations, once per item type and level ---------------------------------------------------------------- */

/* `squeeze` by whole vectors stores up to BLOCK items from its start, so near the end of the target the items are
 * copied one by one instead. The same holds for reading a block back. */
#define OPERATIONS(name, type, target, block_flags, block_squeeze, block_spread)                            \
    target static size_t count_##name(const uint8_t *items, size_t count) {                                 \
        size_t kept = 0, block = 0;                                                                         \
        for (; count - BLOCK * block >= BLOCK; block++)                                                     \
            kept += (size_t)__builtin_popcountll(block_flags(items + sizeof(type) * BLOCK * block));        \
        size_t rest = count - BLOCK * block;                                                                \
        return kept + (size_t)__builtin_popcountll(flags_##type(items + sizeof(type) * BLOCK * block, rest)); \
    }                                                                                                       \
    target static int64_t pack_##name(const uint8_t *items, size_t count, uint8_t *packed, size_t capacity) { \
        size_t words = word_count(count), used = 8 * words;                                                 \
        if (used > capacity)                                                                                \
            return PACK_OVERFLOW;                                                                           \
        for (size_t block = 0; block < words; block++, items += sizeof(type) * BLOCK) {                     \
            size_t present = block_items(count, block), free_bytes = capacity - used;                       \
            uint64_t flags = present == BLOCK ? block_flags(items) : flags_##type(items, present);          \
            size_t bytes = sizeof(type) * (size_t)__builtin_popcountll(flags);                              \
            if (bytes > free_bytes)                                                                         \
                return PACK_OVERFLOW;                                                                       \
            store_word(packed + 8 * block, flags);                                                          \
            if (present == BLOCK && free_bytes >= sizeof(type) * BLOCK)                                     \
                block_squeeze(items, flags, packed + used);                                                 \
            else                                                                                            \
                gather_##type(items, flags, packed + used);                                                 \
            used += bytes;                                                                                  \
        }                                                                                                   \
        return (int64_t)used;                                                                               \
    }                                                                                                       \
    target static void unpack_##name(const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count) { \
        size_t words = word_count(count), used = 8 * words;                                                 \
        for (size_t block = 0; block < words; block++, items += sizeof(type) * BLOCK) {                     \
            size_t present = block_items(count, block), left = packed_bytes - used;                         \
            uint64_t flags = load_word(packed + 8 * block);                                                 \
            if (present == BLOCK && left >= sizeof(type) * BLOCK)                                           \
                block_spread(packed + used, flags, items);                                                  \
            else                                                                                            \
                scatter_##type(packed + used, flags, items, present);                                       \
            used += sizeof(type) * (size_t)__builtin_popcountll(flags);                                     \
        }                                                                                                   \
    }

#define SCALAR_FLAGS(type) FOR_EVERY_LEVEL uint64_t block_flags_##type(const uint8_t *items) { return flags_##type(items, BLOCK); }
SCALAR_FLAGS(uint8_t)
SCALAR_FLAGS(uint16_t)
SCALAR_FLAGS(uint32_t)
SCALAR_FLAGS(uint64_t)

OPERATIONS(u8, uint8_t, , block_flags_uint8_t, squeeze_uint8_t, spread_uint8_t)
OPERATIONS(u16, uint16_t, , block_flags_uint16_t, squeeze_uint16_t, spread_uint16_t)
OPERATIONS(u32, uint32_t, , block_flags_uint32_t, squeeze_uint32_t, spread_uint32_t)
OPERATIONS(u64, uint64_t, , block_flags_uint64_t, squeeze_uint64_t, spread_uint64_t)
#ifdef PACK_X86
OPERATIONS(u32_avx2, uint32_t, TARGET_AVX2, flags_avx2, squeeze_avx2, spread_avx2)
OPERATIONS(u16_avx512, uint16_t, TARGET_AVX512, flags16_avx512, squeeze16_avx512, spread16_avx512)
OPERATIONS(u32_avx512, uint32_t, TARGET_AVX512, flags_avx512, squeeze_avx512, spread_avx512)
#endif
#ifdef PACK_NEON
OPERATIONS(u32_neon, uint32_t, , flags_neon, squeeze_neon, spread_neon)
#endif

struct operations {
    size_t (*count)(const uint8_t *, size_t);
    int64_t (*pack)(const uint8_t *, size_t, uint8_t *, size_t);
    void (*unpack)(const uint8_t *, size_t, uint8_t *, size_t);
};

/* All NULL if there is no codec for the item size. */
static struct operations operations_of(int level, size_t item_bytes) {
#ifdef PACK_X86
    if (level >= PACK_AVX512 && item_bytes == 2)
        return (struct operations){count_u16_avx512, pack_u16_avx512, unpack_u16_avx512};
#endif
    switch (item_bytes) {
    case 1: return (struct operations){count_u8, pack_u8, unpack_u8};
    case 2: return (struct operations){count_u16, pack_u16, unpack_u16};
    case 8: return (struct operations){count_u64, pack_u64, unpack_u64};
    case 4: break;
    default: return (struct operations){NULL, NULL, NULL};
    }
#if defined(PACK_X86)
    if (level >= PACK_AVX512)
        return (struct operations){count_u32_avx512, pack_u32_avx512, unpack_u32_avx512};
    if (level >= PACK_AVX2)
        return (struct operations){count_u32_avx2, pack_u32_avx2, unpack_u32_avx2};
#elif defined(PACK_NEON)
    if (level >= PACK_BASELINE)
        return (struct operations){count_u32_neon, pack_u32_neon, unpack_u32_neon};
#else
    (void)level;
#endif
    return (struct operations){count_u32, pack_u32, unpack_u32};
}

PACK_EXPORT int64_t port_bitmap_size(int level, const void *items, size_t count, size_t item_bytes) {
    struct operations operations = operations_of(level, item_bytes);
    if (!operations.count)
        return PACK_UNSUITABLE;
    return (int64_t)(8 * word_count(count) + item_bytes * operations.count(items, count));
}

PACK_EXPORT int64_t port_bitmap_pack(int level, const void *items, size_t count, size_t item_bytes, uint8_t *packed,
                                     size_t capacity) {
    struct operations operations = operations_of(level, item_bytes);
    return operations.pack ? operations.pack(items, count, packed, capacity) : PACK_UNSUITABLE;
}

PACK_EXPORT int64_t port_bitmap_unpack(int level, const uint8_t *packed, size_t packed_bytes, void *items, size_t count,
                                       size_t item_bytes) {
    struct operations operations = operations_of(level, item_bytes);
    size_t words = word_count(count), kept = 0;
    if (!operations.unpack)
        return PACK_UNSUITABLE;
    if (packed_bytes < 8 * words)
        return PACK_CORRUPT;
    for (size_t block = 0; block < words; block++)
        kept += (size_t)__builtin_popcountll(load_word(packed + 8 * block));
    if (packed_bytes - 8 * words != item_bytes * kept)
        return PACK_CORRUPT;
    if (count % BLOCK && load_word(packed + 8 * (words - 1)) >> count % BLOCK)
        return PACK_CORRUPT; /* flags after the last item */
    operations.unpack(packed, packed_bytes, items, count);
    return (int64_t)(item_bytes * count);
}
