/* Separates the bytes with sign and exponent from the others: they have few different values, so Huffman coding
 * makes them small. */
#include "simd.h"

PACK_EXPORT int64_t port_planes_split(int level, const uint8_t *items, size_t count, size_t item_bytes, uint8_t *top,
                                      uint8_t *rest) {
    (void)level;
    if (item_bytes == 4) {
        for (size_t i = 0; i < count; i++) {
            top[i] = items[4 * i + 3];
            rest[3 * i] = items[4 * i];
            rest[3 * i + 1] = items[4 * i + 1];
            rest[3 * i + 2] = items[4 * i + 2];
        }
    } else if (item_bytes == 2) {
        for (size_t i = 0; i < count; i++) {
            top[i] = items[2 * i + 1];
            rest[i] = items[2 * i];
        }
    } else {
        return PACK_UNSUITABLE;
    }
    return (int64_t)(count * item_bytes);
}

PACK_EXPORT int64_t port_planes_join(int level, const uint8_t *top, const uint8_t *rest, size_t count, size_t item_bytes,
                                     uint8_t *items) {
    (void)level;
    if (item_bytes == 4) {
        for (size_t i = 0; i < count; i++) {
            items[4 * i] = rest[3 * i];
            items[4 * i + 1] = rest[3 * i + 1];
            items[4 * i + 2] = rest[3 * i + 2];
            items[4 * i + 3] = top[i];
        }
    } else if (item_bytes == 2) {
        for (size_t i = 0; i < count; i++) {
            items[2 * i] = rest[i];
            items[2 * i + 1] = top[i];
        }
    } else {
        return PACK_UNSUITABLE;
    }
    return (int64_t)(count * item_bytes);
}
