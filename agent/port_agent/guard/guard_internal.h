/* Shared by the files of guarded memory; not for other code. */
#ifndef PORT_GUARD_INTERNAL_H
#define PORT_GUARD_INTERNAL_H

#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "guard.h"

#define GRANULE ((size_t)64 << 10)   /* unit of addresses: one entry of the index each */
#define CHUNK ((size_t)1 << 20)       /* unit of the page file with a checksum of its own */
#define MAX_SPANS 8                  /* a block with more kernel mappings takes fresh pages instead */
#define NOTHING UINT32_MAX

enum block_state {
    FREE_BLOCK,
    DIRTY,
    CLEAN,
    AWAY,
    FILLING,   /* a thread reads its bytes: others wait */
    WRITING,   /* a thread writes its bytes: readers continue, writers wait */
    MAPPED,    /* pages of a mapping that turned out to be written: resident and read-only until they are taken */
    DROPPED,   /* no copy exists: its contents are computed again by whoever dropped it */
    UNTOUCHED, /* not touched since its allocation: no pages, and nothing to keep */
};

/* Resident pages within one kernel mapping, the unit that one mremap call moves. */
struct span {
    uintptr_t address;
    size_t bytes;
};

/* An allocation is a run of blocks of `arena_begin`'s size, the last of which may be smaller; they are brought in and
 * evicted one by one. */
struct block {
    uintptr_t address;
    uintptr_t base;                /* of the allocation of torch's whose whole pages it has; 0: there is none */
    size_t bytes;                  /* multiple of the page size */
    size_t reserved;               /* addresses, multiple of GRANULE; 0: they belong to a mapping, not to the arena */
    size_t all_bytes;              /* of the allocation; in the first of its blocks */
    uint32_t first, following;     /* of the allocation's blocks */
    _Atomic uint32_t state;        /* waiting threads sleep on this */
    uint32_t pins;
    uint32_t writes;               /* how often it was opened for writing after having been closed */
    uint8_t protection;            /* of its addresses, PROT_* */
    uint8_t span_count;
    uint8_t donor;                 /* its pages may be taken: which list it is in, +1 */
    uint8_t file;                  /* which page file, in forked children */
    uint8_t held;                  /* resident, and closed until the end of a pause */
    uint8_t of_file;               /* its place is a mapped file: only clean or away, and its pages are not counted as resident */
    uint8_t unseen;                /* some of its pages may never have been touched */
    struct span spans[MAX_SPANS];
    off_t offset;                  /* in the page file; -1: none */
    uint64_t era;                  /* of forks, when the place was allocated */
    uint32_t older, newer;         /* resident: order of use; donors: order of offers */
    uint32_t next;                 /* free blocks of a size; unused records */
};

/* arena.c: addresses and records. */
extern size_t guard_page;
bool arena_begin(size_t block_bytes);         /* a power of two, at least GRANULE */
/* A table whose entries may be used up to where it was grown: RLIMIT_DATA counts writable memory. */
void *arena_reserve(size_t bytes);
bool arena_grow(void *table, size_t *usable, size_t needed);
bool arena_holds(const void *address);
struct block *arena_block_at(uintptr_t address);
struct block *arena_block(uint32_t index);
size_t arena_block_bytes(void);
uint32_t arena_index_of(const struct block *block);
/* The blocks of an allocation, in the order of their addresses; NULL after the last. */
struct block *arena_first(const struct block *block);
struct block *arena_following(const struct block *block);
#define EACH_BLOCK(name, any) struct block *name = arena_first(any); name; name = arena_following(name)
/* Allocate blocks without pages; returns the first. */
struct block *arena_take(size_t bytes);
/* Blocks over whole pages of addresses that others own; NULL if a block lies there, or no record is left. */
struct block *arena_adopt(uintptr_t address, size_t bytes);
/* Return the first block over such addresses that ends beyond `address`, or NULL. */
struct block *arena_adopted_from(uintptr_t address);
/* The number of records: `arena_block` returns those with lower indices, in use or not. */
uint32_t arena_records(void);
/* As mprotect, which for the program tells the guard. */
int arena_mprotect(void *address, size_t bytes, int protection);
/* Change what may be done at a block's addresses; false if the kernel refuses. */
bool arena_protect(struct block *block, int protection);
void arena_give(struct block *first);         /* frees an allocation without pages */

