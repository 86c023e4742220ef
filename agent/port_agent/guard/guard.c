/* Guarded memory: what is resident, what is evicted, and how an access that faults is resolved. See guard.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../malloc/huge_pages.h"
#include "guard_internal.h"
#include "processes.h"

#ifndef MADV_POPULATE_READ /* <sys/mman.h> before glibc 2.35 */
#define MADV_POPULATE_READ 22
#endif

#define BLOCKS_IN_LIMIT 16             /* fewer, if it is too small for the smallest blocks */
#define HUGE_PAGES_IN_LIMIT 64
#define AT_HAND 6                      /* latest blocks of a thread, which stay: a loop needs its operands at once */
#define FAULTS 64                      /* faults that are remembered */
#define BINS 4096
#define NEAR_SHARE 2                   /* "near": this part of the limit is left, which an operator may need at once */
#define MEASURE_BYTES ((size_t)4 << 20)
#define MEASURE_NS 5000000u
#define PAGES_AT_ONCE 512 /* of which the kernel is asked */
#define PAGE_PRESENT ((uint64_t)1 << 63)
#define PAGE_SWAPPED ((uint64_t)1 << 62)
#define PAGE_OF_FILE ((uint64_t)1 << 61)
#define EXPECTED_BYTES ((size_t)1 << 20)
#define OTHERS_PATIENCE_MS 50
#define OTHERS_RETRY_NS 1000000000u
#define AFTER_SIGNAL_NS 2000000000u /* a thread runs this long through pauses after a signal ended one */
#define PROCESS_MARGIN ((size_t)12 << 20) /* for small allocations and code between two measurements */

static bool active_;
static size_t smallest_;
static struct guard_counters counters_;
static int (*call_when_near_)(int (*)(void *), void *);
static int (*what_when_near_)(void *);
static uint64_t peak_live_bytes_; /* since `guard_measure_live_bytes` */
static _Atomic uint32_t lock_;
static struct block_list resident_ = EMPTY_LIST; /* by last known use */
static uint32_t free_bins_[BINS];
static struct {
    uint32_t block;
    const void *thread;
} faults_[FAULTS];
static unsigned fault_count_, at_hand_;
static size_t untouched_bytes_; /* of blocks that have no pages yet */
static uint32_t busy_;
static _Atomic uint32_t paused_;
static size_t asked_limit_, process_limit_, measured_at_bytes_, rest_bytes_;
static size_t shared_tensor_bytes_; /* of resident tensors, counted in another process */
static _Thread_local bool bears_away_;
static _Thread_local uint64_t runs_until_ns_;
static uint64_t measured_at_ns_;
static struct process_use use_;
static _Atomic size_t shared_bytes_; /* resident bytes counted in another process */
static bool forked_;
static size_t inherited_live_, inherited_read_; /* in a forked child: at the fork */
static uint64_t others_failed_ns_;
static size_t coming_bytes_; /* of files' blocks brought in since the last measurement: their pages come as they are touched */
static size_t (*give_up_)(size_t bytes);

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

static int sleep_on(_Atomic uint32_t *word, uint32_t value) {
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0) ? errno : 0;
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

/* 0: free, 1: held, 2: held and waited for. A pthread mutex may not be taken in a signal handler. */
static void lock(void) {
    uint32_t expected = 0;
    if (atomic_compare_exchange_strong(&lock_, &expected, 1))
        return;
    while (atomic_exchange(&lock_, 2) != 0)
        sleep_on(&lock_, 2);
}

