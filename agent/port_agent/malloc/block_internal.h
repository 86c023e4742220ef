/* Shared by the files of the block cache; not for other code. All functions need the cache's lock to be held. */
#ifndef PORT_BLOCK_INTERNAL_H
#define PORT_BLOCK_INTERNAL_H

#include "block_cache.h"

/* A range of pages within one kernel mapping, which mremap can move in one call. */
struct segment {
    uintptr_t address;
    size_t bytes;
    uint64_t mapping;         /* neighbours in a list with the same number form one range */
    struct segment *next;
};

/* One contiguous range of addresses, handed out or cached. `before` and `after` are the neighbours that were cut
 * from the same range: two of them are merged again when both are free. Blocks of different origin are never merged,
 * because a training step requests the same sizes over and over. */
struct block {
    uintptr_t address;
    size_t bytes;
    bool live;
    uint64_t age;                     /* clock of the last free; unique among cached blocks */
    struct segment *segments;         /* cover the block, in order of address */
    struct block *next_in_bucket;     /* also links unused nodes */
    struct block *before, *after;
    struct block *older, *newer;      /* cached blocks only */
    struct block *smaller, *larger;   /* cached blocks only: children in the treap */
};

/* block_index.c: blocks by address, cached blocks by size and age. */
bool block_reserve_nodes(struct block_cache *cache);
struct block *block_take_node(struct block_cache *cache);
void block_give_node(struct block_cache *cache, struct block *node);
struct block *block_find(const struct block_cache *cache, uintptr_t address);
void block_table_insert(struct block_cache *cache, struct block *block);
void block_table_remove(struct block_cache *cache, struct block *block);
void block_index_insert(struct block_cache *cache, struct block *block);
void block_index_remove(struct block_cache *cache, struct block *block);
void block_index_shrink(struct block_cache *cache, struct block *block, size_t bytes);
struct block *block_index_find(const struct block_cache *cache, size_t bytes);

/* block_pages.c: the kernel mappings of the blocks. */
void *pages_map(size_t bytes);
void pages_unmap(uintptr_t address, size_t bytes);
bool segments_reserve(struct block_cache *cache);
void segments_start(struct block_cache *cache, struct block *block);
void segments_cut(struct block_cache *cache, struct block *block, size_t kept, struct segment **tail);
void segments_shorten(struct block_cache *cache, struct block *block, size_t kept);
void segments_join(struct block_cache *cache, struct block *block, struct segment *more);
void segments_drop(struct block_cache *cache, struct segment *list);
size_t segments_count(const struct segment *list);
struct segment **segments_move(struct block_cache *cache, struct segment **link, uintptr_t target);

static inline size_t round_to_pages(const struct block_cache *cache, size_t bytes) {
    return (bytes + cache->page - 1) & ~(cache->page - 1);
}

#endif
