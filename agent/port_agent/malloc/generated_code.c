/* Code that libraries generate as the process runs, such as oneDNN's for each kernel: in 64 KiB to 4 MiB of which it fills little.
 *
 * It lies in private memory that stays writable, which RLIMIT_DATA counts in full, touched or not: 35 MiB in a ResNet-50.
 * What is only read and run does not count (is_data_mapping in mm/internal.h of Linux). So what is made executable is
 * noted here, and closed for writing where the caller says that all of it is written: between two operators.
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

#include "../guard/guard.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST_STRETCHES 1024u /* from one closing to the next; what comes beyond stays as its library made it */
#define WRITABLE_CODE (PROT_READ | PROT_WRITE | PROT_EXEC)

struct stretch {
    uintptr_t address;
    size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stretch writable[MOST_STRETCHES];
static _Atomic size_t count; /* changed under the lock */

/* Forget what lies in these bytes, which are something else from now on; the caller holds the lock. */
static void forget(uintptr_t address, size_t bytes) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (writable[i].address >= address + bytes || address >= writable[i].address + writable[i].bytes)
            writable[kept++] = writable[i];
    count = kept;
}

EXPORT int mprotect(void *address, size_t bytes, int protection) {
    pthread_mutex_lock(&lock);
    int failed = (int)syscall(SYS_mprotect, address, bytes, protection);
    if (!failed) {
        forget((uintptr_t)address, bytes);
        if (protection == WRITABLE_CODE && count < MOST_STRETCHES)
            writable[count++] = (struct stretch){(uintptr_t)address, bytes};
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

EXPORT int munmap(void *address, size_t bytes) {
    guard_unmapped(address, bytes);
    if (!count) /* no code is being made, and tensors come and go all the time */
        return (int)syscall(SYS_munmap, address, bytes);
    pthread_mutex_lock(&lock);
    forget((uintptr_t)address, bytes); /* ahead: another thread may map something there at once */
    int failed = (int)syscall(SYS_munmap, address, bytes);
    pthread_mutex_unlock(&lock);
    return failed;
}

/* ---- control, called through ctypes by port_agent.malloc --------------------------------------------------------- */

/* Close what was noted for writing, and return how many bytes those are. */
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

/* The lock is not taken ahead of a fork: the allocator unmaps with locks of its own held, which its own handler waits for.
 * Whatever another thread was noting is not there in the child, whose code stays as it is. */
static void forked(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    count = 0;
}

__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forked); }