static void unlock(void) {
    if (atomic_exchange(&lock_, 0) == 2)
        syscall(SYS_futex, &lock_, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

uint64_t guard_now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

_Noreturn void guard_die(const char *what, const struct block *block) {
    char text[512];
    int error = errno;
    const char *reason = strerrorname_np(error);
    int length = snprintf(text, sizeof text, "port-agent: %s (%s)", what, reason ? reason : "unknown error");
    if (block)
        length += snprintf(text + length, sizeof text - (size_t)length, ": tensor memory of %zu bytes at %p", arena_first(block)->all_bytes,
                           (void *)arena_first(block)->address);
    length += snprintf(text + length, sizeof text - (size_t)length, "; the program ends here, its numbers until now are right\n");
    if (syscall(SYS_write, 2, text, (size_t)length) < 0) { /* there is nothing else to write it to */
    }
    _exit(70);
}

/* ---- lists -------------------------------------------------------------------------------------------------------- */

static void used_again(struct block *block) {
    if (atomic_load(&block->state) != MAPPED && resident_.newest != arena_index_of(block)) {
        list_remove(&resident_, block);
        list_append(&resident_, block);
    }
}

static uint32_t *bin_of(size_t bytes) { return &free_bins_[bytes / guard_page * 0x9E3779B1u >> 20 & (BINS - 1)]; }

static void list_free(struct block *first) {
    uint32_t *bin = bin_of(first->all_bytes);
    first->next = *bin;
    *bin = arena_index_of(first);
}

void guard_unlist_free(struct block *first) {
    for (uint32_t *link = bin_of(first->all_bytes); *link != NOTHING; link = &arena_block(*link)->next)
        if (*link == arena_index_of(first)) {
            *link = first->next;
            return;
        }
}

/* A thread is identified by the address of its thread-local data. */
static void note_fault(struct block *block) {
    faults_[fault_count_ % FAULTS].block = arena_index_of(block);
    faults_[fault_count_++ % FAULTS].thread = &bears_away_;
    at_hand_ = 0;
    for (unsigned i = 0; i < FAULTS && i < fault_count_ && at_hand_ < FAULTS; i++) {
        unsigned earlier = 0;
        while (faults_[earlier].thread != faults_[i].thread)
            earlier++;
        at_hand_ += earlier == i ? AT_HAND : 0;
    }
}

static bool is_at_hand(const struct block *block) {
    for (unsigned i = 1; i <= at_hand_ && i <= fault_count_ && i <= FAULTS; i++)
        if (faults_[(fault_count_ - i) % FAULTS].block == arena_index_of(block))
            return true;
    return false;
}

/* ---- how much may be resident ------------------------------------------------------------------------------------- */

static size_t at_most(size_t value, size_t bound) { return value < bound ? value : bound; }

static size_t beyond(size_t value, size_t taken) { return value > taken ? value - taken : 0; }

/* The limit is the requested one, or what the rest of the process and the budget's other processes leave, whichever is less. */
static void set_limit(void) {
    size_t left = process_limit_ ? beyond(process_limit_, rest_bytes_ + coming_bytes_ + PROCESS_MARGIN) : SIZE_MAX;
    /* A forked child needs memory for what it created and what it brought in; inherited pages cost nothing until they
     * are written. */
    size_t own = beyond(counters_.live_bytes, inherited_live_) + at_most(counters_.read_bytes - inherited_read_, inherited_live_);
    use_.rest_bytes = rest_bytes_;
    use_.wanted_bytes = own > use_.tensor_bytes ? own : use_.tensor_bytes;
    use_.wanted_bytes += measured_at_bytes_;
    use_.read_faults = counters_.read_faults;
    use_.write_faults = counters_.write_faults;
    use_.read_bytes = counters_.read_bytes;
    use_.written_bytes = counters_.written_bytes;
    counters_.limit_bytes = processes_share(&use_, at_most(asked_limit_, left));
    if (counters_.limit_bytes != SIZE_MAX)
        counters_.limit_bytes += shared_tensor_bytes_;
}

/* Adapt the limit to the process's memory outside blocks, after a few MiB of growth or a few milliseconds. */
static void follow_process(size_t coming) {
    if (!process_limit_ && !processes_all())
        return;
    measured_at_bytes_ += coming;
    uint64_t now = guard_now_ns();
    if (measured_at_bytes_ < MEASURE_BYTES && now - measured_at_ns_ < MEASURE_NS)
        return;
    measured_at_ns_ = now;
    coming_bytes_ = 0;
    struct untouched untouched = untouched_now(); /* first, so that pages touched meanwhile count twice, not never */
    size_t all = processes_resident((uint32_t)getpid());
    use_.now_bytes = beyond(all, atomic_load(&shared_bytes_));
    size_t tensors = beyond(counters_.resident_bytes, untouched.tensor_bytes);
    use_.tensor_bytes = tensors;
    if (forked_ && all) /* shared pages are among tensors and others alike */
        use_.tensor_bytes = (size_t)((double)at_most(tensors, all) / (double)all * (double)use_.now_bytes);
    shared_tensor_bytes_ = beyond(tensors, use_.tensor_bytes);
    size_t rest = beyond(use_.now_bytes, use_.tensor_bytes);
    counters_.rest_bytes = rest;
    if (rest > counters_.peak_rest_bytes)
        counters_.peak_rest_bytes = rest;
    rest += untouched.other_bytes;
    rest_bytes_ = rest > rest_bytes_ ? rest : rest_bytes_ - (rest_bytes_ - rest) / 8; /* small allocations are not touched at once */
    set_limit();
    measured_at_bytes_ = 0;
}

/* Other processes may still hold what they are about to release: wait for a moment. The lock is released meanwhile. */
static void wait_for_others(size_t bytes) {
    if (!processes_has_company() || guard_now_ns() - others_failed_ns_ < OTHERS_RETRY_NS)
        return;
    for (int i = 0; i < OTHERS_PATIENCE_MS; i++) {
        if (!processes_pass_limit(bytes))
            return;
        unlock();
        struct timespec moment = {0, 1000000};
        nanosleep(&moment, NULL);
        lock();
    }
    others_failed_ns_ = guard_now_ns();
}

static void resident_changed(size_t more, size_t less) {
    counters_.resident_bytes += more;
    counters_.resident_bytes -= less;
    if (counters_.resident_bytes > counters_.peak_resident_bytes)
        counters_.peak_resident_bytes = counters_.resident_bytes;
    if (counters_.resident_bytes > counters_.limit_bytes) {
        uint64_t over = counters_.resident_bytes - counters_.limit_bytes;
        if (over > counters_.over_bytes)
            counters_.over_bytes = over;
    }
}

/* ---- leaving ------------------------------------------------------------------------------------------------------ */

static void become(struct block *block, enum block_state state) {
    atomic_store(&block->state, state);
    wake_all(&block->state);
}

static void protect(struct block *block, int protection) {
    if (!arena_protect(block, protection))
        guard_die("the protection of memory could not be changed: see vm.max_map_count and RLIMIT_DATA", block);
}

static bool is_writable(const struct block *block) { return block->protection & PROT_WRITE; }

/* Write a dirty block; the lock is released meanwhile. Readers continue, a writer faults and waits. */
static void write_back(struct block *block) {
    if (!store_take(block))
        guard_die("the medium of the page file is full", block);
    become(block, WRITING);
    busy_++;
    protect(block, PROT_READ);
    unlock();
    store_write(block, 0, block->address, block->bytes);
    lock();
    busy_--;
    counters_.written_bytes += block->bytes;
    become(block, CLEAN);
}

/* The kernel's memory of the process is now less by `given` bytes, which were not tensors. */
static void rest_shrank(size_t given) {
    rest_bytes_ -= at_most(given, rest_bytes_);
    use_.now_bytes -= at_most(given, use_.now_bytes);
    set_limit();
}

/* Return whether the kernel says that no page of a mapping was written, by whatever means; false if it does not say. The
 * block is not writable. See Documentation/admin-guide/mm/pagemap.rst. */
static bool equals_file(const struct block *block) {
    static uint64_t entries[PAGES_AT_ONCE];
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    bool equal = file >= 0;
    for (size_t page = 0, pages = block->bytes / guard_page; equal && page < pages; page += PAGES_AT_ONCE) {
        size_t count = at_most(pages - page, PAGES_AT_ONCE);
        off_t place = (off_t)((block->address / guard_page + page) * sizeof *entries);
        equal = syscall(SYS_pread64, file, entries, count * sizeof *entries, place) == (long)(count * sizeof *entries);
        for (size_t i = 0; equal && i < count; i++)
            equal = !(entries[i] & (PAGE_PRESENT | PAGE_SWAPPED)) || entries[i] & PAGE_OF_FILE;
    }
    if (file >= 0)
        syscall(SYS_close, file);
    return equal;
}

/* Pages of a file are part of the process's other memory, as many as the kernel brought. */
static void leave_to_file(struct block *block) {
    protect(block, PROT_NONE);
    list_remove(&resident_, block);
    block->held = 0;
    if (!equals_file(block)) { /* written past its protection: /proc/self/mem, mprotect */
        protect(block, PROT_READ);
        block->of_file = 0;
        become(block, MAPPED);
        return;
    }
    uint32_t own = (uint32_t)getpid();
    size_t before = process_limit_ ? processes_resident(own) : 0;
    madvise((void *)block->address, block->bytes, MADV_DONTNEED);
    become(block, AWAY);
    if (process_limit_)
        rest_shrank(beyond(before, processes_resident(own)));
}

static void leave(struct block *block) {
    if (atomic_load(&block->state) == DIRTY)
        write_back(block);
    if (atomic_load(&block->state) != CLEAN || block->pins)
        return; /* its state changed while it was written */
    if (block->of_file) {
        leave_to_file(block);
        return;
    }
    protect(block, PROT_NONE);
    become(block, AWAY);
    list_remove(&resident_, block);
    block->held = 0;
    frames_offer(block);
}

/* Return the least recently used block that may be evicted, but none of the latest AT_HAND: two would evict each
 * other in turn. */
static struct block *choose(const struct block *except) {
    for (uint32_t index = resident_.oldest; index != NOTHING; index = arena_block(index)->newer) {
        struct block *block = arena_block(index);
        uint32_t state = atomic_load(&block->state);
        bool helps = !block->of_file || process_limit_; /* a limit of tensors alone does not count files */
        if (block != except && helps && !block->pins && (state == DIRTY || state == CLEAN) && !is_at_hand(block))
            return block;
    }
    return NULL;
}

/* Unused memory is freed first: evicted blocks have to be written. */
static bool give_up_unused(size_t bytes) {
    size_t given = process_limit_ && give_up_ ? give_up_(bytes) : 0;
    if (!given)
        return false;
    rest_shrank(given);
    return true;
}

void guard_before_leaving(size_t (*give_up)(size_t bytes)) { give_up_ = give_up; }

/* Ensure that pages for `bytes` are offered, or may be taken fresh within the limit. The lock may be released in between. */
static void find_room(size_t bytes, const struct block *except) {
    follow_process(bytes);
    for (;;) {
        size_t offered = frames_offered();
        size_t fresh = bytes > offered ? bytes - offered : 0;
        if (counters_.resident_bytes + fresh <= counters_.limit_bytes)
            return;
        if (!fresh) { /* the limit fell: offered pages beyond the need go back to the kernel */
            size_t over = counters_.resident_bytes - counters_.limit_bytes, spare = offered - bytes;
            size_t given = frames_trim(over < spare ? over : spare);
            resident_changed(0, given);
            if (counters_.resident_bytes <= counters_.limit_bytes)
                return;
        }
        if (give_up_unused(counters_.resident_bytes + fresh - counters_.limit_bytes))
            continue;
        struct block *victim = choose(except);
        if (!victim)
            return;
        leave(victim);
    }
}

/* Give a block pages. Fresh ones are allocated by the kernel when they are touched. Offered pages that fit nowhere
 * have been returned by then: those beyond the limit, and beyond the most that was ever in use at once. So a program
 * that needs little does not grow to its limit in small steps. */
static bool give_pages(struct block *block) {
    size_t moved, fresh;
    bool done = frames_take(block, &moved, &fresh);
    counters_.moved_bytes += moved;
    counters_.fresh_bytes += fresh;
    size_t over = beyond(counters_.resident_bytes + fresh, counters_.limit_bytes);
    size_t unused = fresh ? beyond(frames_offered(), counters_.peak_live_bytes) : 0;
    resident_changed(fresh, frames_trim(over > unused ? over : unused));
    return done;
}

/* ---- bringing in ------------------------------------------------------------------------------------------------- */

static void wait_for(struct block *block, uint32_t state) {
    unlock();
    sleep_on(&block->state, state);
    lock();
}

/* Give a block its first pages. */
static void begin_block(struct block *block) {
    become(block, FILLING);
    busy_++;
    untouched_bytes_ -= block->bytes;
    find_room(block->bytes, block);
    if (!give_pages(block))
        guard_die("the kernel gave no memory", block);
    busy_--;
    block->writes++;
    list_append(&resident_, block);
    become(block, DIRTY);
}

/* Return the next block after `index` that an allocation uses, or NULL. */
static struct block *next_used(uint32_t *index) {
    while (*index < arena_records()) {
        struct block *block = arena_block((*index)++);
        if (block->bytes && atomic_load(&block->state) != FREE_BLOCK)
            return block;
    }
    return NULL;
}

static void bring(struct block *block, bool write) {
    become(block, FILLING);
    busy_++;
    frames_withdraw(block);
    if (frames_of(block) == block->bytes) { /* nobody took its pages */
        counters_.revived_bytes += block->bytes;
        protect(block, write ? PROT_READ | PROT_WRITE : PROT_READ);
    } else {
        size_t had = frames_of(block);
        frames_drop(block);
        resident_changed(0, had);
        struct block *staging = arena_take(block->bytes);
        if (!staging)
            guard_die("no addresses are left", block);
        atomic_store(&staging->state, FILLING);
        find_room(block->bytes, block);
        if (!give_pages(staging))
            guard_die("the kernel gave no memory", block);
        unlock();
        store_read(block, 0, staging->address, block->bytes);
        lock();
        counters_.read_bytes += block->bytes;
        if (!write)
            protect(staging, PROT_READ);
        if (!frames_move(staging, block))
            guard_die("pages could not be moved", block);
        arena_give(staging);
    }
    block->writes += write;
    busy_--;
    list_append(&resident_, block);
    become(block, write ? DIRTY : CLEAN);
}

/* Move the pages of a block that is no longer needed to the addresses of one that has none. */
static bool hand_over(struct block *from, struct block *to) {
    if (!from || from == to || from->bytes != to->bytes || from->pins || from->held || atomic_load(&from->state) != DIRTY)
        return false;
    if (!frames_move(from, to))
        guard_die("pages could not be moved", to);
    list_remove(&resident_, from);
    protect(from, PROT_NONE);
    become(from, DROPPED);
    return true;
}

/* Fill a dropped block with what lies at `from`, read-only. The lock may be released in between. */
static void refill(struct block *block, const void *from, size_t bytes) {
    become(block, FILLING);
    busy_++;
    frames_withdraw(block);
    if (frames_of(block) == block->bytes) { /* its pages were not taken and hold the same bytes */
        counters_.revived_bytes += block->bytes;
    } else {
        size_t had = frames_of(block);
        frames_drop(block);
        resident_changed(0, had);
        struct block *source = arena_block_at((uintptr_t)from);
        if (!source || source->address != (uintptr_t)from || !hand_over(source, block)) {
            find_room(block->bytes, block);
            if (!give_pages(block))
                guard_die("the kernel gave no memory", block);
            unlock();
            memcpy((void *)block->address, from, bytes);
            lock();
        }
    }
    protect(block, PROT_READ);
    busy_--;
}

static void open_for_writing(struct block *block) {
    protect(block, PROT_READ | PROT_WRITE);
    block->writes++;
    become(block, DIRTY);
}

static void count_in(struct block *block) {
    counters_.live_bytes += block->bytes;
    counters_.live_blocks++;
    if (counters_.live_bytes > counters_.peak_live_bytes)
        counters_.peak_live_bytes = counters_.live_bytes;
    if (counters_.live_bytes > peak_live_bytes_)
        peak_live_bytes_ = counters_.live_bytes;
}

static void count_out(const struct block *block) {
    counters_.live_bytes -= block->bytes;
    counters_.live_blocks--;
}

/* Give pages of a file that are about to be written, or already were, memory of their own at their addresses. */
static void take_from_file(struct block *block) {
    if (block->of_file)
        list_remove(&resident_, block);
    become(block, FILLING);
    busy_++;
    struct block *staging = store_reserve(block->bytes) ? arena_take(block->bytes) : NULL;
    if (!staging)
        guard_die("a file's pages are written, and the medium of the page file has no space left for them", block);
    atomic_store(&staging->state, FILLING);
    find_room(block->bytes, block);
    if (!give_pages(staging))
        guard_die("the kernel gave no memory", block);
    unlock();
    memcpy((void *)staging->address, (const void *)block->address, block->bytes);
    lock();
    if (!frames_move(staging, block))
        guard_die("pages could not be moved", block);
    arena_give(staging);
    count_in(block);
    block->of_file = 0;
    busy_--;
    list_append(&resident_, block);
    open_for_writing(block);
}

/* Open a block of a file for reading; the kernel brings its pages as they are touched. */
static void bring_from_file(struct block *block) {
    become(block, FILLING);
    busy_++;
    follow_process(block->bytes);
    coming_bytes_ += block->bytes;
    set_limit();
    find_room(0, block);
    protect(block, PROT_READ);
    busy_--;
    list_append(&resident_, block);
    become(block, CLEAN);
}

/* A mapping that was written past its protection is the program's own memory, as after any other write. */
static void take_if_written(struct block *block) {
    if (atomic_load(&block->state) == MAPPED && !block->pins)
        take_from_file(block);
}

static bool must_wait(void) { return atomic_load(&paused_) && guard_now_ns() >= runs_until_ns_; }

static void wait_for_resume(void) {
    unlock();
    sigset_t inside;
    if (faults_let_user_in(&inside) || sleep_on(&paused_, 1) == EINTR)
        runs_until_ns_ = guard_now_ns() + AFTER_SIGNAL_NS;
    faults_keep_user_out(&inside);
    lock();
}

/* Make a block resident, and dirty if it will be written. False if it is free. The lock is held. */
static bool ensure(struct block *block, bool write, bool *brought) {
    *brought = false;
    for (;;) {
        uint32_t state = atomic_load(&block->state);
        if (block->held && (state == DIRTY || state == CLEAN)) {
            if (must_wait()) {
                wait_for_resume();
                continue;
            }
            block->held = 0;
            if (state == DIRTY)
                open_for_writing(block);
            else
                protect(block, PROT_READ);
        }
        switch (state) {
        case FREE_BLOCK:
            return false;
        case DIRTY:
        case CLEAN:
            if (write && block->of_file)
                take_from_file(block);
            else if (write && !is_writable(block))
                open_for_writing(block);
            return true;
        case MAPPED:
            if (write)
                take_from_file(block);
            return true;
        case DROPPED:
            errno = EFAULT;
            guard_die("something other than an operator used a tensor that had been given up, to be computed again when an operator "
                      "needs it; run with --no-recompute",
                      block);
        case WRITING:
            if (!write)
                return true;
            wait_for(block, state);
            break;
        case FILLING:
            wait_for(block, state);
            break;
        default:
            if (must_wait()) {
                wait_for_resume();
                break;
            }
            *brought = state == AWAY;
            if (block->of_file) {
                bring_from_file(block);
                break;
            }
            if (*brought)
                bring(block, write);
            else
                begin_block(block);
            return true;
        }
    }
}

enum fault_outcome guard_resolve(uintptr_t address, bool write, bool write_is_known) {
    struct block *block = arena_block_at(address);
    if (!block)
        return NOT_OURS;
    uint64_t begin = guard_now_ns();
    lock();
    uint32_t state = atomic_load(&block->state);
    if (state == FREE_BLOCK || address < block->address || address >= block->address + block->bytes) {
        unlock();
        return NOT_OURS;
    }
    /* If the processor does not report the kind of access, a fault on a readable page was a write, and a missing page is
     * brought in first. */
    bool readable = (state == DIRTY || state == CLEAN) && !block->held;
    bool writes = write_is_known ? write : readable || state == WRITING || state == MAPPED;
    bool brought, ours = ensure(block, writes, &brought);
    if (ours) {
        counters_.read_faults += brought;
        counters_.write_faults += !brought && writes && state != UNTOUCHED;
        note_fault(block);
        if (!brought)
            used_again(block);
    }
    counters_.fault_ns += guard_now_ns() - begin;
    unlock();
    return ours ? RESOLVED : NOT_OURS;
}

/* ---- the interface ------------------------------------------------------------------------------------------------ */

/* The unit of bringing in and evicting. */
static size_t block_bytes_for(size_t limit_bytes) {
    if (huge_pages_fit() && limit_bytes / HUGE_PAGES_IN_LIMIT >= HUGE_PAGE_BYTES)
        return HUGE_PAGE_BYTES;
    size_t bytes = CHUNK;
    while (bytes > GRANULE && bytes > limit_bytes / BLOCKS_IN_LIMIT)
        bytes /= 2;
    return bytes;
}

/* Reserve space in the page file for the blocks of an earlier beginning. */
static bool reserve_for_living(void) {
    uint32_t index = 0;
    for (const struct block *block; (block = next_used(&index));)
        if (block == arena_first(block) && !store_reserve(block->all_bytes))
            return false;
    return true;
}

int guard_begin(const char *directory, size_t limit_bytes, size_t smallest_bytes) {
    if (active_)
        return EALREADY;
    if (!arena_begin(block_bytes_for(limit_bytes)))
        return errno;
    for (int i = 0; i < BINS; i++)
        free_bins_[i] = NOTHING;
    int error = store_begin(directory);
    if (error)
        return error;
    counters_ = (struct guard_counters){.resident_bytes = counters_.resident_bytes,
                                        .live_bytes = counters_.live_bytes,
                                        .peak_live_bytes = counters_.live_bytes,
                                        .live_blocks = counters_.live_blocks}; /* of an earlier beginning */
    counters_.limit_bytes = asked_limit_ = limit_bytes;
    smallest_ = smallest_bytes < guard_page ? guard_page : smallest_bytes;
    if (!faults_begin() || !reserve_for_living())
        return errno;
    active_ = true;
    lock();
    find_room(0, NULL);
    counters_.peak_resident_bytes = counters_.resident_bytes;
    unlock();
    return 0;
}

bool guard_active(void) { return active_; }

/* Take a free allocation of this size that has all of its pages. */
static struct block *take_free(size_t bytes) {
    for (uint32_t *link = bin_of(bytes); *link != NOTHING; link = &arena_block(*link)->next) {
        struct block *first = arena_block(*link);
        if (first->all_bytes != bytes)
            continue;
        *link = first->next;
        for (EACH_BLOCK(block, first)) {
            frames_withdraw(block);
            if (!is_writable(block))
                protect(block, PROT_READ | PROT_WRITE);
        }
        return first;
    }
    return NULL;
}

/* Return the blocks of a new allocation with a place in the page file and no pages; NULL if there is no space. */
static struct block *take_away(size_t bytes) {
    struct block *first = arena_take(bytes);
    for (struct block *block = first; block; block = arena_following(block)) {
        if (!store_take(block)) {
            for (EACH_BLOCK(taken, first))
                store_release(taken);
            arena_give(first);
            return NULL;
        }
        store_empty(block);
    }
    return first;
}

/* Return the blocks of a new allocation with pages. If there is more than one block and not enough memory, they receive
 * pages as they are touched. */
static struct block *take_pages(size_t bytes, bool *untouched) {
    struct block *first = arena_take(bytes);
    if (!first)
        return NULL;
    if (bytes == first->bytes) {
        find_room(bytes, first);
    } else {
        follow_process(bytes);
        *untouched = counters_.resident_bytes + beyond(bytes, frames_offered()) > counters_.limit_bytes;
    }
    for (struct block *block = first; block && !*untouched; block = arena_following(block))
        if (!give_pages(block)) {
            for (EACH_BLOCK(given, first)) {
                resident_changed(0, frames_of(given));
                frames_drop(given);
            }
            arena_give(first);
            return NULL;
        }
    if (*untouched)
        untouched_bytes_ += bytes;
    return first;
}

/* Only one thread makes the call; it is made again only if it could not be queued. */
static void unlock_and_call_if_near(void) {
    size_t held = counters_.resident_bytes - frames_offered() + untouched_bytes_;
    bool near = held >= counters_.limit_bytes - counters_.limit_bytes / NEAR_SHARE;
    int (*call)(int (*)(void *), void *) = near ? call_when_near_ : NULL;
    if (call)
        call_when_near_ = NULL;
    unlock();
    if (call && call(what_when_near_, NULL)) {
        lock();
        call_when_near_ = call;
        unlock();
    }
}

void guard_call_when_near(int (*call)(int (*)(void *), void *), int (*what)(void *)) {
    lock();
    what_when_near_ = what;
    call_when_near_ = call;
    unlock();
}

/* Only once: the medium stays full, and the report has the bytes of all such tensors. */
static void report_full(size_t bytes, int error) {
    char text[320];
    const char *reason = strerrorname_np(error);
    int length = snprintf(text, sizeof text,
                          "port-agent: the page file cannot grow (%s): a tensor of %.1f MiB, and others until there is space, stay in RAM "
                          "outside the budget; free space on its medium, or give --page-dir another place\n",
                          reason ? reason : "unknown error", (double)bytes / (1 << 20));
    if (syscall(SYS_write, 2, text, (size_t)length) < 0) { /* there is nothing else to write it to */
    }
}

void *guard_allocate(size_t bytes) {
    if (!active_ || bytes < smallest_ || bytes > SIZE_MAX / 2)
        return NULL;
    bytes = (bytes + guard_page - 1) & ~(guard_page - 1);
    if (process_limit_ || processes_all() || guard_took_over())
        service_begin();
    lock();
    while (must_wait())
        wait_for_resume();
    if (!store_reserve(bytes)) {
        int error = errno;
        bool first_time = !counters_.unguarded_bytes;
        counters_.unguarded_bytes += bytes;
        unlock();
        if (first_time)
            report_full(bytes, error);
        errno = error;
        return NULL;
    }
    wait_for_others(bytes);
    bool away = bears_away_, untouched = false;
    struct block *first = away ? take_away(bytes) : take_free(bytes);
    if (!first && !away)
        first = take_pages(bytes, &untouched);
    if (!first) {
        store_forgo(bytes);
        unlock();
        errno = ENOMEM;
        return NULL;
    }
    for (EACH_BLOCK(block, first)) {
        count_in(block);
        if (!away && !untouched)
            list_append(&resident_, block);
        become(block, away ? AWAY : untouched ? UNTOUCHED : DIRTY);
    }
    unlock_and_call_if_near();
    return (void *)first->address;
}

/* Wait until no thread moves any block of an allocation. */
static void wait_for_all(struct block *first) {
    for (struct block *block = first; block;) {
        uint32_t state = atomic_load(&block->state);
        bool in_transfer = state == FILLING || state == WRITING;
        if (in_transfer)
            wait_for(block, state);
        block = in_transfer ? first : arena_following(block);
    }
}

bool guard_free(void *address) {
    struct block *first = arena_block_at((uintptr_t)address);
    if (!first || first->address != (uintptr_t)address || first != arena_first(first))
        return false;
    lock();
    wait_for_all(first);
    bool whole = true;
    for (EACH_BLOCK(block, first)) {
        uint32_t state = atomic_load(&block->state);
        if (state == FREE_BLOCK) {
            errno = EINVAL;
            guard_die("a tensor's memory was freed twice", block);
        }
        if (state == DIRTY || state == CLEAN)
            list_remove(&resident_, block);
        if (state == UNTOUCHED)
            untouched_bytes_ -= block->bytes;
        frames_withdraw(block);
        store_release(block);
        count_out(block);
        block->pins = block->held = 0;
        atomic_store(&block->state, FREE_BLOCK);
        whole = whole && frames_of(block) == block->bytes;
    }
    if (active_)
        store_forgo(first->all_bytes);
    if (whole)
        list_free(first);
    bool any = false;
    for (EACH_BLOCK(block, first)) {
        any = any || block->span_count;
        frames_offer(block);
    }
    size_t limit = active_ ? counters_.limit_bytes : 0;
    if (!any)
        arena_give(first);
    else if (counters_.resident_bytes > limit)
        resident_changed(0, frames_trim(counters_.resident_bytes - limit));
    unlock();
    return true;
}

size_t guard_usable(const void *address) {
    struct block *block = arena_block_at((uintptr_t)address);
    bool begins = block && block->reserved && block->address == (uintptr_t)address && block == arena_first(block);
    return begins ? block->all_bytes : 0;
}

/* Return a block by any address in it; NULL if there is none, or no memory is guarded. */
static struct block *block_at(const void *address) { return active_ ? arena_block_at((uintptr_t)address) : NULL; }

static bool all_are(const struct block *any, enum block_state state) {
    for (EACH_BLOCK(block, any))
        if (atomic_load(&block->state) != state)
            return false;
    return true;
}

/* Return whether a block's addresses are still a mapping's. */
static bool is_mapping(const struct block *block) { return block->of_file || atomic_load(&block->state) == MAPPED; }

static bool all_of_file(const struct block *any) {
    for (EACH_BLOCK(block, any))
        if (!block->of_file)
            return false;
    return true;
}

enum mapping_kind guard_watch(void *address, size_t bytes) {
    if (!active_ || !bytes || ((uintptr_t)address | bytes) & (guard_page - 1))
        return NO_MAPPING;
    enum mapping_kind kind = NO_MAPPING;
    lock();
    struct block *first = arena_block_at((uintptr_t)address);
    if (!first && (first = arena_adopt((uintptr_t)address, bytes))) {
        for (EACH_BLOCK(block, first)) {
            block->of_file = 1;
            list_append(&resident_, block);
            become(block, CLEAN);
            leave_to_file(block);
        }
        for (EACH_BLOCK(block, first)) /* when all are closed: the lock is released meanwhile */
            take_if_written(block);
    }
    if (first && first->address == (uintptr_t)address && first == arena_first(first) && first->all_bytes == bytes)
        kind = all_of_file(first) ? FILE_PAGES : OWN_MEMORY;
    unlock();
    return kind;
}

bool guard_take_from_file(const void *address) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    bool there = true, brought;
    lock();
    for (EACH_BLOCK(block, any))
        there = there && (!is_mapping(block) || ensure(block, true, &brought));
    there = there && atomic_load(&any->state) != FREE_BLOCK;
    unlock();
    return there;
}

bool guard_is_of_file(const void *address) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    lock();
    bool of_file = all_of_file(any);
    unlock();
    return of_file;
}

