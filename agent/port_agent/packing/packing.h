/* Packing of tensors that wait for their next use: four lossless codecs over contiguous memory, two that keep
 * only what a backward pass needs, and the decoder of quantized frozen weights (grid.c).
 *
 *   bits     booleans of one byte each                -> one bit each
 *   narrow   64-bit integers                          -> differences from the smallest, 1, 2, 4 or 8 bytes each
 *   bitmap   items of 1, 2, 4 or 8 bytes, many zero   -> one bit each and the non-zero items
 *   pair     32-bit floats: +0 or one other value     -> that value, and one bit each
 *   sign     32-bit floats before ReLU's backward     -> one bit each: not (value <= 0), which is all that it needs
 *   inside   32-bit floats before hardtanh's backward -> one bit each: low < value < high; no NaN
 *
 * The caller owns all memory and may ask for the exact packed size first. A pack function never writes past its
 * capacity; it reports PACK_OVERFLOW instead. Items are compared and moved as bits: an item is zero if all its bits
 * are, so -0.0 and every NaN come back as they were. Pointers need no alignment. Bytes are little-endian.
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

/* Negative results; all others are a number of bytes. */
enum pack_status {
    PACK_OVERFLOW = -1,   /* the packed form is larger than the capacity */
    PACK_UNSUITABLE = -2, /* the codec does not take the data: a boolean other than 0 and 1, a NaN, another item size */
    PACK_CORRUPT = -3     /* the input was not packed with these counts */
};

enum pack_level {
    PACK_SCALAR = 0,   /* the reference */
    PACK_BASELINE = 1, /* available on every CPU of this architecture: SSE2, NEON */
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

/* Items of 2 or 4 bytes: separate the last byte of each from the others, and back. */
PACK_EXPORT int64_t port_planes_split(int level, const uint8_t *items, size_t count, size_t item_bytes, uint8_t *top,
                                      uint8_t *rest);
PACK_EXPORT int64_t port_planes_join(int level, const uint8_t *top, const uint8_t *rest, size_t count, size_t item_bytes,
                                     uint8_t *items);

/* Decode a part of a quantized matrix, from `first_row` and `first_item` on, to floats (`item_bytes` 4) or bfloat16
 * (2), row by row. With `levels` (16 of them): codes of four bits in blocks of 64; NULL: signed bytes in blocks of
 * 128. Rows, `first_item` and `items` must be whole blocks; otherwise PACK_UNSUITABLE. */
PACK_EXPORT int64_t port_grid_decode(int level, const uint8_t *codes, const float *scales, const float *levels, size_t row_items,
                                     size_t first_row, size_t rows, size_t first_item, size_t items, size_t item_bytes,
                                     uint8_t *to);

/* Find the codes and scales of items (2 bytes: bfloat16, or 4) whose decoding gives the same bits, block by block.
 * `levels` as above. PACK_UNSUITABLE if there are none, or the items are not whole blocks. */
PACK_EXPORT int64_t port_grid_encode(const uint8_t *items, size_t count, size_t item_bytes, const float *levels, uint8_t *codes,
                                     float *scales);

/* Add up gradients at the positions in their plane that packed indices give: `planes` times `plane_items` gradients
 * into planes of `plane_places` floats, which are set to +0 first. PACK_CORRUPT if a position is outside its plane. */
PACK_EXPORT int64_t port_narrow_scatter(const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients, size_t planes,
                                        size_t plane_items, size_t plane_places, uint8_t *to);

/* Packed form: the value (4 bytes), 4 bytes of zero, then the bits. `multiply` computes the product of each item and
 * a factor. */
PACK_EXPORT int64_t port_pair_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_pair_unpack(int level, const uint8_t *packed, size_t packed_bytes, uint8_t *items, size_t count);
PACK_EXPORT int64_t port_pair_multiply(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *factors,
                                       uint8_t *to, size_t count);

/* Packed size: (count + 7) / 8. `select` gives the gradient where the bit is set (`inverted`: where it is not),
 * otherwise +0. It also takes packed booleans. */
PACK_EXPORT int64_t port_sign_pack(int level, const uint8_t *items, size_t count, uint8_t *packed, size_t capacity);
PACK_EXPORT int64_t port_sign_select(int level, const uint8_t *packed, size_t packed_bytes, const uint8_t *gradients,
                                     uint8_t *to, size_t count, int inverted);

/* Packed size: (count + 7) / 8. PACK_UNSUITABLE if any item is NaN. */
PACK_EXPORT int64_t port_inside_pack(int level, const uint8_t *items, size_t count, float low, float high, uint8_t *packed,
                                     size_t capacity);

/* Packed form: one 64-bit word of flags per 64 items, then the non-zero items. */
PACK_EXPORT int64_t port_bitmap_size(int level, const void *items, size_t count, size_t item_bytes);
PACK_EXPORT int64_t port_bitmap_pack(int level, const void *items, size_t count, size_t item_bytes, uint8_t *packed,
                                     size_t capacity);
PACK_EXPORT int64_t port_bitmap_unpack(int level, const uint8_t *packed, size_t packed_bytes, void *items, size_t count,
                                       size_t item_bytes);

#endif
