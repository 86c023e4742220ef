/* Guarded memory: blocks whose residency is expressed by the protection of their pages.
 *
 * An allocation is a block, or a run of blocks if it is larger: of 2 MiB where that is a huge page, otherwise of 1 MiB,
 * and less under small limits. Blocks are brought in and evicted one by one, so that allocations larger than the limit
 * pass through it. A new allocation that does not fit receives its pages as it is touched. A block keeps its address for
 * life. Its pages are dirty (readable and writable: only memory is current), clean (readable: memory and page file hold
 * the same bytes) or away (no access: only the page file is current). An access to a missing page faults; the handler
 * brings the bytes, or marks them written, and the access continues. So it does not matter who reads or writes a block:
 * generated kernels, C++ extensions and pointers kept for hours see the same bytes as without a limit.
 *
 * No function here calls malloc. All are safe to call from several threads. The state has one lock, which is not held
 * while a page is read or written. Blocks are found by address in constant time.
 */
#ifndef PORT_GUARD_H
#define PORT_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GUARD_INTERFACE_VERSION 7u

/* Counted since the start; `_bytes` are multiples of the page size. The order is part of the binary interface. */
struct guard_counters {
    uint64_t resident_bytes;       /* pages of blocks, and pages that blocks gave up */
    uint64_t peak_resident_bytes;
    uint64_t limit_bytes;
    uint64_t live_bytes;           /* of blocks that are in use, resident or not */
    uint64_t live_blocks;
    uint64_t read_faults;          /* accesses that brought a block in */
    uint64_t write_faults;         /* first writes to a clean block */
    uint64_t fault_ns;             /* spent in both */
    uint64_t read_bytes;           /* from the page file */
    uint64_t written_bytes;        /* to it */
    uint64_t revived_bytes;        /* brought back before their pages went to another block */
    uint64_t moved_bytes;          /* pages moved from one block to another */
    uint64_t fresh_bytes;          /* pages taken from the kernel */
    uint64_t over_bytes;           /* the most by which memory that had to be resident exceeded the limit */
    uint64_t kernel_calls;         /* system calls whose buffers were brought in and pinned */
    uint64_t file_bytes;           /* reserved in the page file */
    uint64_t peak_live_bytes;
    uint64_t rest_bytes;           /* of the process outside blocks: Python, libraries, the program's own objects */
    uint64_t peak_rest_bytes;
    uint64_t unguarded_bytes;      /* of tensors that stayed in ordinary memory, because the page file could not grow */
};

/* Begin, with an unnamed page file in `directory`. Returns 0, or an errno value. */
int guard_begin(const char *directory, size_t limit_bytes, size_t smallest_bytes);
bool guard_active(void);
/* End: everything is resident and ordinary memory from here on, and `guard_begin` may follow. */
void guard_end(void);
/* For a process that was not started with this library: make the loaded libraries, and those loaded later, call its
 * functions instead of the C library's and torch's. Returns 0, or an errno value. */
int guard_take_over(void);
bool guard_took_over(void);

/* Return an allocation of at least `bytes`, page-aligned; NULL with errno if there is no memory or no space on the medium. */
void *guard_allocate(size_t bytes);
/* Free an allocation; false if none begins at `address`. */
bool guard_free(void *address);
/* Return the usable bytes of the allocation that begins at `address`, or 0. */
size_t guard_usable(const void *address);

/* Bring the blocks of a range in and keep them resident until `guard_unpin`; `write`: they will be written. Returns
 * whether a block lies there. */
bool guard_pin(const void *address, size_t bytes, bool write);
void guard_unpin(const void *address, size_t bytes);

/* Advice for an allocation, by any address in it; false if none is there. Blocks that do not fit within the limit stay away. */
bool guard_bring(const void *address);
bool guard_write_back(const void *address);  /* dirty becomes clean */
bool guard_evict(const void *address);       /* not while it is pinned */

/* Set whether this thread's new blocks get a place in the page file but no pages; `guard_copy` then writes their
 * contents. */
