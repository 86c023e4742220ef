/* Guarded memory: blocks whose residency is said by the protection of their pages.
 *
 * An allocation is a block, or a run of blocks of 1 MiB (less under small limits) where it is larger: they come and leave one by one, so
 * what is larger than the limit passes through it. A new one that has no room takes its pages as it is touched. A block keeps its
 * address for life. Its pages are dirty (readable and writable: memory is the truth), clean (readable: memory
 * and page file hold the same bytes) or away (no access: the page file is the truth). Whoever touches what is not there faults;
 * the handler brings the bytes, or marks them written, and the access goes on. So nothing has to be known about who reads or
 * writes a block: generated kernels, C++ extensions and pointers kept for hours see the same bytes as without a limit.
 *
 * No function here calls malloc. All are safe to call from several threads; the state has one lock, which nobody holds while
 * a page is read or written. Blocks are found by address in constant time.
 */
#ifndef PORT_GUARD_H
#define PORT_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GUARD_INTERFACE_VERSION 4u

/* What happened since the start; `_bytes` are multiples of the page size. The order is part of the binary interface. */
struct guard_counters {
    uint64_t resident_bytes;       /* pages that blocks, and what they gave up, hold now */
    uint64_t peak_resident_bytes;
    uint64_t limit_bytes;
    uint64_t live_bytes;           /* of blocks that are in use, resident or not */
    uint64_t live_blocks;
    uint64_t read_faults;          /* accesses that brought a block */
    uint64_t write_faults;         /* first writes to a clean block */
    uint64_t fault_ns;             /* spent in both */
    uint64_t read_bytes;           /* from the page file */
    uint64_t written_bytes;        /* to it */
    uint64_t revived_bytes;        /* came back before their pages were given to another block */
    uint64_t moved_bytes;          /* pages that went from one block to another */
    uint64_t fresh_bytes;          /* pages taken from the kernel */
    uint64_t over_bytes;           /* the most by which what had to be resident passed the limit */
    uint64_t kernel_calls;         /* system calls whose buffers were brought and pinned */
    uint64_t file_bytes;           /* reserved in the page file */
    uint64_t peak_live_bytes;
    uint64_t rest_bytes;           /* of the process beside blocks: Python, libraries, what the program keeps */
    uint64_t peak_rest_bytes;
};

/* Begin: pages go to an unnamed file in `directory`. Returns 0, or what errno says. */
int guard_begin(const char *directory, size_t limit_bytes, size_t smallest_bytes);
bool guard_active(void);

/* Return an allocation of at least `bytes`, page-aligned; NULL with errno where there is no memory or no room on the medium. */
void *guard_allocate(size_t bytes);
/* Take back an allocation; false where none begins at `address`. */
bool guard_free(void *address);
/* Return the usable bytes of the allocation that begins at `address`, 0 where none does. */
size_t guard_usable(const void *address);

/* Bring what lies in a range and keep it resident until `guard_unpin`; `write`: it will be written. Returns whether a block lies there. */
bool guard_pin(const void *address, size_t bytes, bool write);
void guard_unpin(const void *address, size_t bytes);

/* Advice for an allocation, by any address in it; false where none is there. What does not fit below the limit is not brought. */
bool guard_bring(const void *address);
bool guard_write_back(const void *address);  /* dirty becomes clean */
bool guard_evict(const void *address);       /* not while it is pinned */

/* Whether blocks that this thread allocates have a place in the page file and no pages: what they hold is written by `guard_copy`. */
void guard_bear_away(bool away);
/* Copy between an allocation, from byte `start` on, and memory, bringing no block that is away: a part of its page is read, or written.
 * `start` is a multiple of 1 MiB, and so is the end, unless it ends there. False where no such part is. */
bool guard_copy(const void *address, size_t start, void *memory, size_t bytes, bool write);
/* Return what blocks hold now, without what they gave up and another may have. */
size_t guard_held_bytes(void);
/* Once what blocks hold comes near to the limit, have `call(what, NULL)` called, from any thread, until that returns 0. */
void guard_call_when_near(int (*call)(int (*)(void *), void *), int (*what)(void *));
/* Give back to the kernel what no block holds. */
void guard_trim(void);
/* Begin to measure anew how much is in use at most, and return how much is; `guard_peak_live_bytes` tells the most since then. */
size_t guard_measure_live_bytes(void);
size_t guard_peak_live_bytes(void);

/* Whole pages of a private mapping of a file: closed for writing from here on, and from the first write on a block like others. */
enum mapping_kind {
    NO_MAPPING, /* another block lies there, or no more can be watched */
    FILE_PAGES,
    OWN_MEMORY,
};
/* Watch such pages. Those that are watched already are told of. */
enum mapping_kind guard_watch(void *address, size_t bytes);
/* Have them be a block like others: they are about to be written, or were before they were watched. */
bool guard_take_from_file(const void *address);
bool guard_is_of_file(const void *address);
/* Give back what a file holds; false where it is not a file's, or not any more. */
bool guard_drop_pages(const void *address);
/* The addresses of a mapping are about to be another's. */
void guard_unmapped(const void *address, size_t bytes);

/* What is computed again instead of being written. Close a block for writing and tell how often it was opened until now; false
 * where that cannot be. As long as `guard_unwritten` with that count, nobody has written it. */
bool guard_seal(const void *address, uint32_t *writes);
bool guard_unwritten(const void *address, uint32_t writes);
/* Give up a sealed block without a page: who touches it before `guard_fill` ends the process. False where it was written since. */
bool guard_drop(const void *address, uint32_t writes);
/* Have a dropped block hold `bytes` from `from` again, sealed; where that is a block of the same size, it is empty afterwards. */
bool guard_fill(void *address, const void *from, size_t bytes);

void guard_set_limit(size_t bytes);
/* Keep the resident memory of the whole process below a number of bytes: the limit then follows what is not blocks. 0: do not. */
void guard_set_process_limit(size_t bytes);
/* Memory that is not a block is about to be taken: blocks leave for it at once, as far as the process limit wants. */
void guard_make_way(size_t bytes);
/* It was taken, and its pages come as they are touched: they are counted on until then. */
void guard_expect(void *address, size_t bytes);
/* Have a function give up memory that nobody uses, before tensors leave for it: it returns how many of `bytes` it gave. */
void guard_before_leaving(size_t (*give_up)(size_t bytes));
/* From now on whoever touches a block waits, until `guard_resume`. `guard_hold` stops all at once, `guard_release` has what is
 * resident leave then, which takes as long as writing it does, and returns whether all is gone but what a system call has; what
 * was on its way in when all were stopped goes the next time. `guard_pause` is both. */
void guard_hold(void);
bool guard_release(void);
void guard_pause(void);
void guard_resume(void);
void guard_read_counters(struct guard_counters *out);
/* What a thread does every few milliseconds: the limit follows the process while nothing faults and nothing is allocated. */
void guard_tick(void);
/* Measure which pages are shared with other processes inside the budget; takes milliseconds. */
void guard_measure_shared(void);

/* Around fork(). */
void guard_before_fork(void);
void guard_after_fork(void);
void guard_in_child(void);

#endif
