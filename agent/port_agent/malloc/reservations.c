/* Address space that a program reserves (anonymous, private, writable, MAP_NORESERVE) under RLIMIT_DATA.
 *
 * The kernel counts such a mapping in full against RLIMIT_DATA when it is made, touched or not (data_vm in mm/mmap.c).
 * mimalloc, which is part of pyarrow and others, reserves a gibibyte at once and uses little of it. So a refused
 * reservation is made anyway, and the soft limit is raised by those of its bytes that are not resident. A thread
 * updates that every 20 ms while there are reservations. If the process then touches more than its limit, it is killed,
 * as a memory cgroup would do.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_RESERVATIONS 64
#define LOOK_PAGES 16384 /* pages per call of mincore */
#define LOOK_NS 20000000L
#define WATCHER_STACK_BYTES ((size_t)512 << 10) /* includes the thread-local storage of libraries */
#define EXCESSIVE_LOOKS 2 /* a single look may see an excess while a mapping is being removed */

struct reservation {
    uintptr_t address;
    size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct reservation reservations[MOST_RESERVATIONS];
static size_t count;
static size_t widened; /* how far the soft limit is above the original one */
static bool allowed, watched;

/* Raise (or lower) the soft limit; the caller holds the lock. */
static bool widen(ptrdiff_t bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_DATA, &limit))
        return false;
    if (limit.rlim_cur == RLIM_INFINITY)
        return true;
    rlim_t wanted = limit.rlim_cur + (rlim_t)bytes;
    if (bytes < 0 && (rlim_t)-bytes > limit.rlim_cur)
        wanted = 0;
    if (limit.rlim_max != RLIM_INFINITY && wanted > limit.rlim_max)
        return false;
    limit.rlim_cur = wanted;
    return setrlimit(RLIMIT_DATA, &limit) == 0;
}

static size_t untouched_bytes(const struct reservation *reservation) {
    static unsigned char resident[LOOK_PAGES];
    size_t page = (size_t)getpagesize(), untouched = 0, step = LOOK_PAGES * page;
    for (size_t done = 0; done < reservation->bytes; done += step) {
        size_t bytes = reservation->bytes - done < step ? reservation->bytes - done : step;
        /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
        if (mincore((void *)(reservation->address + done), bytes, resident))
            continue; /* unmapped meanwhile: it no longer counts */
        for (size_t i = 0; i < (bytes + page - 1) / page; i++)
            untouched += resident[i] & 1 ? 0 : page;
    }
    return untouched;
}

/* Return data_vm, which RLIMIT_DATA bounds; 0 if it cannot be read. */
static size_t data_bytes(void) {
    static const char field[] = "\nVmData:";
    char text[4096];
    int status = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    if (status < 0)
        return 0;
    ssize_t length = read(status, text, sizeof text - 1);
    close(status);
    text[length > 0 ? length : 0] = '\0';
    const char *found = strstr(text, field);
    return found ? (size_t)strtoull(found + sizeof field - 1, NULL, 10) << 10 : 0;
}

static bool is_excessive(void) {
    struct rlimit limit;
    return !getrlimit(RLIMIT_DATA, &limit) && limit.rlim_cur != RLIM_INFINITY && data_bytes() > limit.rlim_cur;
}

static void die(void) {
    static const char message[] = "port-agent: the process touched more memory than its limit allows; it is killed\n";
    ssize_t ignored = write(STDERR_FILENO, message, sizeof message - 1);
    (void)ignored;
    kill(getpid(), SIGKILL);
}

/* Raise the limit by the bytes that are untouched now, and forget reservations that are fully touched; the caller
 * holds the lock. */
static void look(void) {
    size_t total = 0, kept = 0;
    for (size_t i = 0; i < count; i++) {
        size_t untouched = untouched_bytes(&reservations[i]);
        if (untouched)
            reservations[kept++] = reservations[i];
        total += untouched;
    }
    count = kept;
    if (total != widened && widen((ptrdiff_t)total - (ptrdiff_t)widened))
        widened = total;
}

static void *watch(void *unused) {
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    int excessive = 0;
    for (;;) {
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&lock);
        look();
        excessive = is_excessive() ? excessive + 1 : 0;
        if (excessive == EXCESSIVE_LOOKS)
            die();
        bool done = count == 0 && !excessive;
        watched = !done;
        pthread_mutex_unlock(&lock);
        if (done)
            return unused;
    }
}

static bool started_watcher(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_attr_init(&attributes))
        return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, WATCHER_STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's own threads handle its signals */
    bool started = pthread_create(&thread, &attributes, watch, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

static void *system_map(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

static bool is_reservation(int protection, int flags) {
    const int needed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return (flags & needed) == needed && !(flags & (MAP_FIXED | MAP_POPULATE | MAP_LOCKED)) && protection & PROT_WRITE;
}

/* Make a mapping that the limit refused; fails if there is another reason. The caller holds the lock. */
static void *reserve(void *address, size_t bytes, int protection, int flags) {
    size_t page = (size_t)getpagesize();
    if (!allowed || count == MOST_RESERVATIONS || bytes > PTRDIFF_MAX - page)
        return MAP_FAILED;
    size_t counted = (bytes + page - 1) / page * page;
    if (!widen((ptrdiff_t)counted))
        return MAP_FAILED;
    void *made = system_map(address, bytes, protection, flags, -1, 0);
    if (made == MAP_FAILED || (!watched && !(watched = started_watcher()))) {
        if (made != MAP_FAILED)
            munmap(made, bytes);
        widen(-(ptrdiff_t)counted);
        return MAP_FAILED;
    }
    reservations[count++] = (struct reservation){(uintptr_t)made, counted};
    widened += counted;
    return made;
}

#ifdef __LP64__ /* elsewhere SYS_mmap takes other arguments, and no library reserves so much */
EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *made = system_map(address, bytes, protection, flags, file, offset);
    if (made != MAP_FAILED || errno != ENOMEM || !is_reservation(protection, flags))
        return made;
    pthread_mutex_lock(&lock);
    made = reserve(address, bytes, protection, flags);
    pthread_mutex_unlock(&lock);
    if (made == MAP_FAILED)
        errno = ENOMEM;
    return made;
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(address, bytes, protection, flags, file, offset);
}
#endif

/* ---- control, called through ctypes by port_agent.malloc --------------------------------------------------------- */

EXPORT void port_malloc_allow_reservations(void) {
    pthread_mutex_lock(&lock);
    allowed = true;
    pthread_mutex_unlock(&lock);
}

EXPORT int port_malloc_widen_data_limit(ptrdiff_t bytes) {
    pthread_mutex_lock(&lock);
    bool done = widen(bytes);
    pthread_mutex_unlock(&lock);
    return done;
}

/* ---- fork: the child has no watcher, and asks for one with its next reservation --------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void in_child(void) {
    watched = false;
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void start(void) { pthread_atfork(before_fork, after_fork, in_child); }
