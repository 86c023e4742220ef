/* 64-bit integers as unsigned differences from the smallest, in the fewest of 1, 2, 4 or 8 bytes that hold the largest. */
#include "simd.h"

#define HEADER_BYTES 16u

struct range {
    int64_t lowest;
    uint64_t span; /* largest - lowest, which always fits */
};

FOR_EVERY_LEVEL struct range find_range(const uint8_t *items, size_t count) {
    int64_t lowest = INT64_MAX, highest = INT64_MIN;
    for (size_t i = 0; i < count; i++) {
        int64_t value;
        memcpy(&value, items + 8 * i, sizeof value);
        lowest = value < lowest ? value : lowest;
        highest = value > highest ? value : highest;
    }
    return count ? (struct range){lowest, (uint64_t)highest - (uint64_t)lowest} : (struct range){0, 0};
}

static size_t width_of(struct range range) {
    return range.span <= UINT8_MAX ? 1 : range.span <= UINT16_MAX ? 2 : range.span <= UINT32_MAX ? 4 : 8;
}

/* One pair of loops per width; `type` is the unsigned integer of that width. */
#define DIFFERENCES(name, type)                                                                             \
    FOR_EVERY_LEVEL void pack_##name(const uint8_t *restrict items, size_t count, uint64_t lowest, uint8_t *restrict to) {  \
        for (size_t i = 0; i < count; i++) {                                                                \
            uint64_t value;                                                                                 \
            memcpy(&value, items + 8 * i, sizeof value);                                                    \
            type difference = (type)(value - lowest);                                                       \
            memcpy(to + sizeof(type) * i, &difference, sizeof difference);                                  \
        }                                                                                                   \
    }                                                                                                       \
    FOR_EVERY_LEVEL void unpack_##name(const uint8_t *restrict from, size_t count, uint64_t lowest, uint8_t *restrict items) { \
        for (size_t i = 0; i < count; i++) {                                                                \
            type difference;                                                                                \
            memcpy(&difference, from + sizeof(type) * i, sizeof difference);                                \
            uint64_t value = lowest + difference;                                                           \
            memcpy(items + 8 * i, &value, sizeof value);                                                    \
        }                                                                                                   \
    }

DIFFERENCES(u8, uint8_t)
DIFFERENCES(u16, uint16_t)
DIFFERENCES(u32, uint32_t)
DIFFERENCES(u64, uint64_t)

FOR_EVERY_LEVEL void pack_all(const uint8_t *items, size_t count, uint64_t lowest, size_t width, uint8_t *to) {
    switch (width) {
    case 1: pack_u8(items, count, lowest, to); break;
    case 2: pack_u16(items, count, lowest, to); break;
    case 4: pack_u32(items, count, lowest, to); break;
    default: pack_u64(items, count, lowest, to); break;
    }
}

FOR_EVERY_LEVEL void unpack_all(const uint8_t *from, size_t count, uint64_t lowest, size_t width, uint8_t *items) {
    switch (width) {
    case 1: unpack_u8(from, count, lowest, items); break;
    case 2: unpack_u16(from, count, lowest, items); break;
    case 4: unpack_u32(from, count, lowest, items); break;
    default: unpack_u64(from, count, lowest, items); break;
    }
}

#define LEVEL(name, target)                                                                                 \
    target static struct range range_##name(const uint8_t *items, size_t count) { return find_range(items, count); } \
    target static void pack_at_##name(const uint8_t *items, size_t count, uint64_t lowest, size_t width, uint8_t *to) { \
        pack_all(items, count, lowest, width, to);                                                          \
    }                                                                                                       \
    target static void unpack_at_##name(const uint8_t *from, size_t count, uint64_t lowest, size_t width, uint8_t *items) { \
        unpack_all(from, count, lowest, width, items);                                                      \
    }

LEVEL(scalar, TARGET_SCALAR)
LEVEL(baseline, )
#ifdef PACK_X86
LEVEL(avx2, TARGET_AVX2)
LEVEL(avx512, TARGET_AVX512)
#endif

struct loops {
    struct range (*range)(const uint8_t *, size_t);
    void (*pack)(const uint8_t *, size_t, uint64_t, size_t, uint8_t *);
    void (*unpack)(const uint8_t *, size_t, uint64_t, size_t, uint8_t *);
};

