/* Packing of tensors that wait for their next use: four lossless codecs over contiguous memory, two that keep
 * what a backward pass asks, and the decoder of frozen weights on a grid (grid.c).
 *
 *   bits     booleans of one byte each                -> one bit each
 *   narrow   64-bit integers                          -> 1, 2, 4 or 8 bytes each above their smallest value
 *   bitmap   items of 1, 2, 4 or 8 bytes, many zero   -> one bit each and the non-zero items
 *   pair     32-bit floats: +0 or one other value     -> that value, and one bit each
 *   sign     32-bit floats before ReLU's backward     -> one bit each: not (value <= 0), which is all that it asks
 *   inside   32-bit floats before hardtanh's backward -> one bit each: low < value < high; of NaN nothing
 *
 * The caller owns all memory and may ask for the exact packed size first. A pack function never writes past the capacity
 * that it is given and reports PACK_OVERFLOW instead. Items are compared and moved as bits: an item is zero when all
 * its bits are, so -0.0 and every NaN come back as they were. Pointers need no alignment. Bytes are little-endian.
 *
 * `level` selects the implementation, at most port_pack_best_level(); all write the same bytes.
 */
#ifndef PORT_PACKING_H
#define PORT_PACKING_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PACK_EXPORT __attribute__((visibility("default")))
#else
#define PACK_EXPORT
#endif

/* Results below zero; everything else is a number of bytes. */
enum pack_status {
    PACK_OVERFLOW = -1,   /* the packed form is larger than the capacity */
    PACK_UNSUITABLE = -2, /* the data is not what the codec is for: a boolean other than 0 and 1, a NaN, an unknown item size */
    PACK_CORRUPT = -3     /* what should be unpacked was not packed with these counts */
};

enum pack_level {
    PACK_SCALAR = 0,   /* the reference */
    PACK_BASELINE = 1, /* what every CPU of this architecture has: SSE2, NEON */
    PACK_AVX2 = 2,     /* AVX2 and BMI2 */
    PACK_AVX512 = 3    /* AVX-512 F, BW, DQ and VL */
};

PACK_EXPORT int port_pack_best_level(void);

/* Packed size: (count + 7) / 8. */
PACK_EXPORT int64_t port_bits_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_bits_unpack(int level, const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count);

/* Packed form: smallest value (8 bytes), width in bytes (8 bytes), then the differences. */
PACK_EXPORT int64_t port_narrow_size(int level, const void *items, size_t count);
PACK_EXPORT int64_t port_narrow_pack(int level, const void *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_narrow_unpack(int level, const uint8_t *packed, size_t packed_bytes, void *items, size_t count);

/* Items of 2 or 4 bytes: the last byte of each apart from the others, and back. */
PACK_EXPORT int64_t port_planes_split(int level, const uint8_t *items, size_t count, size_t item_bytes, uint8_t *top,
                                      uint8_t *rest);
PACK_EXPORT int64_t port_planes_join(int level, const uint8_t *top, const uint8_t *rest, size_t count, size_t item_bytes,
                                     uint8_t *items);

/* Rows `first_row` on and items `first_item` on of a matrix on a grid, as floats (`item_bytes` 4) or bfloat16 (2), row after
 * row. With `levels` (16 of them): codes of four bits in blocks of 64; with NULL: signed bytes in blocks of 128. Rows,
 * `first_item` and `items` are whole blocks; else PACK_UNSUITABLE. */
PACK_EXPORT int64_t port_grid_decode(int level, const uint8_t *codes, const float *scales, const float *levels, size_t row_items,
                                     size_t first_row, size_t rows, size_t first_item, size_t items, size_t item_bytes,
                                     uint8_t *to);

/* Codes and scales of items (2 bytes: bfloat16, or 4) that lie on a grid, block after block: decoding gives them back to the bit.
 * `levels` as above. PACK_UNSUITABLE where they do not, or are no whole blocks. */
PACK_EXPORT int64_t port_grid_encode(const uint8_t *items, size_t count, size_t item_bytes, const float *levels, uint8_t *codes,
                                     float *scales);

/* Sums of gradients at the places in their plane that packed indices name: `planes` times `plane_items` of them into planes of
 * `plane_places` floats, which are set to +0 before. PACK_CORRUPT where a place is none. */
PACK_EXPORT int64_t port_narrow_scatter(const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients, size_t planes,
                                        size_t plane_items, size_t plane_places, uint8_t *to);

/* Packed form: the value (4 bytes), 4 bytes of zero, then the bits. `multiply` gives the product of each item and a factor. */
PACK_EXPORT int64_t port_pair_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_pair_unpack(int level, const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count);
PACK_EXPORT int64_t port_pair_multiply(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *factors,
                                       uint8_t *to, size_t count);

/* Packed size: (count + 7) / 8. `select` gives a gradient where the bit is set (`inverted`: where it is not), else +0; of bits as well. */
PACK_EXPORT int64_t port_sign_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_sign_select(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients,
                                     uint8_t *to, size_t count, int inverted);

/* Packed size: (count + 7) / 8. PACK_UNSUITABLE where a NaN is among the items. */
PACK_EXPORT int64_t port_inside_pack(int level, const uint8_t *items, size_t count, float low, float high, uint8_t *packed,
                                     size_t capacity);

/* Packed form: one 64-bit word of flags per 64 items, then the non-zero items. */
PACK_EXPORT int64_t port_bitmap_size(int level, const void *items, size_t count, size_t item_bytes);
PACK_EXPORT int64_t port_bitmap_pack(int level, const void *items, size_t count, size_t item_bytes, uint8_t *packed,
                                     size_t capacity);
PACK_EXPORT int64_t port_bitmap_unpack(int level, const uint8_t *packed, size_t packed_bytes, void *items, size_t count,
                                       size_t item_bytes);

#endif
