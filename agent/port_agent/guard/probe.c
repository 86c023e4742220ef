/* Test whether guarded memory works on this machine: blocks that do not fit together are written, evicted, and come back
 * unchanged. */
#include "guard.h"

#define BLOCKS 8
#define BLOCK_BYTES ((size_t)256 << 10)

#define EXPORT __attribute__((visibility("default")))

static uint64_t value_at(size_t block, size_t index) { return (block + 1) * 0x9E3779B97F4A7C15u ^ index; }

/* Return how many words came back with another value; -1 if a block could not be allocated. To be called in a process of
 * its own. */
EXPORT long port_guard_try(void) {
    volatile uint64_t *blocks[BLOCKS];
    size_t words = BLOCK_BYTES / sizeof **blocks;
    guard_set_limit(2 * BLOCK_BYTES);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = guard_allocate(BLOCK_BYTES);
        if (!blocks[i])
            return -1;
        for (size_t at = 0; at < words; at++)
            blocks[i][at] = value_at(i, at);
    }
    for (size_t i = 0; i < BLOCKS; i++)
        if (!guard_evict((const void *)blocks[i]))
            return -1;
    long wrong = 0;
    for (size_t i = 0; i < BLOCKS; i++)
        for (size_t at = 0; at < words; at++)
            wrong += blocks[i][at] != value_at(i, at);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i][0] += 1; /* a clean block becomes dirty */
        wrong += !guard_evict((const void *)blocks[i]) || blocks[i][0] != value_at(i, 0) + 1;
    }
    for (size_t i = 0; i < BLOCKS; i++)
        guard_free((void *)blocks[i]);
    return wrong;
}