/* The addresses from `begin` to `end` are about to belong to another mapping. The allocation's other pages stay
 * where they are, resident and without blocks. */
static void forget(struct block *first, uintptr_t begin, uintptr_t end) {
    for (EACH_BLOCK(block, first)) {
        bool gone = begin <= block->address && block->address + block->bytes <= end, brought;
        block->pins++;
        if (!gone && !is_mapping(block))
            ensure(block, true, &brought);
    }
    wait_for_all(first);
    for (EACH_BLOCK(block, first)) {
        bool gone = begin <= block->address && block->address + block->bytes <= end;
        uint32_t state = atomic_load(&block->state);
        if (!gone)
            protect(block, PROT_READ | PROT_WRITE);
        if (state == DIRTY || state == CLEAN)
            list_remove(&resident_, block);
        frames_withdraw(block);
        resident_changed(0, frames_of(block));
        store_release(block);
        if (!is_mapping(block)) {
            store_forgo(block->bytes);
            count_out(block);
        }
    }
    arena_give(first);
}

/* Forget what lies over others' addresses in a range, and its contents if they are `gone`. */
static void forget_all(uintptr_t begin, uintptr_t end, bool gone) {
    for (;;) {
        struct block *block = active_ ? arena_adopted_from(begin) : NULL;
        if (!block || block->address >= end)
            return;
        lock();
        if (block == arena_adopted_from(begin))
            forget(arena_first(block), gone ? begin : 0, gone ? end : 0);
        unlock();
    }
}

