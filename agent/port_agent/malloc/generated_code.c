/* Machine code that libraries generate at run time, such as oneDNN's for each kernel: mappings of 64 KiB to 4 MiB,
 * mostly unused.
 *
 * They are private and stay writable, so RLIMIT_DATA counts them in full, touched or not: 35 MiB in a ResNet-50.
 * Mappings that are only readable and executable do not count (is_data_mapping in mm/internal.h of Linux). So each
 * mapping that becomes executable is noted here. It is made read-only when the caller knows that no code is being
 * written: between two operators.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../guard/guard_internal.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST_MAPPINGS 1024u /* noted between two closings; further ones stay as their library made them */
#define WRITABLE_CODE (PROT_READ | PROT_WRITE | PROT_EXEC)

struct mapping {
    uintptr_t address;
    size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping writable[MOST_MAPPINGS];
static _Atomic size_t count; /* changed under the lock */

/* Forget what was noted in this range, which is about to hold something else; the caller holds the lock. */
static void forget(uintptr_t address, size_t bytes) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (writable[i].address >= address + bytes || address >= writable[i].address + writable[i].bytes)
            writable[kept++] = writable[i];
    count = kept;
}

STANDS_IN int mprotect(void *address, size_t bytes, int protection) {
    guard_reprotected(address, bytes);
    pthread_mutex_lock(&lock);
    int failed = (int)syscall(SYS_mprotect, address, bytes, protection);
    if (!failed) {
        forget((uintptr_t)address, bytes);
        if (protection == WRITABLE_CODE && count < MOST_MAPPINGS)
            writable[count++] = (struct mapping){(uintptr_t)address, bytes};
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

STANDS_IN int munmap(void *address, size_t bytes) {
    guard_unmapped(address, bytes);
    if (!count) /* nothing is noted; tensors are mapped and unmapped all the time */
        return (int)syscall(SYS_munmap, address, bytes);
    pthread_mutex_lock(&lock);
    forget((uintptr_t)address, bytes); /* first: another thread may map something there right after the call */
    int failed = (int)syscall(SYS_munmap, address, bytes);
    pthread_mutex_unlock(&lock);
    return failed;
}

/* ---- control, called through ctypes by port_agent.malloc --------------------------------------------------------- */

/* Make everything noted read-only, and return its bytes. */
EXPORT size_t port_malloc_close_code(void) {
    size_t closed = 0;
    if (!count)
        return 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
        if (!syscall(SYS_mprotect, (void *)writable[i].address, writable[i].bytes, PROT_READ | PROT_EXEC))
            closed += writable[i].bytes;
    }
    count = 0;
    pthread_mutex_unlock(&lock);
    return closed;
}

/* ---- fork --------------------------------------------------------------------------------------------------- */

/* The lock is not taken before a fork: the allocator unmaps while it holds its own locks, and its own fork handler
 * waits for those. Mappings that another thread was noting are missing in the child, where their code stays
 * writable. */
static void forked(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    count = 0;
}

__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forked); }
