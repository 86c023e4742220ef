#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mremap */
#endif
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block_internal.h"

/* Moving more segments than this into one block takes longer than faulting in fresh pages. */
#define MOST_SEGMENTS 32u

/* Stop moving pages after the kernel has refused this often: someone else changed a part of our mappings. */
#define MOST_REFUSED_MOVES 8u

static void die(const char *message) {
    ssize_t written = write(STDERR_FILENO, message, strlen(message));
    (void)written;
    abort();
}

void block_cache_lock(struct block_cache *cache) { pthread_mutex_lock(&cache->lock); }

void block_cache_unlock(struct block_cache *cache) { pthread_mutex_unlock(&cache->lock); }

static void prepare(struct block_cache *cache) {
    if (cache->page)
        return;
    cache->page = (size_t)getauxval(AT_PAGESZ);
    cache->buckets = cache->first_buckets;
    cache->bucket_mask = BLOCK_CACHE_FIRST_BUCKETS - 1;
}

/* ---- neighbours of one origin ------------------------------------------------------------------------------------ */

static void link_after(struct block *block, struct block *new) {
    new->before = block;
    new->after = block->after;
    if (block->after)
        block->after->before = new;
    block->after = new;
}

static void cut_before(struct block *block) {
    if (block->before)
        block->before->after = NULL;
    block->before = NULL;
}

static void cut_after(struct block *block) {
    if (block->after)
        block->after->before = NULL;
    block->after = NULL;
}

/* Merge `block` with its right neighbour; neither is in the cache. */
static void absorb_after(struct block_cache *cache, struct block *block) {
    struct block *gone = block->after;
    segments_join(cache, block, gone->segments);
    block->bytes += gone->bytes;
    block->after = gone->after;
    if (block->after)
        block->after->before = block;
    block_table_remove(cache, gone);
    block_give_node(cache, gone);
}

/* Put a block that is no longer live into the cache, merged with free neighbours. */
static void retire(struct block_cache *cache, struct block *block) {
    block->live = false;
    if (block->after && !block->after->live) {
        block_index_remove(cache, block->after);
        absorb_after(cache, block);
    }
    if (block->before && !block->before->live) {
        block = block->before;
        block_index_remove(cache, block);
        absorb_after(cache, block);
    }
    block_index_insert(cache, block);
}

/* ---- the budget -------------------------------------------------------------------------------------------------- */

/* Unmap about `bytes` of the cache, oldest first: whole blocks, but only the necessary part of the last one. */
static void evict(struct block_cache *cache, size_t bytes) {
    while (bytes && cache->oldest) {
        struct block *block = cache->oldest;
        if (block->bytes > bytes) {
            size_t kept = block->bytes - bytes;
            segments_shorten(cache, block, kept);
            block_index_shrink(cache, block, kept);
            cut_after(block);
            pages_unmap(block->address + kept, bytes);
            cache->stats.evicted_bytes += bytes;
            return;
        }
        bytes -= block->bytes;
        cache->stats.evicted_bytes += block->bytes;
        block_index_remove(cache, block);
        cut_before(block);
        cut_after(block);
        pages_unmap(block->address, block->bytes);
        segments_drop(cache, block->segments);
        block_table_remove(cache, block);
        block_give_node(cache, block);
    }
}

/* Return by how many bytes, in whole pages, the limit would be exceeded with `more` live bytes. */
static size_t excess(const struct block_cache *cache, size_t more) {
    const struct block_cache_stats *stats = &cache->stats;
    uint64_t wanted = stats->live_bytes + stats->cached_bytes + more;
    return wanted > stats->limit_bytes ? round_to_pages(cache, (size_t)(wanted - stats->limit_bytes)) : 0;
}

/* Unmap cached blocks until `more` bytes fit within the limit, or nothing is cached. */
static void make_room(struct block_cache *cache, size_t more) { evict(cache, excess(cache, more)); }

static bool refused(struct block_cache *cache, size_t more) {
    return more > cache->stats.hard_limit_bytes ||
           cache->stats.live_bytes > cache->stats.hard_limit_bytes - more;
}

