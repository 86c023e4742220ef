/* Every level of every codec against the scalar reference, in heap blocks of exactly the right size, so that a sanitizer
 * sees each byte read or written too far; also run on emulated ARM. Exit status 0: all equal. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "packing.h"

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "line %d: %s is false (level %d, %zu items)\n", __LINE__, #condition, level, count); \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

static uint32_t state = 1;

static uint32_t next_random(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* A block whose end is the end of the allocation, starting `skew` bytes after its beginning. */
static uint8_t *block(size_t bytes, size_t skew) { return (uint8_t *)malloc(bytes + skew + !(bytes + skew)) + skew; }

static uint8_t *block_of_random(size_t bytes, size_t skew) {
    uint8_t *made = block(bytes, skew);
    for (size_t i = 0; i < bytes; i++)
        made[i] = (uint8_t)next_random();
    return made;
}

static void release(uint8_t *data, size_t skew) { free(data - skew); }

static void check_bits(int level, size_t count, size_t skew) {
    size_t bytes = (count + 7) / 8;
    uint8_t *items = block(count, skew), *back = block(count, skew);
    uint8_t *packed = block(bytes, skew), *reference = block(bytes, skew);
    for (size_t i = 0; i < count; i++)
        items[i] = next_random() & 1;
    CHECK(port_bits_pack(PACK_SCALAR, items, count, reference, bytes) == (int64_t)bytes);
    CHECK(port_bits_pack(level, items, count, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    CHECK(port_bits_unpack(level, packed, bytes, back, count) == (int64_t)count);
    CHECK(memcmp(items, back, count) == 0);
    if (count) {
        CHECK(port_bits_pack(level, items, count, packed, bytes - 1) == PACK_OVERFLOW);
        items[next_random() % count] = (uint8_t)(2 + next_random() % 254);
        CHECK(port_bits_pack(level, items, count, packed, bytes) == PACK_UNSUITABLE);
    }
    release(items, skew), release(back, skew), release(packed, skew), release(reference, skew);
}

static void check_narrow(int level, size_t count, size_t skew, unsigned shift) {
    uint8_t *items = block(8 * count, skew), *back = block(8 * count, skew);
    int64_t base = (int64_t)((uint64_t)next_random() << 40 ^ next_random());
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = ((uint64_t)next_random() << 40 ^ (uint64_t)next_random() << 20 ^ next_random()) >> shift;
        int64_t value = (int64_t)((uint64_t)base + bits);
        memcpy(items + 8 * i, &value, sizeof value);
    }
    size_t bytes = (size_t)port_narrow_size(PACK_SCALAR, items, count);
    uint8_t *packed = block(bytes, skew), *reference = block(bytes, skew);
    CHECK(port_narrow_size(level, items, count) == (int64_t)bytes);
    CHECK(port_narrow_pack(PACK_SCALAR, items, count, reference, bytes) == (int64_t)bytes);
    CHECK(port_narrow_pack(level, items, count, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    CHECK(port_narrow_pack(level, items, count, packed, bytes - 1) == PACK_OVERFLOW);
    CHECK(port_narrow_unpack(level, reference, bytes, back, count) == (int64_t)(8 * count));
    CHECK(memcmp(items, back, 8 * count) == 0);
    release(items, skew), release(back, skew), release(packed, skew), release(reference, skew);
}

static void check_bitmap(int level, size_t count, size_t item_bytes, size_t skew, uint32_t zeros) {
    size_t source = count * item_bytes;
    uint8_t *items = block(source, skew), *back = block(source, skew);
    for (size_t i = 0; i < count; i++) {
        int zero = next_random() % 100 < zeros;
        for (size_t k = 0; k < item_bytes; k++) /* a single set byte anywhere makes an item non-zero */
            items[i * item_bytes + k] = zero || next_random() % 2 ? 0 : (uint8_t)next_random();
    }
    size_t bytes = (size_t)port_bitmap_size(PACK_SCALAR, items, count, item_bytes);
    uint8_t *packed = block(bytes, skew), *reference = block(bytes, skew);
    CHECK(port_bitmap_size(level, items, count, item_bytes) == (int64_t)bytes);
    CHECK(port_bitmap_pack(PACK_SCALAR, items, count, item_bytes, reference, bytes) == (int64_t)bytes);
    CHECK(port_bitmap_pack(level, items, count, item_bytes, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    CHECK(port_bitmap_unpack(level, reference, bytes, back, count, item_bytes) == (int64_t)source);
    CHECK(memcmp(items, back, source) == 0);
    if (bytes) {
        CHECK(port_bitmap_pack(level, items, count, item_bytes, packed, bytes - 1) == PACK_OVERFLOW);
        CHECK(port_bitmap_unpack(level, reference, bytes - 1, back, count, item_bytes) == PACK_CORRUPT);
        reference[next_random() % ((count + 63) / 64 * 8)] ^= (uint8_t)(1u << next_random() % 8);
        CHECK(port_bitmap_unpack(level, reference, bytes, back, count, item_bytes) == PACK_CORRUPT);
    }
    release(items, skew), release(back, skew), release(packed, skew), release(reference, skew);
}

static void check_sign(int level, size_t count, size_t skew) {
    static const uint32_t HOSTILE[] = {0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 1, 0x80000001};
    size_t bytes = (count + 7) / 8;
    uint8_t *items = block(4 * count, skew), *gradients = block(4 * count, skew);
    uint8_t *to = block(4 * count, skew), *expected = block(4 * count, skew);
    uint8_t *packed = block(bytes, skew), *reference = block(bytes, skew);
    for (size_t i = 0; i < count; i++) {
        uint32_t value = next_random() % 2 ? HOSTILE[next_random() % 9] : next_random() << 8, gradient = next_random() << 8;
        memcpy(items + 4 * i, &value, sizeof value);
        memcpy(gradients + 4 * i, &gradient, sizeof gradient);
    }
    CHECK(port_sign_pack(PACK_SCALAR, items, count, reference, bytes) == (int64_t)bytes);
    CHECK(port_sign_pack(level, items, count, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    CHECK(port_sign_select(PACK_SCALAR, packed, bytes, gradients, expected, count, 0) == (int64_t)(4 * count));
    CHECK(port_sign_select(level, packed, bytes, gradients, to, count, 0) == (int64_t)(4 * count));
    CHECK(memcmp(to, expected, 4 * count) == 0);
    CHECK(port_sign_select(PACK_SCALAR, packed, bytes, gradients, expected, count, 1) == (int64_t)(4 * count));
    CHECK(port_sign_select(level, packed, bytes, gradients, to, count, 1) == (int64_t)(4 * count));
    CHECK(memcmp(to, expected, 4 * count) == 0);
    if (count) {
        CHECK(port_sign_pack(level, items, count, packed, bytes - 1) == PACK_OVERFLOW);
        CHECK(port_sign_select(level, packed, bytes - 1, gradients, to, count, 0) == PACK_CORRUPT);
    }
    release(items, skew), release(gradients, skew), release(to, skew), release(expected, skew);
    release(packed, skew), release(reference, skew);
}

static void check_inside(int level, size_t count, size_t skew) {
    static const float ENDS[] = {0.0f, -0.0f, 6.0f, 5.9999995f, 1e-45f, INFINITY, -INFINITY};
    size_t bytes = (count + 7) / 8;
    uint8_t *items = block(4 * count, skew), *packed = block(bytes, skew), *reference = block(bytes, skew);
    for (size_t i = 0; i < count; i++) {
        float value = next_random() % 3 ? ENDS[next_random() % 7] : (float)(next_random() % 900) / 100.0f - 1.0f;
        memcpy(items + 4 * i, &value, sizeof value);
    }
    CHECK(port_inside_pack(PACK_SCALAR, items, count, 0.0f, 6.0f, reference, bytes) == (int64_t)bytes);
    CHECK(port_inside_pack(level, items, count, 0.0f, 6.0f, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    if (count) {
        float nan = NAN;
        CHECK(port_inside_pack(level, items, count, 0.0f, 6.0f, packed, bytes - 1) == PACK_OVERFLOW);
        memcpy(items + 4 * (next_random() % count), &nan, sizeof nan);
        CHECK(port_inside_pack(level, items, count, 0.0f, 6.0f, packed, bytes) == PACK_UNSUITABLE);
    }
    release(items, skew), release(packed, skew), release(reference, skew);
}

static void check_pair(int level, size_t count, size_t skew) {
    size_t bytes = 8 + (count + 7) / 8;
    uint32_t value = next_random() | 1;
    uint8_t *items = block(4 * count, skew), *factors = block_of_random(4 * count, skew), *back = block(4 * count, skew);
    uint8_t *to = block(4 * count, skew), *expected = block(4 * count, skew);
    uint8_t *packed = block(bytes, skew), *reference = block(bytes, skew);
    for (size_t i = 0; i < count; i++) {
        uint32_t item = next_random() % 3 ? value : 0;
        memcpy(items + 4 * i, &item, sizeof item);
    }
    CHECK(port_pair_pack(PACK_SCALAR, items, count, reference, bytes) == (int64_t)bytes);
    CHECK(port_pair_pack(level, items, count, packed, bytes) == (int64_t)bytes);
    CHECK(memcmp(packed, reference, bytes) == 0);
    CHECK(port_pair_unpack(level, packed, bytes, back, count) == (int64_t)(4 * count));
    CHECK(memcmp(items, back, 4 * count) == 0);
    CHECK(port_pair_multiply(PACK_SCALAR, packed, bytes, factors, expected, count) == (int64_t)(4 * count));
    CHECK(port_pair_multiply(level, packed, bytes, factors, to, count) == (int64_t)(4 * count));
    CHECK(memcmp(to, expected, 4 * count) == 0);
    CHECK(port_pair_pack(level, items, count, packed, bytes - 1) == PACK_OVERFLOW);
    CHECK(port_pair_unpack(level, reference, bytes - 1, back, count) == PACK_CORRUPT);
    CHECK(port_pair_multiply(level, reference, bytes - 1, factors, to, count) == PACK_CORRUPT);
    if (count > 1) {
        uint32_t third = value ^ 0x40000000;
        memcpy(items, &value, sizeof value);
        memcpy(items + 4 * (1 + next_random() % (count - 1)), &third, sizeof third);
        CHECK(port_pair_pack(level, items, count, packed, bytes) == PACK_UNSUITABLE);
    }
    release(items, skew), release(factors, skew), release(back, skew), release(to, skew), release(expected, skew);
    release(packed, skew), release(reference, skew);
}

static void check_scatter(int level, size_t places, size_t skew) {
    size_t planes = 3, along = places / 2 + 1, count = planes * along;
    int64_t *indices = malloc(count * sizeof *indices);
    uint8_t *gradients = block(4 * count, skew), *to = block(4 * planes * places, skew), *packed = block(16 + 8 * count, skew);
    float *expected = calloc(planes * places + 1, sizeof *expected);
    for (size_t i = 0; i < count; i++) {
        float gradient = (float)next_random() / (1 << 20);
        indices[i] = (int64_t)(next_random() % places);
        memcpy(gradients + 4 * i, &gradient, sizeof gradient);
        expected[i / along * places + (size_t)indices[i]] += gradient;
    }
    size_t bytes = (size_t)port_narrow_pack(level, indices, count, packed, 16 + 8 * count);
    CHECK(port_narrow_scatter(packed, bytes, gradients, planes, along, places, to) == (int64_t)(4 * planes * places));
    CHECK(memcmp(to, expected, 4 * planes * places) == 0);
    CHECK(port_narrow_scatter(packed, bytes - 1, gradients, planes, along, places, to) == PACK_CORRUPT);
    indices[next_random() % count] = next_random() % 2 ? -1 : (int64_t)places;
    bytes = (size_t)port_narrow_pack(level, indices, count, packed, 16 + 8 * count);
    CHECK(port_narrow_scatter(packed, bytes, gradients, planes, along, places, to) == PACK_CORRUPT);
    release(gradients, skew), release(to, skew), release(packed, skew), free(indices), free(expected);
}

/* A rectangle of whole blocks inside a matrix of them. */
static void check_grid(int level, size_t item_bytes, int nibbles, size_t skew) {
    float levels[16];
    size_t along = nibbles ? 64 : 128, row_items = 3 * along, rows = 5, count = 2 * 2 * along;
    uint8_t *codes = block_of_random(rows * row_items / (nibbles ? 2 : 1), skew);
    float *scales = malloc(rows * 3 * sizeof *scales);
    for (size_t i = 0; i < 16; i++)
        levels[i] = (float)next_random() / (1 << 23) - 1.0f;
    for (size_t i = 0; i < rows * 3; i++)
        scales[i] = (float)next_random() / (1 << 20);
    const float *given = nibbles ? levels : NULL;
    uint8_t *made = block(count * item_bytes, skew), *reference = block(count * item_bytes, skew);
    int64_t written = (int64_t)(count * item_bytes);
    CHECK(port_grid_decode(PACK_SCALAR, codes, scales, given, row_items, 3, 2, along, 2 * along, item_bytes, reference) == written);
    CHECK(port_grid_decode(level, codes, scales, given, row_items, 3, 2, along, 2 * along, item_bytes, made) == written);
    CHECK(memcmp(made, reference, (size_t)written) == 0);
    CHECK(port_grid_decode(level, codes, scales, given, row_items, 3, 2, along, 3 * along, item_bytes, made) == PACK_UNSUITABLE);
    CHECK(port_grid_decode(level, codes, scales, given, row_items, 3, 2, 1, along, item_bytes, made) == PACK_UNSUITABLE);
    CHECK(port_grid_decode(level, codes, scales, given, row_items, 3, 2, 0, along, 3, made) == PACK_UNSUITABLE);
    uint8_t *found = block(count, skew);
    float *found_scales = malloc(count / along * sizeof *found_scales);
    for (size_t b = 0; b < count / along; b++) { /* its largest item has the largest level, as the encoder expects */
        float largest = 0.37f * (nibbles ? 1.0f : 127.0f);
        uint32_t bits;
        memcpy(&bits, &largest, sizeof bits);
        memset(reference + b * along * item_bytes, 0, along * item_bytes);
        memcpy(reference + b * along * item_bytes, (uint8_t *)&bits + 4 - item_bytes, item_bytes);
    }
    static const float STEPS[16] = {-1, -0.9f, -0.7f, -0.5f, -0.4f, -0.3f, -0.1f, 0, 0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.7f, 0.9f, 1};
    const float *grid = nibbles ? STEPS : NULL;
    CHECK(port_grid_encode(reference, count, item_bytes, grid, found, found_scales) >= 0);
    CHECK(port_grid_decode(level, found, found_scales, grid, count, 0, 1, 0, count, item_bytes, made) == written);
    CHECK(memcmp(made, reference, (size_t)written) == 0);
    CHECK(port_grid_encode(reference, count - 1, item_bytes, grid, found, found_scales) == PACK_UNSUITABLE);
    memset(reference, 0xFF, item_bytes); /* a NaN lies on no grid */
    CHECK(port_grid_encode(reference, count, item_bytes, grid, found, found_scales) == PACK_UNSUITABLE);
    release(codes, skew), release(made, skew), release(reference, skew), free(scales);
    release(found, skew), free(found_scales);
}

int main(void) {
    static const unsigned SHIFTS[] = {0, 20, 33, 50, 57, 63};
    static const uint32_t ZEROS[] = {0, 30, 50, 90, 100};
    for (int level = PACK_SCALAR; level <= port_pack_best_level(); level++) {
        for (size_t count = 0; count <= 1025; count++) {
            check_bits(level, count, count % 3);
            check_sign(level, count, count % 3);
            check_inside(level, count, count % 3);
            check_pair(level, count, count % 3);
            check_scatter(level, count + 1, count % 3);
            check_narrow(level, count, count % 3, SHIFTS[count % 6]);
            for (size_t item_bytes = 1; item_bytes <= 8; item_bytes *= 2)
                check_bitmap(level, count, item_bytes, count % 3, ZEROS[next_random() % 5]);
        }
        for (size_t skew = 0; skew < 4; skew++)
            for (int nibbles = 0; nibbles < 2; nibbles++)
                check_grid(level, 2, nibbles, skew), check_grid(level, 4, nibbles, skew);
        printf("level %d\n", level);
    }
    return 0;
}
