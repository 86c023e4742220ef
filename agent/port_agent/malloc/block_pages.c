#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mremap */
#endif
#include <sys/mman.h>

#include "block_internal.h"
#include "huge_pages.h"

#define SLAB_BYTES (64u << 10)

void *pages_map(size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return NULL;
    if (bytes >= HUGE_PAGE_BYTES)
        huge_pages_wish(pages, bytes); /* blocks are usually filled, so huge pages take no more memory */
    return pages;
}

void pages_unmap(uintptr_t address, size_t bytes) {
    /* Fails only if the kernel would have to split a mapping and exceed vm.max_map_count. The pages are unused, so
     * at least release their memory. */
    if (munmap((void *)address, bytes) != 0)
        madvise((void *)address, bytes, MADV_DONTNEED);
}

static void give_segment(struct block_cache *cache, struct segment *segment) {
    segment->next = cache->spare_segments;
    cache->spare_segments = segment;
}

static struct segment *take_segment(struct block_cache *cache) {
    struct segment *segment = cache->spare_segments;
    cache->spare_segments = segment->next;
    return segment;
}

/* Have the two segments that one request may need: one for a cut, one for a fresh range. */
bool segments_reserve(struct block_cache *cache) {
    if (cache->spare_segments && cache->spare_segments->next)
        return true;
    struct segment *slab = pages_map(SLAB_BYTES);
    if (!slab)
        return false;
    cache->stats.metadata_bytes += SLAB_BYTES;
    for (size_t i = SLAB_BYTES / sizeof *slab; i-- > 0;)
        give_segment(cache, &slab[i]);
    return true;
}

void segments_drop(struct block_cache *cache, struct segment *list) {
    while (list) {
        struct segment *next = list->next;
        give_segment(cache, list);
        list = next;
    }
}

size_t segments_count(const struct segment *list) {
    size_t count = 0;
    for (; list; list = list->next)
        count++;
    return count;
}

/* Describe a block that is a single fresh mapping. */
void segments_start(struct block_cache *cache, struct block *block) {
    block->segments = take_segment(cache);
    *block->segments = (struct segment){block->address, block->bytes, ++cache->clock, NULL};
}

/* Remove everything after the first `kept` bytes of the block from its list. */
void segments_cut(struct block_cache *cache, struct block *block, size_t kept, struct segment **tail) {
    uintptr_t end = block->address + kept;
    struct segment *last = block->segments;
    while (last->address + last->bytes < end)
        last = last->next;
    if (last->address + last->bytes > end) {
        struct segment *rest = take_segment(cache);
        *rest = (struct segment){end, last->address + last->bytes - end, last->mapping, last->next};
        last->bytes = end - last->address;
        last->next = rest;
    }
    *tail = last->next;
    last->next = NULL;
}

/* Forget everything after the first `kept` bytes of the block; needs no memory. */
void segments_shorten(struct block_cache *cache, struct block *block, size_t kept) {
    uintptr_t end = block->address + kept;
    struct segment *last = block->segments;
    while (last->address + last->bytes < end)
        last = last->next;
    last->bytes = end - last->address;
    segments_drop(cache, last->next);
    last->next = NULL;
}

/* Append the list of the right neighbour. */
void segments_join(struct block_cache *cache, struct block *block, struct segment *more) {
    struct segment *last = block->segments;
    while (last->next)
        last = last->next;
    if (last->mapping == more->mapping) {
        last->bytes += more->bytes;
        last->next = more->next;
        give_segment(cache, more);
    } else {
        last->next = more;
    }
}

/* Move the pages of a whole list, without gaps, to the reserved addresses from `target` on. If the kernel refuses to
 * move a segment, return the link to it: those before it have moved, it and those after it have not. */
struct segment **segments_move(struct block_cache *cache, struct segment **link, uintptr_t target) {
    for (; *link; link = &(*link)->next) {
        struct segment *segment = *link;
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        if (mremap((void *)segment->address, segment->bytes, segment->bytes, flags, (void *)target) == MAP_FAILED)
            return link;
        segment->address = target;
        segment->mapping = ++cache->clock;
        cache->stats.moved_bytes += segment->bytes;
        target += segment->bytes;
    }
    return NULL;
}