static void count_live(struct block_cache *cache, size_t bytes) {
    struct block_cache_stats *stats = &cache->stats;
    stats->live_bytes += bytes;
    if (stats->live_bytes > stats->peak_live_bytes)
        stats->peak_live_bytes = stats->live_bytes;
    if (stats->live_bytes + stats->cached_bytes > stats->peak_mapped_bytes)
        stats->peak_mapped_bytes = stats->live_bytes + stats->cached_bytes;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

/* Map fresh zero pages at a multiple of `alignment`. If a kernel limit (RLIMIT_DATA, RLIMIT_AS) prevents that, unmap
 * cached blocks and try again: first as many bytes as were requested, then all. */
static uintptr_t map_aligned(struct block_cache *cache, size_t bytes, size_t alignment) {
    size_t extra = alignment > cache->page ? alignment - cache->page : 0;
    if (bytes + extra < bytes)
        return 0;
    void *pages = pages_map(bytes + extra);
    for (int attempt = 0; !pages && cache->stats.cached_bytes && attempt < 2; attempt++) {
        evict(cache, attempt == 0 ? bytes + extra : (size_t)cache->stats.cached_bytes);
        pages = pages_map(bytes + extra);
    }
    if (!pages)
        return 0;
    uintptr_t start = (uintptr_t)pages, address = (start + alignment - 1) & ~(uintptr_t)(alignment - 1);
    if (alignment <= cache->page)
        return start;
    if (address > start)
        pages_unmap(start, address - start);
    if (start + extra > address)
        pages_unmap(address + bytes, start + extra - address);
    return address;
}

/* Remove `bytes` from the end of a cached block, with their pages. */
static struct segment *detach(struct block_cache *cache, struct block *source, size_t bytes) {
    struct segment *list;
    if (source->bytes > bytes) {
        segments_cut(cache, source, source->bytes - bytes, &list);
        block_index_shrink(cache, source, source->bytes - bytes);
        cut_after(source);
        return list;
    }
    list = source->segments;
    block_index_remove(cache, source);
    cut_before(source);
    cut_after(source);
    block_table_remove(cache, source);
    block_give_node(cache, source);
    return list;
}

static void unmap_list(struct block_cache *cache, struct segment *list) {
    for (struct segment *segment = list; segment; segment = segment->next) {
        pages_unmap(segment->address, segment->bytes);
        cache->stats.evicted_bytes += segment->bytes;
    }
    segments_drop(cache, list);
}

/* Undo a move that the kernel refused at `hole`. The addresses of the hole may belong to someone else now, so they
 * are left alone. The ranges before and after them are unmapped, and so are the pages that did not move. */
static void abandon(struct block_cache *cache, const struct block *block, uintptr_t hole, size_t hole_bytes,
                    struct segment *unmoved) {
    uintptr_t end = block->address + block->bytes;
    if (hole > block->address)
        pages_unmap(block->address, hole - block->address);
    if (hole + hole_bytes < end)
        pages_unmap(hole + hole_bytes, end - hole - hole_bytes);
    unmap_list(cache, unmoved);
    segments_drop(cache, block->segments);
    cache->refused_moves++;
}

/* Move pages of the oldest cached blocks, `wanted` bytes in all, to the start of a reserved block. Return the bytes
 * moved, or -1 if the kernel refused. Blocks in too many segments are unmapped instead, which limits fragmentation. */
static ptrdiff_t move_oldest(struct block_cache *cache, struct block *block, size_t wanted) {
    size_t moved = 0, segments = 0;
    struct segment **end = &block->segments;
    while (wanted && cache->oldest) {
        size_t bytes = cache->oldest->bytes < wanted ? cache->oldest->bytes : wanted;
        struct segment *list = detach(cache, cache->oldest, bytes);
        wanted -= bytes;
        segments += segments_count(list);
        if (segments > MOST_SEGMENTS) {
            segments -= segments_count(list);
            unmap_list(cache, list);
            continue;
        }
        *end = list;
        struct segment **refused = segments_move(cache, end, block->address + moved);
        if (refused) {
            struct segment *unmoved = *refused;
            uintptr_t hole = block->address + moved;
            *refused = NULL;
            for (const struct segment *done = *end; done; done = done->next)
                hole += done->bytes;
            abandon(cache, block, hole, unmoved->bytes, unmoved);
            return -1;
        }
        while (*end)
            end = &(*end)->next;
        moved += bytes;
    }
    return (ptrdiff_t)moved;
}

/* Map fresh zero pages over the last `bytes` of a reserved block. */
static bool add_fresh_tail(struct block_cache *cache, struct block *block, size_t bytes) {
    uintptr_t address = block->address + block->bytes - bytes;
    bool done = mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) == 0;
    if (!done && cache->stats.cached_bytes) {
        evict(cache, (size_t)cache->stats.cached_bytes);
        done = mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) == 0;
    }
    if (!done)
        return false;
    struct block tail = {.address = address, .bytes = bytes};
    segments_start(cache, &tail);
    if (block->segments)
        segments_join(cache, block, tail.segments);
    else
        block->segments = tail.segments;
    return true;
}

