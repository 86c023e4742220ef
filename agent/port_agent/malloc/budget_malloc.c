/* The malloc family on top of block_cache.c, to be preloaded (LD_PRELOAD) into a process that trains under a RAM budget.
 *
 * Requests of 64 KiB and more become page-aligned blocks of the cache; smaller ones go to glibc. The budget comes from
 * the environment (PORT_MALLOC_LIMIT, PORT_MALLOC_HARD_LIMIT, in bytes) and can be changed with the port_malloc_*
 * functions at the end. glibc exports its allocator as __libc_malloc and so on, so nothing has to be looked up at
 * start-up and there is no recursion through dlsym.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../guard/guard_internal.h"
#include "../guard/processes.h"
#include "block_cache.h"

#ifndef __GLIBC__
#error "the preload allocator needs glibc; elsewhere the package works without it"
#endif

#define EXPORT __attribute__((visibility("default")))
#define THRESHOLD ((size_t)64 << 10)
#define INTERFACE_VERSION 2u

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *address, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *address);

static struct block_cache blocks = BLOCK_CACHE_INITIALIZER;

/* ---- blocks and what glibc serves ------------------------------------------------------------------------------- */

static void *allocate_block(size_t bytes, size_t alignment, bool *zeroed) {
    int saved = errno;
    if (guard_active())
        guard_make_way(bytes);
    void *address = block_cache_allocate(&blocks, bytes, alignment, zeroed);
    if (address && guard_active())
        guard_expect(address, bytes);
    errno = address ? saved : ENOMEM;
    return address;
}

/* glibc may have failed because our cache fills RLIMIT_DATA; true if emptying the cache may help. */
static bool emptied_cache(void) { return block_cache_trim(&blocks, 0) > 0; }

static bool is_page_aligned(const void *address) {
    /* Blocks are aligned to pages, and hardly any of glibc's addresses are. 4096 divides every page size. */
    return ((uintptr_t)address & 4095) == 0;
}

static size_t small_usable(void *address) {
    static _Atomic(size_t (*)(void *)) cached;
    size_t (*usable)(void *) = atomic_load_explicit(&cached, memory_order_relaxed);
    if (!usable) {
        void *symbol = dlsym(RTLD_NEXT, "malloc_usable_size");
        memcpy(&usable, &symbol, sizeof usable); /* ISO C has no cast between object and function pointers */
        atomic_store_explicit(&cached, usable, memory_order_relaxed);
    }
    return usable(address);
}

static size_t usable(void *address) {
    size_t bytes = is_page_aligned(address) ? guard_usable(address) : 0;
    if (!bytes && is_page_aligned(address))
        bytes = block_cache_usable(&blocks, address);
    return bytes ? bytes : small_usable(address);
}

/* ---- the operations ----------------------------------------------------------------------------------------------
 * The exported functions below only call these, never each other: a library that comes earlier in the search order may
 * have replaced one of them. */

static void *allocate(size_t bytes) {
    bool zeroed;
    if (bytes >= THRESHOLD)
        return allocate_block(bytes, 1, &zeroed);
    void *address = __libc_malloc(bytes);
    if (!address && emptied_cache())
        address = __libc_malloc(bytes);
    return address;
}

static void *allocate_zeroed(size_t bytes) {
    if (bytes < THRESHOLD) {
        void *address = __libc_calloc(1, bytes);
        if (!address && emptied_cache())
            address = __libc_calloc(1, bytes);
        return address;
    }
    bool zeroed;
    void *address = allocate_block(bytes, 1, &zeroed);
    if (address && !zeroed)
        memset(address, 0, bytes);
    return address;
}

static void *allocate_aligned(size_t alignment, size_t bytes) {
    bool zeroed;
    if (bytes >= THRESHOLD)
        return allocate_block(bytes, alignment, &zeroed);
    void *address = __libc_memalign(alignment, bytes);
    if (!address && emptied_cache())
        address = __libc_memalign(alignment, bytes);
    return address;
}

static void release(void *address) {
    int saved = errno; /* free() keeps errno: POSIX.1-2024 */
    if (address && !(is_page_aligned(address) && (guard_free(address) || block_cache_free(&blocks, address))))
        __libc_free(address);
    errno = saved;
}

/* Move to a new allocation; if that fails, the old one is unchanged. */
static void *move(void *address, size_t old_bytes, size_t bytes) {
    void *moved = allocate(bytes);
    if (!moved)
        return NULL;
    memcpy(moved, address, old_bytes < bytes ? old_bytes : bytes);
    release(address);
    return moved;
}