void guard_bear_away(bool away);
/* Copy between an allocation, from byte `start`, and memory, without bringing in blocks that are away: a part of their
 * page is read or written. `start` is a multiple of 1 MiB, and so is the end unless it is the allocation's. False if
 * there is no such part. */
bool guard_copy(const void *address, size_t start, void *memory, size_t bytes, bool write);
/* Return the bytes that blocks hold now, without the pages that they gave up. */
size_t guard_held_bytes(void);
/* When blocks nearly fill the limit, make any thread call `call(what, NULL)`, again and again until it returns 0. */
void guard_call_when_near(int (*call)(int (*)(void *), void *), int (*what)(void *));
/* Return pages that no block holds to the kernel. */
void guard_trim(void);
/* Start a new measurement of the most bytes in use, and return the bytes in use now; `guard_peak_live_bytes` returns the
 * most since then. */
size_t guard_measure_live_bytes(void);
size_t guard_peak_live_bytes(void);

/* Whole pages of a private mapping of a file: blocks whose place is the file, and blocks like others from their first write on. */
enum mapping_kind {
    NO_MAPPING, /* another block lies there, or no more can be watched */
    FILE_PAGES,
    OWN_MEMORY,
};
/* Watch such pages; pages already watched are reported. OWN_MEMORY: some were written, before or since. */
enum mapping_kind guard_watch(void *address, size_t bytes);
/* Turn them into blocks like others: they are about to be written, or were before they were watched. */
bool guard_take_from_file(const void *address);
/* Return whether all of them still equal the file. */
bool guard_is_of_file(const void *address);
/* Guard the whole pages of memory that torch allocated by other means and will free by `base`; false if that is impossible. */
bool guard_adopt(void *base, size_t bytes);
/* Torch is about to free memory: if it was adopted, its pages become ordinary ones, with undefined contents. */
void guard_disown(const void *base);
/* Another mapping is about to take these addresses. */
void guard_unmapped(const void *address, size_t bytes);
/* The program is about to decide itself what may be done at these addresses: a mapping there becomes ordinary memory. */
void guard_reprotected(const void *address, size_t bytes);

/* For tensors that are recomputed instead of written. Make a block read-only and report how often it was opened for
 * writing so far; false if that is impossible. While `guard_unwritten` is true for that count, nothing has written it. */
bool guard_seal(const void *address, uint32_t *writes);
bool guard_unwritten(const void *address, uint32_t writes);
/* Drop a sealed block without a page; an access before `guard_fill` ends the process. False if it was written since. */
bool guard_drop(const void *address, uint32_t writes);
/* Fill a dropped block with `bytes` from `from` and seal it again; if `from` is a block of the same size, it is empty
 * afterwards. */
bool guard_fill(void *address, const void *from, size_t bytes);

void guard_set_limit(size_t bytes);
/* Keep the resident memory of the whole process below a number of bytes: the limit then follows memory outside blocks.
 * 0: off. */
void guard_set_process_limit(size_t bytes);
/* Memory outside blocks is about to be allocated: blocks are evicted at once, as far as the process limit requires. */
void guard_make_way(size_t bytes);
/* It was allocated, and its pages come as they are touched; until then they are counted as coming. */
void guard_expect(void *address, size_t bytes);
/* Have a function free unused memory before tensors are evicted; it returns how many of `bytes` it freed. */
void guard_before_leaving(size_t (*give_up)(size_t bytes));
/* From now on, threads that touch a block wait until `guard_resume`. `guard_hold` stops them all at once.
 * `guard_release` then evicts what is resident, which takes as long as writing it, and returns whether everything except
 * buffers of system calls is gone; blocks that were on their way in are evicted by the next call. `guard_pause` does
 * both. */
void guard_hold(void);
bool guard_release(void);
void guard_pause(void);
void guard_resume(void);
void guard_read_counters(struct guard_counters *out);
/* To be called every few milliseconds: adapts the limit to the process while nothing faults and nothing is
 * allocated. */
void guard_tick(void);
/* Measure which pages are shared with other processes inside the budget; takes milliseconds. */
void guard_measure_shared(void);

/* To be called before and after fork(). */
void guard_before_fork(void);
void guard_after_fork(void);
void guard_in_child(void);

#endif