void guard_unmapped(const void *address, size_t bytes) { forget_all((uintptr_t)address, (uintptr_t)address + bytes, true); }

static bool may_be_kept(size_t bytes) {
    lock();
    bool kept = store_reserve(bytes);
    if (kept)
        store_forgo(bytes); /* reserved again, block by block */
    unlock();
    return kept;
}

bool guard_adopt(void *base, size_t bytes) {
    uintptr_t start = ((uintptr_t)base + guard_page - 1) & ~(guard_page - 1), end = ((uintptr_t)base + bytes) & ~(guard_page - 1);
    if (!active_ || end <= start || !may_be_kept(end - start))
        return false;
    if (guard_watch((void *)start, end - start) == NO_MAPPING)
        return false;
    arena_block_at(start)->base = (uintptr_t)base;
    return guard_take_from_file((void *)start);
}

void guard_disown(const void *base) {
    uintptr_t start = ((uintptr_t)base + guard_page - 1) & ~(guard_page - 1);
    struct block *first = guard_page ? arena_adopted_from(start) : NULL;
    if (!first || first->address != start || first->base != (uintptr_t)base)
        return;
    lock();
    size_t bytes = first->all_bytes;
    forget(first, start, start + bytes);
    if (mmap((void *)start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        guard_die("the kernel gave no memory for what torch frees", NULL);
    unlock();
}

void guard_reprotected(const void *address, size_t bytes) {
    if (active_ && arena_holds(address)) {
        errno = ENOTSUP;
        guard_die("the program changes what may be done with a tensor's memory, which the budget decides", block_at(address));
    }
    forget_all((uintptr_t)address, (uintptr_t)address + bytes, false);
}

void guard_end(void) {
    if (!active_)
        return;
    lock();
    call_when_near_ = NULL;
    process_limit_ = 0;
    asked_limit_ = SIZE_MAX;
    set_limit();
    bool brought;
    uint32_t index = 0;
    for (struct block *block; (block = next_used(&index));) {
        if (!is_mapping(block) && atomic_load(&block->state) != DROPPED)
            ensure(block, true, &brought);
        store_release(block);
    }
    for (struct block *block; (block = arena_adopted_from(0));)
        forget(arena_first(block), 0, 0);
    resident_changed(0, frames_trim(SIZE_MAX));
    active_ = false;
    store_end();
    unlock();
}

bool guard_seal(const void *address, uint32_t *writes) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    bool closed = true;
    *writes = 0;
    lock();
    for (EACH_BLOCK(block, any)) {
        uint32_t state = atomic_load(&block->state);
        closed = closed && state != FREE_BLOCK && !(block->pins && is_writable(block));
        if (closed && is_writable(block) && state == DIRTY)
            protect(block, PROT_READ);
        *writes += block->writes;
    }
    unlock();
    return closed;
}

/* Return whether no block of an allocation was opened for writing since the count `writes`, and none is writable now. */
static bool all_unwritten(const struct block *any, uint32_t writes) {
    bool open = false;
    for (EACH_BLOCK(block, any)) {
        open = open || is_writable(block);
        writes -= block->writes;
    }
    return !open && !writes;
}

bool guard_unwritten(const void *address, uint32_t writes) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    lock();
    bool unwritten = all_unwritten(any, writes);
    unlock();
    return unwritten;
}

