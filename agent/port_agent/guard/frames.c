/* Resident pages: they move, without being zeroed, from blocks that gave them up to blocks that need some.
 *
 * A donor is a free block, or an evicted one, whose pages have not been taken yet. mremap moves the pages and leaves
 * the donor's addresses reserved and empty (MREMAP_DONTUNMAP, Linux 5.7). Without it, pages are returned to the kernel
 * and taken fresh.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <sys/mman.h>

#include "../malloc/huge_pages.h"
#include "guard_internal.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

enum donors { PARTS, WHOLE }; /* WHOLE: all pages of a block of full size, in one piece, which may be a huge page */

static struct block_list donors_[] = {[PARTS] = EMPTY_LIST, [WHOLE] = EMPTY_LIST};
static size_t offered_;
static bool cannot_move_;

size_t frames_of(const struct block *block) {
    size_t bytes = 0;
    for (int i = 0; i < block->span_count; i++)
        bytes += block->spans[i].bytes;
    return bytes;
}

static bool is_whole(size_t bytes) { return bytes == HUGE_PAGE_BYTES && bytes == arena_block_bytes(); }

size_t frames_offered(void) { return offered_; }

void frames_offer(struct block *block) {
    if (block->donor || !block->span_count)
        return;
    enum donors kind = block->span_count == 1 && is_whole(block->spans[0].bytes) ? WHOLE : PARTS;
    block->donor = (uint8_t)(1 + kind);
    list_append(&donors_[kind], block);
    offered_ += frames_of(block);
}

void frames_withdraw(struct block *block) {
    if (!block->donor)
        return;
    list_remove(&donors_[block->donor - 1], block);
    block->donor = 0;
    offered_ -= frames_of(block);
}

/* Return the end of a block's last span, of at most `bytes`. */
static struct span last_part(const struct block *block, size_t bytes) {
    const struct span *last = &block->spans[block->span_count - 1];
    size_t part = last->bytes < bytes ? last->bytes : bytes;
    return (struct span){last->address + last->bytes - part, part};
}

/* Remove the last pages of a block. Their addresses are closed: an access would find zeros there instead of a fault, and RLIMIT_DATA
 * counts what can be written. */
static void shorten(struct block *block, struct span part) {
    struct span *last = &block->spans[block->span_count - 1];
    last->bytes -= part.bytes;
    if (!last->bytes)
        block->span_count--;
    if (block->protection != PROT_NONE && arena_mprotect((void *)part.address, part.bytes, PROT_NONE))
        guard_die("the protection of memory could not be changed: see vm.max_map_count", block);
    if (!block->span_count)
        block->protection = PROT_NONE;
}

/* Give the last `bytes` of a block's pages back to the kernel. */
static void give_back(struct block *block, size_t bytes) {
    while (bytes) {
        struct span part = last_part(block, bytes);
        if (madvise((void *)part.address, part.bytes, MADV_DONTNEED))
            guard_die("memory could not be given back", block);
        shorten(block, part);
        bytes -= part.bytes;
    }
}

void frames_drop(struct block *block) {
    frames_withdraw(block);
    give_back(block, frames_of(block));
}

static bool has_pages(const struct block *any) {
    for (EACH_BLOCK(block, any))
        if (block->span_count)
            return true;
    return false;
}

/* A free allocation without pages owns nothing: its addresses may serve another. */
static void forget_if_empty(struct block *block) {
    bool is_free = atomic_load(&block->state) == FREE_BLOCK;
    if (is_free)
        guard_unlist_free(arena_first(block));
    if (block->span_count)
        frames_offer(block);
    else if (is_free && !has_pages(block))
        arena_give(arena_first(block));
}

size_t frames_trim(size_t bytes) {
    size_t given = 0;
    for (uint32_t oldest; given < bytes && (oldest = donors_[donors_[PARTS].oldest == NOTHING].oldest) != NOTHING;) {
        struct block *block = arena_block(oldest);
        size_t has = frames_of(block), wanted = bytes - given;
        size_t part = has <= wanted ? has : (wanted + guard_page - 1) & ~(guard_page - 1);
        frames_withdraw(block);
        give_back(block, part);
        given += part;
        forget_if_empty(block);
    }
    return given;
}

static bool move_span(struct span from, size_t bytes, uintptr_t target) {
    if (cannot_move_)
        return false;
    void *moved = mremap((void *)from.address, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, (void *)target);
    if (moved == MAP_FAILED) {
        if (errno == EINVAL)
            cannot_move_ = true;
        return false;
    }
    return true;
}

/* Return the donor for more of a block's pages, or NOTHING. Huge pages are kept whole while others are offered, and
 * a block that may have a huge page is not assembled from smaller pieces. */
static uint32_t donor_for(size_t bytes) {
    return donors_[is_whole(bytes) || donors_[PARTS].newest == NOTHING ? WHOLE : PARTS].newest;
}

/* Fill a block's addresses with readable and writable pages, from donors first. Their content is undefined. */
bool frames_take(struct block *block, size_t *moved, size_t *fresh) {
    size_t have = 0;
    *moved = *fresh = 0;
    for (uint32_t newest; have < block->bytes && block->span_count < MAX_SPANS - 1 && (newest = donor_for(block->bytes)) != NOTHING;) {
        struct block *donor = arena_block(newest);
        frames_withdraw(donor);
        struct span from = last_part(donor, block->bytes - have);
        bool done = move_span(from, from.bytes, block->address + have);
        if (done) {
            shorten(donor, from);
            block->spans[block->span_count++] = (struct span){block->address + have, from.bytes};
            have += from.bytes;
            *moved += from.bytes;
        }
        forget_if_empty(donor);
        if (!done)
            break;
    }
    if (have < block->bytes) {
        size_t rest = block->bytes - have;
        void *target = (void *)(block->address + have);
        if (mmap(target, rest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
            frames_offer(block);
            return false;
        }
        if (rest == HUGE_PAGE_BYTES)
            huge_pages_wish(target, rest);
        block->spans[block->span_count++] = (struct span){block->address + have, rest};
        *fresh = rest;
    }
    untouched_note(block, *fresh); /* a donor's pages may be untouched, too */
    block->protection = PROT_READ | PROT_WRITE;
    if (*moved && !arena_protect(block, PROT_READ | PROT_WRITE)) {
        frames_offer(block);
        return false;
    }
    return true;
}

/* Move one block's pages, with their protection, to the addresses of another of the same size. */
bool frames_move(struct block *from, struct block *to) {
    for (int i = 0; i < from->span_count; i++) {
        struct span span = from->spans[i];
        uintptr_t target = to->address + (span.address - from->address);
        if (!cannot_move_ && move_span(span, span.bytes, target)) {
            /* stays reserved */
        } else {
            if (mremap((void *)span.address, span.bytes, span.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)target) == MAP_FAILED)
                return false;
            if (mmap((void *)span.address, span.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
                MAP_FAILED)
                return false;
        }
        to->spans[i] = (struct span){target, span.bytes};
    }
    if (from->unseen)
        untouched_note(to, 0);
    to->span_count = from->span_count;
    to->protection = from->protection;
    from->span_count = 0;
    return true;
}
