/* Page-aligned memory blocks, and a cache of freed ones that stays within a budget.
 *
 * Every block is a private anonymous mapping (or a part of one) of exactly the requested size, rounded up to pages. A
 * freed block stays mapped and resident for later requests as long as live + cached bytes fit within the limit. The
 * cache serves a request with a block of its size, a part of a larger one, or pages moved together from several. It
 * takes or unmaps the blocks first that were unused for longest. None of this faults pages in, and no page counts
 * twice: the resident memory of all blocks is at most `live + cached`, which is at most `limit` if `live` is.
 *
 * No function here calls malloc. All are safe to call from several threads; lookups are hashed or O(log n).
 */
#ifndef PORT_BLOCK_CACHE_H
#define PORT_BLOCK_CACHE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCK_CACHE_FIRST_BUCKETS 1024u

struct block;
struct segment;

/* A copy of the counters. All `_bytes` are multiples of the page size. The order is part of the binary interface. */
struct block_cache_stats {
    uint64_t live_bytes;          /* handed out and not freed */
    uint64_t cached_bytes;        /* freed, still mapped */
    uint64_t peak_live_bytes;     /* highest live_bytes since the last reset */
    uint64_t peak_mapped_bytes;   /* highest live_bytes + cached_bytes since the last reset */
    uint64_t limit_bytes;         /* cached blocks are unmapped to keep live + cached within this */
    uint64_t hard_limit_bytes;    /* requests that would raise live above this are refused */
    uint64_t live_blocks;
    uint64_t cached_blocks;
    uint64_t maps;                /* requests served with fresh zero pages alone */
    uint64_t reuses;              /* requests served from the cache */
    uint64_t splits;              /* of these, requests that took a part of a larger block */
    uint64_t assemblies;          /* requests served by moving pages of several cached blocks together */
    uint64_t moved_bytes;         /* pages moved for these */
    uint64_t evicted_bytes;       /* unmapped to stay within the limit, or by a trim */
    uint64_t refusals;            /* requests that returned no memory */
    uint64_t metadata_bytes;      /* mapped for bookkeeping, not part of live or cached */
};

/* Initialise with BLOCK_CACHE_INITIALIZER; usable before any constructor has run. */
struct block_cache {
    pthread_mutex_t lock;
    struct block_cache_stats stats;
    size_t page;                  /* page size in bytes, 0 until first use */
    struct block **buckets;       /* blocks by address; NULL until first use */
    size_t bucket_mask;
    size_t block_count;
    struct block *by_size;        /* root of the treap of cached blocks */
    struct block *oldest, *newest;
    struct block *spare;          /* unused nodes */
    struct segment *spare_segments;
    unsigned refused_moves;
    uint64_t clock;
    struct block *first_buckets[BLOCK_CACHE_FIRST_BUCKETS];
};

#define BLOCK_CACHE_INITIALIZER \
    {.lock = PTHREAD_MUTEX_INITIALIZER, .stats = {.limit_bytes = UINT64_MAX, .hard_limit_bytes = UINT64_MAX}}

/* Return a block of at least `bytes` at a multiple of `alignment` (a power of two), or NULL if memory is exhausted.
 * `*zeroed` is set to whether its content is known to be zero. */
void *block_cache_allocate(struct block_cache *cache, size_t bytes, size_t alignment, bool *zeroed);

/* Free a block; false if `address` is not a block of this cache. Freeing one twice aborts the process. */
bool block_cache_free(struct block_cache *cache, void *address);

/* Return the usable bytes of a live block, 0 if `address` is not one. */
size_t block_cache_usable(struct block_cache *cache, const void *address);

/* Change the size of a live block, and return its new address. Its content is kept: pages are moved, not copied.
 * NULL if that is impossible; the block is then unchanged. */
void *block_cache_resize(struct block_cache *cache, void *address, size_t bytes);

/* Unmap cached blocks, oldest first, until at most `keep` bytes of them are left; return the bytes unmapped. */
size_t block_cache_trim(struct block_cache *cache, size_t keep);

void block_cache_set_limit(struct block_cache *cache, size_t bytes);
void block_cache_set_hard_limit(struct block_cache *cache, size_t bytes);
void block_cache_reset_peak(struct block_cache *cache);
void block_cache_read(struct block_cache *cache, struct block_cache_stats *out);

/* Around fork(): the child must not inherit a lock that another thread holds. */
void block_cache_lock(struct block_cache *cache);
void block_cache_unlock(struct block_cache *cache);

#endif