static void *resize(void *address, size_t bytes) {
    size_t guarded = is_page_aligned(address) ? guard_usable(address) : 0;
    if (guarded)
        return bytes <= guarded ? address : move(address, guarded, bytes);
    size_t block_bytes = is_page_aligned(address) ? block_cache_usable(&blocks, address) : 0;
    if (block_bytes) {
        int saved = errno;
        void *resized = bytes >= THRESHOLD ? block_cache_resize(&blocks, address, bytes) : NULL;
        errno = saved;
        return resized ? resized : move(address, block_bytes, bytes);
    }
    if (bytes >= THRESHOLD)
        return move(address, small_usable(address), bytes);
    void *resized = __libc_realloc(address, bytes);
    if (!resized && emptied_cache())
        resized = __libc_realloc(address, bytes);
    return resized;
}

/* ---- the malloc family ------------------------------------------------------------------------------------------ */

static bool is_power_of_two(size_t value) { return value && !(value & (value - 1)); }

static void *refuse(int error) {
    errno = error;
    return NULL;
}

EXPORT void *malloc(size_t bytes) { return allocate(bytes); }

EXPORT void free(void *address) { release(address); }

EXPORT void free_sized(void *address, size_t bytes) {
    (void)bytes;
    release(address);
}

EXPORT void free_aligned_sized(void *address, size_t alignment, size_t bytes) {
    (void)alignment;
    (void)bytes;
    release(address);
}

EXPORT void *calloc(size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? refuse(ENOMEM) : allocate_zeroed(bytes);
}

static void *reallocate(void *address, size_t bytes) {
    if (!address)
        return allocate(bytes);
    if (bytes)
        return resize(address, bytes);
    release(address); /* as glibc does */
    return NULL;
}

EXPORT void *realloc(void *address, size_t bytes) { return reallocate(address, bytes); }

EXPORT void *reallocarray(void *address, size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? refuse(ENOMEM) : reallocate(address, bytes);
}

EXPORT int posix_memalign(void **result, size_t alignment, size_t bytes) {
    if (!is_power_of_two(alignment) || alignment % sizeof(void *))
        return EINVAL;
    int saved = errno;
    void *address = allocate_aligned(alignment, bytes);
    errno = saved;
    if (!address)
        return ENOMEM;
    *result = address;
    return 0;
}

/* c10::alloc_cpu and c10::free_cpu make and free all memory of tensors. libc10 itself looks them up by name, so they can
 * be replaced. Torch's builds for Arm have an allocator of their own behind them (mimalloc), others call posix_memalign. */
#define TENSOR_ALIGNMENT 64 /* c10::gAlignment */
#define MOST_TORCH_BLOCKS 16

static _Atomic(void *) torch_blocks_[MOST_TORCH_BLOCKS]; /* allocated by torch, because this allocator could not */
static _Atomic unsigned torch_block_count_;

static void *torch_function(const char *name) {
    void *library = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? dlsym(library, name) : NULL;
}

static void *torch_allocate(size_t bytes) {
    static _Atomic(uintptr_t) known;
    if (!atomic_load_explicit(&known, memory_order_relaxed))
        atomic_store(&known, (uintptr_t)torch_function("_ZN3c109alloc_cpuEm"));
    void *(*theirs)(size_t) = (void *(*)(size_t))atomic_load_explicit(&known, memory_order_relaxed);
    return theirs ? theirs(bytes) : NULL;
}

static void torch_free(void *address) {
    static _Atomic(uintptr_t) known;
    if (!atomic_load_explicit(&known, memory_order_relaxed))
        atomic_store(&known, (uintptr_t)torch_function("_ZN3c108free_cpuEPv"));
    ((void (*)(void *))atomic_load_explicit(&known, memory_order_relaxed))(address);
}

/* Have torch allocate: if it fails, it throws its own error, which a function in C cannot. */
static void *allocated_by_torch(size_t bytes) {
    void *address = torch_allocate(bytes);
    for (unsigned i = 0; address && i < MOST_TORCH_BLOCKS; i++) {
        void *nothing = NULL;
        if (atomic_compare_exchange_strong(&torch_blocks_[i], &nothing, address)) {
            atomic_fetch_add(&torch_block_count_, 1);
            return address;
        }
    }
    return address ? torch_allocate(PTRDIFF_MAX) : NULL; /* throws: too many to remember which allocator must free it */
}

STANDS_IN void *_ZN3c109alloc_cpuEm(size_t bytes) {
    int saved = errno;
    bool possible = bytes && bytes <= PTRDIFF_MAX;
    void *address = possible && guard_active() ? guard_allocate(bytes) : NULL;
    if (possible && !address && !guard_took_over())
        address = allocate_aligned(TENSOR_ALIGNMENT, bytes);
    errno = saved;
    if (address || !bytes)
        return address;
    return guard_took_over() ? torch_allocate(bytes) : allocated_by_torch(bytes);
}

