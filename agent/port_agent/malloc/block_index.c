#include "block_internal.h"

#define SLAB_BYTES (64u << 10)

/* ---- nodes and the table of addresses -------------------------------------------------------------------------- */

static size_t bucket_of(const struct block_cache *cache, uintptr_t address) {
    return (size_t)(((uint64_t)(address / cache->page) * 0x9E3779B97F4A7C15u) >> 32) & cache->bucket_mask;
}

struct block *block_find(const struct block_cache *cache, uintptr_t address) {
    if (!cache->page || address & (cache->page - 1))
        return NULL;
    struct block *block = cache->buckets[bucket_of(cache, address)];
    while (block && block->address != address)
        block = block->next_in_bucket;
    return block;
}

/* Double the number of buckets; without memory for them, chains just get longer. */
static void grow_table(struct block_cache *cache) {
    size_t old_count = cache->bucket_mask + 1, new_bytes = 2 * old_count * sizeof(struct block *);
    struct block **old = cache->buckets, **new = pages_map(new_bytes);
    if (!new)
        return;
    cache->buckets = new;
    cache->bucket_mask = 2 * old_count - 1;
    cache->stats.metadata_bytes += new_bytes;
    for (size_t i = 0; i < old_count; i++) {
        for (struct block *block = old[i], *next; block; block = next) {
            next = block->next_in_bucket;
            size_t bucket = bucket_of(cache, block->address);
            block->next_in_bucket = new[bucket];
            new[bucket] = block;
        }
    }
    if (old != cache->first_buckets) {
        pages_unmap((uintptr_t)old, old_count * sizeof(struct block *));
        cache->stats.metadata_bytes -= old_count * sizeof(struct block *);
    }
}

void block_table_insert(struct block_cache *cache, struct block *block) {
    if (++cache->block_count > cache->bucket_mask)
        grow_table(cache);
    size_t bucket = bucket_of(cache, block->address);
    block->next_in_bucket = cache->buckets[bucket];
    cache->buckets[bucket] = block;
}

void block_table_remove(struct block_cache *cache, struct block *block) {
    struct block **link = &cache->buckets[bucket_of(cache, block->address)];
    while (*link != block)
        link = &(*link)->next_in_bucket;
    *link = block->next_in_bucket;
    cache->block_count--;
}

void block_give_node(struct block_cache *cache, struct block *node) {
    node->next_in_bucket = cache->spare;
    cache->spare = node;
}

/* Have as many unused nodes as one request may need; false if there is no memory for them. */
bool block_reserve_nodes(struct block_cache *cache) {
    if (!cache->spare) {
        struct block *slab = pages_map(SLAB_BYTES);
        if (!slab)
            return false;
        cache->stats.metadata_bytes += SLAB_BYTES;
        for (size_t i = SLAB_BYTES / sizeof *slab; i-- > 0;)
            block_give_node(cache, &slab[i]);
    }
    return segments_reserve(cache);
}

struct block *block_take_node(struct block_cache *cache) {
    struct block *node = cache->spare;
    cache->spare = node->next_in_bucket;
    *node = (struct block){0};
    return node;
}

/* ---- cached blocks: a treap by size (of equal ones the newest first) and a list by age --------------------------- */

static bool sorts_before(const struct block *a, const struct block *b) {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->age > b->age;
}

/* The heap key of the treap: a fixed mix of the age is as good as a random number (splitmix64). */
static uint64_t priority(const struct block *block) {
    uint64_t x = block->age * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static void tree_insert(struct block_cache *cache, struct block *block) {
    struct block **link = &cache->by_size;
    while (*link && priority(*link) > priority(block))
        link = sorts_before(block, *link) ? &(*link)->smaller : &(*link)->larger;
    struct block *rest = *link, **smaller = &block->smaller, **larger = &block->larger;
    *link = block;
    while (rest) {
        if (sorts_before(block, rest)) {
            *larger = rest;
            larger = &rest->smaller;
            rest = rest->smaller;
        } else {
            *smaller = rest;
            smaller = &rest->larger;
            rest = rest->larger;
        }
    }
    *smaller = *larger = NULL;
}

static void tree_remove(struct block_cache *cache, struct block *block) {
    struct block **link = &cache->by_size;
    while (*link != block)
        link = sorts_before(block, *link) ? &(*link)->smaller : &(*link)->larger;
    struct block *a = block->smaller, *b = block->larger;
    while (a && b) {
        struct block *top = priority(a) > priority(b) ? a : b;
        *link = top;
        link = top == a ? &a->larger : &b->smaller;
        if (top == a)
            a = a->larger;
        else
            b = b->smaller;
    }
    *link = a ? a : b;
}

/* Return the smallest cached block of at least `bytes`. */
struct block *block_index_find(const struct block_cache *cache, size_t bytes) {
    struct block *best = NULL, *node = cache->by_size;
    while (node) {
        if (node->bytes >= bytes)
            best = node;
        node = node->bytes >= bytes ? node->smaller : node->larger;
    }
    return best;
}

static void list_append(struct block_cache *cache, struct block *block) {
    block->newer = NULL;
    block->older = cache->newest;
    if (cache->newest)
        cache->newest->newer = block;
    else
        cache->oldest = block;
    cache->newest = block;
}

static void list_remove(struct block_cache *cache, struct block *block) {
    if (block->older)
        block->older->newer = block->newer;
    else
        cache->oldest = block->newer;
    if (block->newer)
        block->newer->older = block->older;
    else
        cache->newest = block->older;
}

void block_index_insert(struct block_cache *cache, struct block *block) {
    block->live = false;
    block->age = ++cache->clock;
    tree_insert(cache, block);
    list_append(cache, block);
    cache->stats.cached_bytes += block->bytes;
    cache->stats.cached_blocks++;
}

void block_index_remove(struct block_cache *cache, struct block *block) {
    tree_remove(cache, block);
    list_remove(cache, block);
    cache->stats.cached_bytes -= block->bytes;
    cache->stats.cached_blocks--;
}

/* Shorten a cached block to its first `bytes`; its age stays. */
void block_index_shrink(struct block_cache *cache, struct block *block, size_t bytes) {
    tree_remove(cache, block);
    cache->stats.cached_bytes -= block->bytes - bytes;
    block->bytes = bytes;
    tree_insert(cache, block);
}