static bool may_be_dropped(const struct block *any, uint32_t writes) {
    for (EACH_BLOCK(block, any)) {
        uint32_t state = atomic_load(&block->state);
        if (block->pins || block->held || block->of_file || !(state == DIRTY || state == CLEAN || state == AWAY))
            return false;
    }
    return all_unwritten(any, writes);
}

bool guard_drop(const void *address, uint32_t writes) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    lock();
    bool resident = false;
    for (EACH_BLOCK(block, any))
        resident = resident || atomic_load(&block->state) == DIRTY;
    bool may = resident && may_be_dropped(any, writes);
    if (may)
        for (EACH_BLOCK(block, any)) {
            if (atomic_load(&block->state) != AWAY) {
                protect(block, PROT_NONE);
                list_remove(&resident_, block);
                frames_offer(block);
            }
            become(block, DROPPED);
        }
    unlock();
    return may;
}

bool guard_fill(void *address, const void *from, size_t bytes) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    lock();
    bool may = all_are(any, DROPPED) && bytes <= arena_first(any)->all_bytes;
    for (EACH_BLOCK(block, any)) {
        if (!may)
            break;
        size_t start = block->address - arena_first(any)->address;
        refill(block, (const char *)from + start, at_most(beyond(bytes, start), block->bytes));
        list_append(&resident_, block);
        become(block, DIRTY);
    }
    unlock();
    return may;
}