/* An ordered list of blocks; a block is in at most one list: it is resident, or its pages are offered. */
struct block_list {
    uint32_t oldest, newest;
};
#define EMPTY_LIST {NOTHING, NOTHING}
void list_append(struct block_list *list, struct block *block);
void list_remove(struct block_list *list, struct block *block);

/* frames.c: resident pages, and which blocks may have them. The caller holds the guard's lock. */
size_t frames_of(const struct block *block);
size_t frames_offered(void);
void frames_offer(struct block *block);
void frames_withdraw(struct block *block);
void frames_drop(struct block *block);
bool frames_take(struct block *block, size_t *moved, size_t *fresh);
size_t frames_trim(size_t bytes);
bool frames_move(struct block *from, struct block *to);

/* untouched.c. The caller holds the guard's lock. */
struct untouched {
    size_t tensor_bytes, other_bytes;
};
void untouched_note(struct block *block, size_t fresh); /* it has pages, `fresh` bytes of which are fresh */
void untouched_expect(uintptr_t address, size_t bytes); /* an allocation of the program, whole pages */
struct untouched untouched_now(void);

/* store.c: the page file. */
int store_begin(const char *directory);
void store_end(void);                         /* nothing has a place any more */
bool store_reserve(size_t bytes);             /* guarantees this much space from now on */
void store_forgo(size_t bytes);               /* releases that guarantee */
bool store_take(struct block *block);
void store_empty(struct block *block);        /* nothing is written in its place, and nothing may be read there */
void store_release(struct block *block);
/* Return whether a part may be written in its place: the place is empty, or no child may read it. */
bool store_may_write(const struct block *block, size_t start, size_t bytes);
/* Called without the lock: `bytes` from `start`, which is a multiple of CHUNK, as is their end unless it is the block's. */
void store_write(struct block *block, size_t start, uintptr_t source, size_t bytes);
void store_read(struct block *block, size_t start, uintptr_t target, size_t bytes);
void store_before_fork(void);
void store_after_fork(void);
void store_in_child(void);
uint64_t store_bytes(void);

/* Functions that stand in for the C library's or torch's: in a preloaded library by their names, in a process that
 * loaded it later because take_over.c makes other libraries call them. */
#define STANDS_IN __attribute__((visibility("default"), section("port_stand_ins")))

/* take_over.c */
void take_over_new_libraries(void);           /* those loaded since the last call; nothing without `guard_take_over` */
void take_over_before_fork(void);
void take_over_after_fork(void);              /* in both processes */

/* faults.c */
bool faults_begin(void);
/* Run the program's handlers for its user's signals (Ctrl-C) while a fault waits for long, without locks; return whether
 * any were due. */
bool faults_let_user_in(sigset_t *inside);
void faults_keep_user_out(const sigset_t *inside);

void guard_unlist_free(struct block *first);  /* a free allocation that is no longer complete */

uint64_t guard_now_ns(void);

/* Return the first block of a range: one over addresses that others own begins at a whole page, perhaps beyond `address`.
 * If `bytes` is SIZE_MAX, the range's end is not known, and a block must begin before the next page. */
struct block *guard_first_within(const void *address, size_t bytes);

/* The outcome of a fault at an address. */
enum fault_outcome { NOT_OURS, RESOLVED };
enum fault_outcome guard_resolve(uintptr_t address, bool write, bool write_is_known);

/* Print why the program cannot continue, and end the process. */
_Noreturn void guard_die(const char *what, const struct block *block);

#endif