/* Build a block from pages of cached ones if fresh pages would exceed the limit. Moving a page to another address is
 * far cheaper than unmapping one and faulting in another. */
static bool assembled_pages(struct block_cache *cache, struct block *block) {
    size_t wanted = excess(cache, block->bytes);
    wanted = wanted < block->bytes ? wanted : block->bytes;
    if (!wanted || !cache->oldest || cache->refused_moves >= MOST_REFUSED_MOVES)
        return false;
    /* RLIMIT_DATA does not count a mapping without access: it counts once pages come. */
    void *reserved = mmap(NULL, block->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED)
        return false;
    block->address = (uintptr_t)reserved;
    ptrdiff_t moved = move_oldest(cache, block, wanted);
    if (moved < 0)
        return false;
    size_t rest = block->bytes - (size_t)moved;
    if (rest && !add_fresh_tail(cache, block, rest)) {
        pages_unmap(block->address, block->bytes);
        segments_drop(cache, block->segments);
        return false;
    }
    cache->stats.assemblies++;
    return true;
}

static bool fresh_pages(struct block_cache *cache, struct block *block, size_t alignment) {
    make_room(cache, block->bytes);
    block->address = map_aligned(cache, block->bytes, alignment);
    if (!block->address)
        return false;
    segments_start(cache, block);
    cache->stats.maps++;
    return true;
}

/* Take the last `bytes` of a larger cached block; the rest stays in the cache. */
static struct block *split_cached(struct block_cache *cache, struct block *source, size_t bytes) {
    struct block *block = block_take_node(cache);
    segments_cut(cache, source, source->bytes - bytes, &block->segments);
    block_index_shrink(cache, source, source->bytes - bytes);
    block->address = source->address + source->bytes;
    block->bytes = bytes;
    link_after(source, block);
    block_table_insert(cache, block);
    cache->stats.splits++;
    return block;
}

/* Return a cached block of exactly this size or, if fresh pages would exceed the limit, a part of a larger one. */
static struct block *reuse_block(struct block_cache *cache, size_t bytes, size_t alignment) {
    const struct block_cache_stats *stats = &cache->stats;
    struct block *found = block_index_find(cache, bytes);
    if (!found)
        return NULL;
    if (found->bytes == bytes) {
        if (found->address & (alignment - 1))
            return NULL;
        block_index_remove(cache, found);
        return found;
    }
    bool near = found->bytes - bytes <= bytes / 8;
    bool full = stats->live_bytes + stats->cached_bytes + bytes > stats->limit_bytes;
    if (alignment > cache->page || !(near || full))
        return NULL;
    return split_cached(cache, found, bytes);
}

static struct block *new_block(struct block_cache *cache, size_t bytes, size_t alignment, bool *zeroed) {
    struct block *block = block_take_node(cache);
    block->bytes = bytes;
    if (alignment > cache->page || !assembled_pages(cache, block)) {
        block->segments = NULL;
        *zeroed = fresh_pages(cache, block, alignment);
        if (!*zeroed) {
            block_give_node(cache, block);
            return NULL;
        }
    }
    block_table_insert(cache, block);
    return block;
}

/* Serve a request for whole pages; NULL if there is no memory. */
static struct block *serve(struct block_cache *cache, size_t bytes, size_t alignment, bool *zeroed) {
    if (!bytes || bytes > PTRDIFF_MAX || refused(cache, bytes))
        return NULL;
    if (!block_reserve_nodes(cache)) {
        evict(cache, (size_t)cache->stats.cached_bytes);
        if (!block_reserve_nodes(cache))
            return NULL;
    }
    struct block *block = reuse_block(cache, bytes, alignment);
    if (block)
        cache->stats.reuses++;
    return block ? block : new_block(cache, bytes, alignment, zeroed);
}

void *block_cache_allocate(struct block_cache *cache, size_t bytes, size_t alignment, bool *zeroed) {
    *zeroed = false;
    block_cache_lock(cache);
    prepare(cache);
    size_t rounded = round_to_pages(cache, bytes);
    struct block *block = rounded >= bytes ? serve(cache, rounded, alignment, zeroed) : NULL;
    void *address = NULL;
    if (block) {
        block->live = true;
        cache->stats.live_blocks++;
        count_live(cache, rounded);
        address = (void *)block->address;
    } else {
        cache->stats.refusals++;
    }
    block_cache_unlock(cache);
    return address;
}