/* Return whether a block that does not end before `address` begins within `bytes` from there. */
static bool is_within(const struct block *block, const void *address, size_t bytes) {
    return block && (block->address <= (uintptr_t)address || block->address - (uintptr_t)address < bytes);
}

struct block *guard_first_within(const void *address, size_t bytes) {
    struct block *block = block_at(address);
    if (block || !active_ || !bytes)
        return bytes ? block : NULL;
    block = arena_adopted_from((uintptr_t)address);
    return is_within(block, address, bytes < SIZE_MAX ? bytes : guard_page) ? block : NULL;
}

bool guard_pin(const void *address, size_t bytes, bool write) {
    struct block *any = guard_first_within(address, bytes);
    if (!any)
        return false;
    bool there = true, brought;
    lock();
    for (struct block *block = any; there && is_within(block, address, bytes); block = arena_following(block))
        if ((there = ensure(block, write, &brought))) {
            block->pins++;
            used_again(block);
        }
    counters_.kernel_calls += there;
    unlock();
    return there;
}

void guard_unpin(const void *address, size_t bytes) {
    struct block *any = guard_first_within(address, bytes);
    if (!any)
        return;
    int saved = errno; /* that of the call made meanwhile; waiting for the lock may change it */
    lock();
    for (struct block *block = any; is_within(block, address, bytes); block = arena_following(block))
        if (block->pins)
            block->pins--;
    unlock();
    errno = saved;
}