/* Return whether torch itself allocated this, and must free it. */
static bool is_torchs(void *address) {
    for (unsigned i = 0; address && atomic_load(&torch_block_count_) && i < MOST_TORCH_BLOCKS; i++) {
        void *known = address;
        if (atomic_compare_exchange_strong(&torch_blocks_[i], &known, NULL)) {
            atomic_fetch_sub(&torch_block_count_, 1);
            return true;
        }
    }
    return false;
}

STANDS_IN void _ZN3c108free_cpuEPv(void *address) {
    if (!guard_took_over() && !is_torchs(address)) {
        release(address);
    } else if (address && !guard_free(address)) {
        guard_disown(address);
        torch_free(address);
    }
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
    return is_power_of_two(alignment) ? allocate_aligned(alignment, bytes) : refuse(EINVAL);
}

EXPORT void *memalign(size_t alignment, size_t bytes) {
    size_t power = sizeof(void *); /* historical: any alignment is rounded up to a power of two */
    while (power < alignment && power <= SIZE_MAX / 2)
        power *= 2;
    return allocate_aligned(power, bytes);
}

EXPORT void *valloc(size_t bytes) { return allocate_aligned((size_t)getpagesize(), bytes); }

EXPORT void *pvalloc(size_t bytes) {
    size_t page = (size_t)getpagesize();
    return bytes > SIZE_MAX - page ? refuse(ENOMEM) : allocate_aligned(page, (bytes + page - 1) / page * page);
}

EXPORT size_t malloc_usable_size(void *address) { return address ? usable(address) : 0; }

/* ---- control, called through ctypes by port_agent.malloc --------------------------------------------------------- */

EXPORT unsigned port_malloc_version(void) { return INTERFACE_VERSION; }

EXPORT void port_malloc_stats(struct block_cache_stats *out) { block_cache_read(&blocks, out); }

EXPORT uint64_t port_malloc_live_bytes(void) {
    struct block_cache_stats stats;
    block_cache_read(&blocks, &stats);
    return stats.live_bytes;
}

EXPORT uint64_t port_malloc_peak_live_bytes(void) {
    struct block_cache_stats stats;
    block_cache_read(&blocks, &stats);
    return stats.peak_live_bytes;
}

EXPORT void port_malloc_reset_peak(void) { block_cache_reset_peak(&blocks); }

EXPORT void port_malloc_set_limit(size_t bytes) { block_cache_set_limit(&blocks, bytes); }

EXPORT void port_malloc_set_hard_limit(size_t bytes) { block_cache_set_hard_limit(&blocks, bytes); }

EXPORT size_t port_malloc_trim(size_t keep) { return block_cache_trim(&blocks, keep); }

EXPORT unsigned port_guard_version(void) { return GUARD_INTERFACE_VERSION; }

EXPORT bool port_guard_active(void) { return guard_active(); }

EXPORT int port_guard_begin(const char *directory, size_t limit_bytes, size_t smallest_bytes) {
    return guard_begin(directory, limit_bytes, smallest_bytes);
}

EXPORT int port_guard_take_over(void) { return guard_take_over(); }

EXPORT void port_guard_end(void) { guard_end(); }

EXPORT bool port_guard_adopt(void *base, size_t bytes) { return guard_adopt(base, bytes); }

EXPORT bool port_guard_bring(const void *address) { return guard_bring(address); }

EXPORT bool port_guard_write_back(const void *address) { return guard_write_back(address); }

EXPORT bool port_guard_evict(const void *address) { return guard_evict(address); }

EXPORT bool port_guard_pin(const void *address, size_t bytes, bool write) { return guard_pin(address, bytes, write); }

EXPORT void port_guard_unpin(const void *address, size_t bytes) { guard_unpin(address, bytes); }

EXPORT size_t port_guard_usable(const void *address) { return guard_usable(address); }

EXPORT void port_guard_bear_away(bool away) { guard_bear_away(away); }

EXPORT bool port_guard_copy(const void *address, size_t start, void *memory, size_t bytes, bool write) {
    return guard_copy(address, start, memory, bytes, write);
}

EXPORT int port_guard_watch(void *address, size_t bytes) { return (int)guard_watch(address, bytes); }

EXPORT bool port_guard_take_from_file(const void *address) { return guard_take_from_file(address); }

EXPORT bool port_guard_is_of_file(const void *address) { return guard_is_of_file(address); }

