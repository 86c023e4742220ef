/* Memory that was allocated but not yet touched. The kernel holds no pages for it yet, but will, so a measurement of the
 * process is too low by that much. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/mman.h>
#include <time.h>

#include "guard_internal.h"

#define BLOCKS 2048
#define ALLOCATIONS 32
#define PAGES_AT_ONCE 65536
#define LOOK_SHARE 20          /* divisor: looking may take one part in this many of the time */
#define PATIENCE_NS 100000000u /* of the process's CPU time: an allocation that is being filled grows within it */

/* An allocation of the program other than a tensor. Nothing tells whether it will ever be filled, so one that stops
 * growing no longer counts as coming. */
struct allocation {
    struct span span;
    size_t untouched;
    uint64_t grew_at_ns;
};

static uint32_t blocks_[BLOCKS];
static unsigned block_count_;
static struct allocation allocations_[ALLOCATIONS];
static unsigned allocation_count_;
static struct untouched untouched_; /* at the last look, plus allocations since then */
static uint64_t next_look_ns_;

static uint64_t own_time_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void untouched_note(struct block *block, size_t fresh) {
    untouched_.tensor_bytes += fresh;
    if (block->unseen || block_count_ == BLOCKS)
        return;
    block->unseen = 1;
    blocks_[block_count_++] = arena_index_of(block);
}

void untouched_expect(uintptr_t address, size_t bytes) {
    untouched_.other_bytes += bytes;
    if (allocation_count_ == ALLOCATIONS)
        allocations_[0] = allocations_[--allocation_count_];
    allocations_[allocation_count_++] = (struct allocation){{address, bytes}, bytes, own_time_ns()};
}

/* Return how much of such addresses has no pages; 0 if they are no longer allocated, or the kernel does not report it. */
static size_t without_pages(struct span span) {
    static unsigned char pages[PAGES_AT_ONCE];
    size_t untouched = 0;
    for (size_t done = 0, part; done < span.bytes; done += part) {
        size_t left = span.bytes - done;
        part = left < PAGES_AT_ONCE * guard_page ? left : PAGES_AT_ONCE * guard_page;
        if (mincore((void *)(span.address + done), part, pages))
            return 0;
        for (size_t i = 0; i < part / guard_page; i++)
            untouched += pages[i] & 1 ? 0 : guard_page;
    }
    return untouched;
}

static size_t look_at_blocks(void) {
    size_t all = 0;
    for (unsigned i = 0; i < block_count_;) {
        struct block *block = arena_block(blocks_[i]);
        size_t untouched = 0;
        for (int k = 0; k < block->span_count; k++)
            untouched += without_pages(block->spans[k]);
        all += untouched;
        if (untouched) {
            i++;
        } else {
            block->unseen = 0;
            blocks_[i] = blocks_[--block_count_];
        }
    }
    return all;
}

static size_t look_at_allocations(void) {
    size_t all = 0;
    uint64_t now = allocation_count_ ? own_time_ns() : 0;
    for (unsigned i = 0; i < allocation_count_;) {
        struct allocation *allocation = &allocations_[i];
        size_t untouched = without_pages(allocation->span);
        if (untouched < allocation->untouched)
            allocation->grew_at_ns = now;
        allocation->untouched = untouched;
        if (untouched && now - allocation->grew_at_ns < PATIENCE_NS) {
            all += untouched;
            i++;
        } else {
            *allocation = allocations_[--allocation_count_];
        }
    }
    return all;
}

struct untouched untouched_now(void) {
    uint64_t begin = guard_now_ns();
    if (begin >= next_look_ns_) {
        untouched_ = (struct untouched){look_at_blocks(), look_at_allocations()};
        uint64_t end = guard_now_ns();
        next_look_ns_ = end + (end - begin) * LOOK_SHARE;
    }
    return untouched_;
}