/* Read a file's pages at once instead of a fault each (Linux 5.14; otherwise they come as they are touched). */
static void populate(struct block *block) {
    block->pins++;
    unlock();
    madvise((void *)block->address, block->bytes, MADV_POPULATE_READ);
    lock();
    block->pins--;
}

bool guard_bring(const void *address) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    bool there = true, brought;
    lock();
    size_t free_bytes = counters_.limit_bytes;
    for (EACH_BLOCK(block, any)) { /* blocks that would evict the allocation's own beginning are brought in when they are touched */
        if (block->bytes > free_bytes)
            break;
        free_bytes -= block->bytes;
        if (atomic_load(&block->state) == UNTOUCHED)
            continue;
        there = there && ensure(block, false, &brought);
        if (there && block->of_file)
            populate(block);
        if (there && !brought && atomic_load(&block->state) != WRITING)
            used_again(block);
    }
    unlock();
    return there;
}

bool guard_write_back(const void *address) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    bool wrote = false;
    lock();
    for (EACH_BLOCK(block, any))
        if (atomic_load(&block->state) == DIRTY && !block->pins) {
            write_back(block);
            wrote = true;
        }
    unlock();
    return wrote;
}

bool guard_evict(const void *address) {
    struct block *any = block_at(address);
    if (!any)
        return false;
    bool away = true;
    lock();
    for (EACH_BLOCK(block, any)) {
        take_if_written(block);
        uint32_t state = atomic_load(&block->state);
        if ((state == DIRTY || state == CLEAN) && !block->pins)
            leave(block);
        state = atomic_load(&block->state);
        away = away && (state == AWAY || state == UNTOUCHED);
    }
    unlock();
    return away;
}

void guard_bear_away(bool away) { bears_away_ = away; }

size_t guard_held_bytes(void) {
    lock();
    size_t held = counters_.resident_bytes - frames_offered();
    unlock();
    return held;
}

void guard_trim(void) {
    lock();
    resident_changed(0, frames_trim(SIZE_MAX));
    unlock();
}

size_t guard_measure_live_bytes(void) {
    lock();
    peak_live_bytes_ = counters_.live_bytes;
    unlock();
    return peak_live_bytes_;
}