static struct loops loops_of(int level) {
#ifdef PACK_X86
    if (level >= PACK_AVX512)
        return (struct loops){range_avx512, pack_at_avx512, unpack_at_avx512};
    if (level >= PACK_AVX2)
        return (struct loops){range_avx2, pack_at_avx2, unpack_at_avx2};
#endif
    if (level >= PACK_BASELINE)
        return (struct loops){range_baseline, pack_at_baseline, unpack_at_baseline};
    return (struct loops){range_scalar, pack_at_scalar, unpack_at_scalar};
}

PACK_EXPORT int64_t port_narrow_size(int level, const void *items, size_t count) {
    return (int64_t)(HEADER_BYTES + count * width_of(loops_of(level).range(items, count)));
}

PACK_EXPORT int64_t port_narrow_pack(int level, const void *items, size_t count, uint8_t *packed, size_t capacity) {
    struct loops loops = loops_of(level);
    struct range range = loops.range(items, count);
    size_t width = width_of(range), bytes = HEADER_BYTES + count * width;
    if (bytes > capacity)
        return PACK_OVERFLOW;
    store_word(packed, (uint64_t)range.lowest);
    store_word(packed + 8, width);
    loops.pack(items, count, (uint64_t)range.lowest, width, packed + HEADER_BYTES);
    return (int64_t)bytes;
}

PACK_EXPORT int64_t port_narrow_unpack(int level, const uint8_t *packed, size_t packed_bytes, void *items, size_t count) {
    if (packed_bytes < HEADER_BYTES)
        return PACK_CORRUPT;
    uint64_t lowest = load_word(packed), width = load_word(packed + 8);
    if (width != 1 && width != 2 && width != 4 && width != 8)
        return PACK_CORRUPT;
    if (packed_bytes - HEADER_BYTES != count * width)
        return PACK_CORRUPT;
    loops_of(level).unpack(packed + HEADER_BYTES, count, lowest, width, items);
    return (int64_t)(8 * count);
}

/* Add gradient `i` of each plane at the position that its difference gives, in order, as the backward pass of max
 * pooling does. */
#define SCATTER(name, type)                                                                                 \
    static int scatter_##name(const uint8_t *from, size_t count, uint64_t lowest, size_t places, const uint8_t *gradients, uint8_t *to) { \
        for (size_t i = 0; i < count; i++) {                                                                \
            type difference;                                                                                \
            float sum, gradient;                                                                            \
            memcpy(&difference, from + sizeof(type) * i, sizeof difference);                                \
            uint64_t place = lowest + difference;                                                           \
            if (place >= places)                                                                            \
                return 0;                                                                                   \
            memcpy(&sum, to + 4 * place, sizeof sum);                                                       \
            memcpy(&gradient, gradients + 4 * i, sizeof gradient);                                          \
            sum += gradient;                                                                                \
            memcpy(to + 4 * place, &sum, sizeof sum);                                                       \
        }                                                                                                   \
        return 1;                                                                                           \
    }

SCATTER(u8, uint8_t)
SCATTER(u16, uint16_t)
SCATTER(u32, uint32_t)
SCATTER(u64, uint64_t)

PACK_EXPORT int64_t port_narrow_scatter(const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients, size_t planes,
                                        size_t plane_items, size_t plane_places, uint8_t *to) {
    if (packed_bytes < HEADER_BYTES)
        return PACK_CORRUPT;
    uint64_t lowest = load_word(packed), width = load_word(packed + 8);
    if ((width != 1 && width != 2 && width != 4 && width != 8) || packed_bytes - HEADER_BYTES != planes * plane_items * width)
        return PACK_CORRUPT;
    memset(to, 0, 4 * planes * plane_places);
    for (size_t p = 0; p < planes; p++) {
        const uint8_t *from = packed + HEADER_BYTES + p * plane_items * width, *given = gradients + 4 * p * plane_items;
        uint8_t *plane = to + 4 * p * plane_places;
        int inside = width == 1   ? scatter_u8(from, plane_items, lowest, plane_places, given, plane)
                     : width == 2 ? scatter_u16(from, plane_items, lowest, plane_places, given, plane)
                     : width == 4 ? scatter_u32(from, plane_items, lowest, plane_places, given, plane)
                                  : scatter_u64(from, plane_items, lowest, plane_places, given, plane);
        if (!inside)
            return PACK_CORRUPT;
    }
    return (int64_t)(4 * planes * plane_places);
}
