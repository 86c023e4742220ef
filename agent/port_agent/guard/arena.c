/* Addresses of guarded blocks: one reserved range, an index from its granules to blocks, records of blocks.
 *
 * Addresses are plentiful and pages are not. The addresses of an allocation are rounded up to size classes, four to each
 * power of two, and reused by class, with their records; its pages are exactly what was requested.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guard_internal.h"

#define MOST_BLOCKS (1u << 22)
#define CLASSES 256
#define MOST_ADOPTED (1u << 16)

size_t guard_page;
static uintptr_t begin_, end_;
static _Atomic uintptr_t next_;
static _Atomic uint32_t *index_;       /* block of each granule, +1 */
static struct block *blocks_;
static uint32_t made_, unused_ = NOTHING;
static uint32_t free_by_class_[CLASSES];
static size_t block_bytes_;

/* Blocks over addresses that others own, in order. There are two copies: a reader of one is not disturbed by the
 * next change, and looks again after it. */
static uint32_t *adopted_[2];
static size_t adopted_bytes_[2];
static uint32_t adopted_count_[2];
static _Atomic uint32_t adopted_changes_;

static size_t index_bytes_, blocks_bytes_; /* writable bytes of the two tables: RLIMIT_DATA counts these */

void *arena_reserve(size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

int arena_mprotect(void *address, size_t bytes, int protection) { return (int)syscall(SYS_mprotect, address, bytes, protection); }

bool arena_grow(void *table, size_t *usable, size_t needed) {
    if (needed <= *usable)
        return true;
    size_t target = (needed + 4 * GRANULE - 1) & ~(4 * GRANULE - 1);
    if (arena_mprotect((char *)table + *usable, target - *usable, PROT_READ | PROT_WRITE))
        return false;
    *usable = target;
    return true;
}

static uintptr_t aligned(uintptr_t address, size_t bytes) { return (address + bytes - 1) & ~(bytes - 1); }

bool arena_begin(size_t block_bytes) {
    if (begin_)
        return true; /* blocks from an earlier beginning are still in use, so their size stays */
    guard_page = (size_t)sysconf(_SC_PAGESIZE);
    block_bytes_ = block_bytes;
    /* 39 bits of addresses on a Raspberry Pi, 47 on x86-64; fewer under RLIMIT_AS. */
    for (size_t bytes = (size_t)1 << 42; bytes >= (size_t)1 << 33; bytes >>= 1) {
        char *address = arena_reserve(bytes);
        if (!address)
            continue;
        begin_ = aligned((uintptr_t)address, block_bytes);
        end_ = ((uintptr_t)address + bytes) & ~(GRANULE - 1);
        next_ = begin_;
        index_ = arena_reserve((end_ - begin_) / GRANULE * sizeof *index_ + 4 * GRANULE);
        blocks_ = arena_reserve((size_t)MOST_BLOCKS * sizeof *blocks_ + 4 * GRANULE);
        for (int i = 0; i < 2; i++)
            adopted_[i] = arena_reserve(MOST_ADOPTED * sizeof **adopted_ + 4 * GRANULE);
        if (index_ && blocks_ && adopted_[0] && adopted_[1]) {
            for (int i = 0; i < CLASSES; i++)
                free_by_class_[i] = NOTHING;
            return true;
        }
        munmap(address, bytes);
    }
    errno = ENOMEM;
    return false;
}

bool arena_holds(const void *address) { return (uintptr_t)address >= begin_ && (uintptr_t)address < end_; }

struct block *arena_block(uint32_t index) { return &blocks_[index]; }

size_t arena_block_bytes(void) { return block_bytes_; }

uint32_t arena_records(void) { return made_; }

uint32_t arena_index_of(const struct block *block) { return (uint32_t)(block - blocks_); }

struct block *arena_first(const struct block *block) { return &blocks_[block->first]; }

struct block *arena_following(const struct block *block) {
    struct block *next = block->following == NOTHING ? NULL : &blocks_[block->following];
    return next && next->bytes ? next : NULL;
}

/* Return the position of the first of `count` blocks that ends beyond `address`. */
static uint32_t place_of(const uint32_t *adopted, uint32_t count, uintptr_t address) {
    uint32_t low = 0;
    while (low < count) {
        uint32_t middle = (low + count) / 2;
        const struct block *block = &blocks_[adopted[middle]];
        if (block->address + block->bytes <= address)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

struct block *arena_adopted_from(uintptr_t address) {
    for (;;) {
        uint32_t changes = atomic_load(&adopted_changes_), count = adopted_count_[changes & 1];
        const uint32_t *adopted = adopted_[changes & 1];
        uint32_t place = count ? place_of(adopted, count, address) : 0;
        struct block *found = place < count ? &blocks_[adopted[place]] : NULL;
        if (atomic_load(&adopted_changes_) == changes)
            return found;
    }
}

/* Add an allocation's blocks to those over addresses that others own, or remove them; the guard's lock is held. */
static bool change_adopted(struct block *first, bool in) {
    uint32_t changes = atomic_load(&adopted_changes_), now = changes & 1, next = 1 - now;
    uint32_t count = adopted_count_[now], place = place_of(adopted_[now], count, first->address);
    uint32_t own = (uint32_t)((first->all_bytes + block_bytes_ - 1) / block_bytes_);
    uint32_t changed = in ? count + own : count - own;
    for (int i = 0; i < 2; i++) /* now, because removing it later must not fail */
        if (in && (changed > MOST_ADOPTED || !arena_grow(adopted_[i], &adopted_bytes_[i], changed * sizeof **adopted_)))
            return false;
    uint32_t *to = adopted_[next];
    memcpy(to, adopted_[now], place * sizeof *to);
    if (in) {
        for (EACH_BLOCK(block, first))
            to[place++] = arena_index_of(block);
        memcpy(to + place, adopted_[now] + place - own, (count + own - place) * sizeof *to);
    } else {
        memcpy(to + place, adopted_[now] + place + own, (count - place - own) * sizeof *to);
    }
    adopted_count_[next] = changed;
    atomic_store(&adopted_changes_, changes + 1);
    return true;
}

struct block *arena_block_at(uintptr_t address) {
    if (address < begin_ || address >= atomic_load_explicit(&next_, memory_order_acquire)) {
        struct block *block = begin_ ? arena_adopted_from(address) : NULL;
        return block && address >= block->address ? block : NULL;
    }
    uint32_t found = atomic_load_explicit(&index_[(address - begin_) / GRANULE], memory_order_acquire);
    return found ? &blocks_[found - 1] : NULL;
}

static size_t class_of(size_t bytes, size_t *reserved) {
    size_t granules = (bytes + GRANULE - 1) / GRANULE;
    if (granules <= 4) {
        *reserved = granules * GRANULE;
        return granules;
    }
    size_t power = 63 - (size_t)__builtin_clzll(granules - 1); /* 2^power < granules <= 2^(power+1) */
    size_t quarter = (size_t)1 << (power - 2);
    size_t steps = (granules + quarter - 1) / quarter; /* 5 to 8 */
    *reserved = steps * quarter * GRANULE;
    return power * 4 + steps - 4;
}

static struct block *new_record(void) {
    if (unused_ != NOTHING) {
        struct block *block = &blocks_[unused_];
        unused_ = block->next;
        return block;
    }
    bool there = made_ < MOST_BLOCKS && arena_grow(blocks_, &blocks_bytes_, (made_ + 1) * sizeof *blocks_);
    return there ? &blocks_[made_++] : NULL;
}

static void give_record(struct block *block) {
    block->bytes = 0;
    block->next = unused_;
    unused_ = arena_index_of(block);
}

static void give_records(struct block *first) {
    for (uint32_t index = arena_index_of(first), following; index != NOTHING; index = following) {
        following = blocks_[index].following;
        give_record(&blocks_[index]);
    }
}

/* Create records for a range of addresses, one for each block that fits; NULL if there are too few. */
static struct block *new_run(uintptr_t address, size_t bytes, size_t reserved) {
    struct block *first = NULL, *last = NULL;
    for (size_t done = 0; done < bytes; done += block_bytes_) {
        struct block *block = new_record();
        if (!block) {
            if (first)
                give_records(first);
            return NULL;
        }
        first = first ? first : block;
        if (last)
            last->following = arena_index_of(block);
        last = block;
        block->address = address + done;
        block->reserved = reserved;
        block->first = arena_index_of(first);
        block->following = NOTHING;
        block->protection = PROT_NONE;
        atomic_store(&block->state, FREE_BLOCK);
    }
    return first;
}

/* Assign the blocks of a run to an allocation; blocks beyond it have no bytes. */
static void divide(struct block *first, size_t bytes) {
    first->all_bytes = bytes;
    for (uint32_t index = arena_index_of(first); index != NOTHING; index = blocks_[index].following) {
        struct block *block = &blocks_[index];
        block->base = 0;
        block->bytes = bytes < block_bytes_ ? bytes : block_bytes_;
        bytes -= block->bytes;
        block->span_count = 0;
        block->pins = 0;
        block->donor = 0;
        block->held = 0;
        block->of_file = 0;
        block->offset = -1;
        block->older = block->newer = block->next = NOTHING;
    }
}

struct block *arena_take(size_t bytes) {
    size_t reserved, class = class_of(bytes, &reserved);
    struct block *first;
    if (free_by_class_[class] != NOTHING) {
        first = &blocks_[free_by_class_[class]];
        free_by_class_[class] = first->next;
    } else {
        uintptr_t address = aligned(next_, reserved < block_bytes_ ? GRANULE : block_bytes_); /* a huge page is aligned */
        if (address > end_ || reserved > end_ - address ||
            !arena_grow(index_, &index_bytes_, (address + reserved - begin_) / GRANULE * sizeof *index_) ||
            !(first = new_run(address, reserved, reserved))) {
            errno = ENOMEM;
            return NULL;
        }
        const struct block *block = first;
        for (size_t done = 0; done < reserved; done += GRANULE) {
            if (done && done % block_bytes_ == 0)
                block = &blocks_[block->following];
            atomic_store_explicit(&index_[(address + done - begin_) / GRANULE], arena_index_of(block) + 1, memory_order_release);
        }
        atomic_store_explicit(&next_, address + reserved, memory_order_release);
    }
    divide(first, bytes);
    return first;
}

struct block *arena_adopt(uintptr_t address, size_t bytes) {
    const struct block *beyond = arena_adopted_from(address);
    struct block *first = beyond && beyond->address < address + bytes ? NULL : new_run(address, bytes, 0);
    if (!first)
        return NULL;
    divide(first, bytes);
    if (change_adopted(first, true))
        return first;
    give_records(first);
    return NULL;
}

bool arena_protect(struct block *block, int protection) {
    if (arena_mprotect((void *)block->address, block->bytes, protection))
        return false;
    block->protection = (uint8_t)protection;
    return true;
}

/* The next allocation at these addresses may have no pages yet, and then an access must fault. */
void arena_give(struct block *first) {
    for (EACH_BLOCK(block, first)) {
        if (block->reserved && block->protection != PROT_NONE && !arena_protect(block, PROT_NONE))
            guard_die("the protection of memory could not be changed: see vm.max_map_count", block);
        atomic_store(&block->state, FREE_BLOCK);
    }
    if (!first->reserved) {
        change_adopted(first, false);
        give_records(first);
        return;
    }
    size_t reserved;
    size_t class = class_of(first->reserved, &reserved);
    for (uint32_t index = arena_index_of(first); index != NOTHING; index = blocks_[index].following)
        blocks_[index].bytes = 0;
    first->next = free_by_class_[class];
    free_by_class_[class] = arena_index_of(first);
}

void list_append(struct block_list *list, struct block *block) {
    uint32_t own = arena_index_of(block);
    block->older = list->newest;
    block->newer = NOTHING;
    if (list->newest != NOTHING)
        blocks_[list->newest].newer = own;
    else
        list->oldest = own;
    list->newest = own;
}

void list_remove(struct block_list *list, struct block *block) {
    if (block->older != NOTHING)
        blocks_[block->older].newer = block->newer;
    else
        list->oldest = block->newer;
    if (block->newer != NOTHING)
        blocks_[block->newer].older = block->older;
    else
        list->newest = block->older;
    block->older = block->newer = NOTHING;
}