size_t guard_peak_live_bytes(void) { return peak_live_bytes_; }

/* Transfer a part of an evicted block between its page and memory; the lock is released meanwhile. */
static void transfer_part(struct block *block, size_t start, void *memory, size_t bytes, bool write) {
    become(block, FILLING);
    busy_++;
    if (write) { /* its offered pages no longer match the page */
        size_t had = frames_of(block);
        frames_drop(block);
        resident_changed(0, had);
    }
    unlock();
    if (write)
        store_write(block, start, (uintptr_t)memory, bytes);
    else
        store_read(block, start, (uintptr_t)memory, bytes);
    lock();
    busy_--;
    *(write ? &counters_.written_bytes : &counters_.read_bytes) += bytes;
    block->writes += write;
    become(block, AWAY);
}

static void copy_part(struct block *block, size_t start, void *memory, size_t bytes, bool write) {
    block->pins++;
    unlock();
    char *inside = (char *)block->address + start;
    memcpy(write ? inside : memory, write ? memory : inside, bytes);
    lock();
    block->pins--;
}

/* Copy a part of one block; false if it is free. */
static bool copy_within(struct block *block, size_t start, void *memory, size_t bytes, bool write) {
    bool brought;
    while (atomic_load(&block->state) == FILLING || must_wait())
        if (must_wait())
            wait_for_resume();
        else
            wait_for(block, FILLING);
    if (atomic_load(&block->state) == AWAY && !block->of_file && (!write || store_may_write(block, start, bytes)))
        transfer_part(block, start, memory, bytes, write);
    else if (ensure(block, write, &brought))
        copy_part(block, start, memory, bytes, write);
    else
        return false;
    return true;
}

bool guard_copy(const void *address, size_t start, void *memory, size_t bytes, bool write) {
    struct block *any = block_at(address);
    if (!any || start > arena_first(any)->all_bytes || bytes > arena_first(any)->all_bytes - start)
        return false;
    bool pinned = guard_pin(memory, bytes, !write), there = true;
    lock();
    uintptr_t from = arena_first(any)->address + start, end = from + bytes;
    for (EACH_BLOCK(block, any)) {
        uintptr_t begin = from > block->address ? from : block->address;
        uintptr_t stop = end < block->address + block->bytes ? end : block->address + block->bytes;
        if (there && begin < stop)
            there = copy_within(block, begin - block->address, (char *)memory + (begin - from), stop - begin, write);
    }
    unlock();
    if (pinned)
        guard_unpin(memory, bytes);
    return there;
}

void guard_make_way(size_t bytes) {
    if (!process_limit_)
        return;
    lock();
    follow_process(bytes); /* what is resident now, plus what is coming */
    rest_bytes_ += bytes;
    set_limit();
    find_room(0, NULL);
    unlock();
}

void guard_expect(void *address, size_t bytes) {
    if (!process_limit_ || bytes < EXPECTED_BYTES)
        return;
    lock();
    untouched_expect((uintptr_t)address, (bytes + guard_page - 1) & ~(guard_page - 1));
    unlock();
}

void guard_set_limit(size_t bytes) {
    lock();
    asked_limit_ = bytes;
    set_limit();
    find_room(0, NULL);
    unlock();
}

void guard_set_process_limit(size_t bytes) {
    lock();
    process_limit_ = bytes;
    measured_at_ns_ = 0;
    set_limit();
    find_room(0, NULL);
    unlock();
}

void guard_hold(void) {
    lock();
    atomic_store(&paused_, 1);
    for (uint32_t index = resident_.oldest; index != NOTHING; index = arena_block(index)->newer) {
        struct block *block = arena_block(index);
        uint32_t state = atomic_load(&block->state);
        if (!block->pins && !block->held && (state == DIRTY || state == CLEAN)) {
            protect(block, PROT_NONE);
            block->held = 1;
        }
    }
    unlock();
}

/* Return a block that is held and can be evicted: not one in use by a system call or moved by another thread. */
static struct block *held_one(void) {
    for (uint32_t index = resident_.oldest; index != NOTHING; index = arena_block(index)->newer) {
        struct block *block = arena_block(index);
        uint32_t state = atomic_load(&block->state);
        if (block->held && !block->pins && (state == DIRTY || state == CLEAN))
            return block;
    }
    return NULL;
}

bool guard_release(void) {
    lock();
    for (struct block *block; atomic_load(&paused_) && (block = held_one());)
        leave(block);
    resident_changed(0, frames_trim(SIZE_MAX));
    bool all = !busy_;
    for (uint32_t index = resident_.oldest; index != NOTHING; index = arena_block(index)->newer)
        all = all && arena_block(index)->pins;
    unlock();
    return all;
}

void guard_pause(void) {
    guard_hold();
    guard_release();
}

void guard_resume(void) {
    atomic_store(&paused_, 0);
    wake_all(&paused_); /* held blocks open when they are touched */
}

void guard_tick(void) {
    lock();
    measured_at_ns_ = 0;
    if (active_)
        find_room(0, NULL);
    else
        follow_process(0);
    unlock_and_call_if_near(); /* a program may write pages of files without allocating any */
}

void guard_measure_shared(void) {
    uint32_t own = (uint32_t)getpid();
    size_t resident = processes_resident(own);
    atomic_store(&shared_bytes_, processes_has_company() ? resident - processes_own_part(own, resident) : 0);
}

void guard_read_counters(struct guard_counters *out) {
    lock();
    *out = counters_;
    out->file_bytes = store_bytes();
    unlock();
}

/* ---- fork --------------------------------------------------------------------------------------------------------- */

void guard_before_fork(void) {
    if (!active_)
        return;
    lock();
    while (busy_) { /* the child has no thread to finish a transfer */
        unlock();
        struct timespec moment = {0, 200000};
        nanosleep(&moment, NULL);
        lock();
    }
    store_before_fork();
}

void guard_after_fork(void) {
    if (active_) {
        store_after_fork();
        unlock();
    }
}

void guard_in_child(void) {
    if (!active_)
        return;
    store_in_child();
    forked_ = true;
    inherited_live_ = counters_.live_bytes;
    inherited_read_ = counters_.read_bytes;
    counters_.read_faults = counters_.write_faults = 0;
    atomic_store(&shared_bytes_, processes_resident((uint32_t)getpid()));
    atomic_store(&lock_, 0);
    atomic_store(&paused_, 0);
}