EXPORT int64_t port_guard_seal(const void *address) {
    uint32_t writes;
    return guard_seal(address, &writes) ? (int64_t)writes : -1;
}

EXPORT bool port_guard_unwritten(const void *address, uint32_t writes) { return guard_unwritten(address, writes); }

EXPORT bool port_guard_drop(const void *address, uint32_t writes) { return guard_drop(address, writes); }

EXPORT bool port_guard_fill(void *address, const void *from, size_t bytes) { return guard_fill(address, from, bytes); }

EXPORT size_t port_guard_held_bytes(void) { return guard_held_bytes(); }

EXPORT void port_guard_call_when_near(int (*call)(int (*)(void *), void *), int (*what)(void *)) { guard_call_when_near(call, what); }

EXPORT void port_guard_trim(void) { guard_trim(); }

EXPORT size_t port_guard_measure_live_bytes(void) { return guard_measure_live_bytes(); }

EXPORT size_t port_guard_peak_live_bytes(void) { return guard_peak_live_bytes(); }

EXPORT void port_guard_set_limit(size_t bytes) { guard_set_limit(bytes); }

EXPORT void port_guard_set_process_limit(size_t bytes) { guard_set_process_limit(bytes); }

EXPORT void port_guard_pause(void) { guard_pause(); }

EXPORT void port_guard_resume(void) { guard_resume(); }

EXPORT void port_guard_watch_line(int line, const char *held, const char *released) { service_watch_line(line, held, released); }

EXPORT void port_guard_line_is_obeyed(bool now) { service_line_is_obeyed(now); }

EXPORT void port_guard_pause_and_say(unsigned state) { service_pause_and_report((enum pause_state)state); }

EXPORT void port_guard_counters(struct guard_counters *out) { guard_read_counters(out); }

/* ---- start-up and fork -------------------------------------------------------------------------------------------- */

static void before_fork(void) {
    take_over_before_fork();
    guard_before_fork();
    block_cache_lock(&blocks);
}

static void after_fork(void) {
    block_cache_unlock(&blocks);
    guard_after_fork();
    take_over_after_fork();
}

static void in_child(void) {
    block_cache_unlock(&blocks);
    processes_in_child(guard_active());
    service_in_child();
    guard_in_child();
    take_over_after_fork();
}

/* Return the number of bytes in an environment variable, `unset` if it is missing or not a plain number. */
static size_t bytes_from_environment(const char *name, size_t unset) {
    const char *text = getenv(name);
    if (!text || *text < '0' || *text > '9')
        return unset;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    return *end || errno || value > SIZE_MAX ? unset : (size_t)value;
}

static size_t give_up_cached(size_t bytes) {
    struct block_cache_stats stats;
    block_cache_read(&blocks, &stats);
    return stats.cached_bytes ? block_cache_trim(&blocks, stats.cached_bytes > bytes ? stats.cached_bytes - bytes : 0) : 0;
}

/* Begin guarded memory as the environment specifies, or as every process that shares the budget does. */
static int begin_guard(const struct processes *shared) {
    const char *directory = getenv("PORT_GUARD_DIRECTORY");
    size_t limit = bytes_from_environment("PORT_GUARD_LIMIT", SIZE_MAX), smallest = bytes_from_environment("PORT_GUARD_SMALLEST", THRESHOLD);
    if (!directory) {
        if (!shared)
            return 0;
        directory = shared->page_directory, limit = shared->tensor_bytes, smallest = shared->smallest_bytes;
    }
    int error = guard_begin(directory, limit, smallest);
    if (!error && shared && shared->ram_bytes)
        guard_set_process_limit(shared->ram_bytes);
    return error;
}

__attribute__((constructor)) static void start(int count, char **words) {
    int saved = errno;
    starts_begin();
    const struct processes *shared = processes_attach(count, words);
    size_t limit = shared && shared->ram_bytes ? shared->ram_bytes : SIZE_MAX;
    block_cache_set_limit(&blocks, bytes_from_environment("PORT_MALLOC_LIMIT", limit));
    block_cache_set_hard_limit(&blocks, bytes_from_environment("PORT_MALLOC_HARD_LIMIT", SIZE_MAX));
    /* Registered before any other library can register its own. Prepare handlers run last to first, so ours locks
     * after all others, which may still allocate, and unlocks before them. */
    pthread_atfork(before_fork, after_fork, in_child);
    guard_before_leaving(give_up_cached);
    if (begin_guard(shared))
        perror("port-agent: guarded memory cannot begin");
    if (processes_is_first())
        service_begin();
    errno = saved;
}

__attribute__((destructor)) static void end(void) { processes_end(); }