bool block_cache_free(struct block_cache *cache, void *address) {
    block_cache_lock(cache);
    struct block *block = block_find(cache, (uintptr_t)address);
    if (block) {
        if (!block->live)
            die("budget malloc: a block was freed twice\n");
        cache->stats.live_bytes -= block->bytes;
        cache->stats.live_blocks--;
        retire(cache, block);
        make_room(cache, 0);
    }
    block_cache_unlock(cache);
    return block != NULL;
}

size_t block_cache_usable(struct block_cache *cache, const void *address) {
    block_cache_lock(cache);
    const struct block *block = block_find(cache, (uintptr_t)address);
    size_t bytes = block && block->live ? block->bytes : 0;
    block_cache_unlock(cache);
    return bytes;
}

/* Move the tail of a live block to the cache. If there is no memory for its record, the block keeps its size. */
static void shrink_live(struct block_cache *cache, struct block *block, size_t bytes) {
    if (!block_reserve_nodes(cache))
        return;
    struct block *tail = block_take_node(cache);
    segments_cut(cache, block, bytes, &tail->segments);
    tail->address = block->address + bytes;
    tail->bytes = block->bytes - bytes;
    block->bytes = bytes;
    cache->stats.live_bytes -= tail->bytes;
    link_after(block, tail);
    block_table_insert(cache, tail);
    retire(cache, tail);
    make_room(cache, 0);
}

/* Grow a live block by moving its pages to a larger range of addresses. */
static bool grow_live(struct block_cache *cache, struct block *block, size_t bytes) {
    size_t more = bytes - block->bytes;
    if (refused(cache, more) || block->segments->next)
        return false; /* mremap cannot grow several mappings at once */
    make_room(cache, more);
    void *moved = mremap((void *)block->address, block->bytes, bytes, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED && errno == ENOMEM && cache->stats.cached_bytes) {
        evict(cache, (size_t)cache->stats.cached_bytes);
        moved = mremap((void *)block->address, block->bytes, bytes, MREMAP_MAYMOVE);
    }
    if (moved == MAP_FAILED)
        return false;
    cut_before(block);
    cut_after(block);
    block_table_remove(cache, block);
    block->address = (uintptr_t)moved;
    block->bytes = bytes;
    block_table_insert(cache, block);
    *block->segments = (struct segment){block->address, bytes, ++cache->clock, NULL};
    count_live(cache, more);
    return true;
}

void *block_cache_resize(struct block_cache *cache, void *address, size_t bytes) {
    block_cache_lock(cache);
    void *result = NULL;
    struct block *block = block_find(cache, (uintptr_t)address);
    if (block && block->live) {
        size_t rounded = round_to_pages(cache, bytes);
        bool fits = bytes && rounded >= bytes && rounded <= PTRDIFF_MAX;
        if (fits && rounded < block->bytes)
            shrink_live(cache, block, rounded);
        if (fits && (rounded <= block->bytes || grow_live(cache, block, rounded)))
            result = (void *)block->address;
    }
    block_cache_unlock(cache);
    return result;
}

size_t block_cache_trim(struct block_cache *cache, size_t keep) {
    block_cache_lock(cache);
    uint64_t before = cache->stats.cached_bytes;
    if (before > keep)
        evict(cache, round_to_pages(cache, (size_t)(before - keep)));
    size_t given_back = (size_t)(before - cache->stats.cached_bytes);
    block_cache_unlock(cache);
    return given_back;
}

void block_cache_set_limit(struct block_cache *cache, size_t bytes) {
    block_cache_lock(cache);
    prepare(cache);
    cache->stats.limit_bytes = bytes;
    make_room(cache, 0);
    block_cache_unlock(cache);
}

void block_cache_set_hard_limit(struct block_cache *cache, size_t bytes) {
    block_cache_lock(cache);
    cache->stats.hard_limit_bytes = bytes;
    block_cache_unlock(cache);
}

void block_cache_reset_peak(struct block_cache *cache) {
    block_cache_lock(cache);
    cache->stats.peak_live_bytes = cache->stats.live_bytes;
    cache->stats.peak_mapped_bytes = cache->stats.live_bytes + cache->stats.cached_bytes;
    block_cache_unlock(cache);
}

void block_cache_read(struct block_cache *cache, struct block_cache_stats *out) {
    block_cache_lock(cache);
    *out = cache->stats;
    block_cache_unlock(cache);
}
