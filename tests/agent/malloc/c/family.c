/* Checks of the malloc family as a program sees it; run with the allocator preloaded. One check per run, named by the
 * first argument: exit status 0 is a pass, anything else prints the failed condition. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "line %d: %s is false (errno %d)\n", __LINE__, #condition, errno); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* Hidden from the optimiser, which knows malloc and would remove pairs of calls or argue about their sizes. */
static void *(*volatile do_malloc)(size_t) = malloc;
static void *(*volatile do_calloc)(size_t, size_t) = calloc;
static void *(*volatile do_realloc)(void *, size_t) = realloc;
static void *(*volatile do_reallocarray)(void *, size_t, size_t) = reallocarray;
static void (*volatile do_free)(void *) = free;
static int (*volatile do_posix_memalign)(void **, size_t, size_t) = posix_memalign;

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

static void fill(unsigned char *data, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)((i * 31u + (i >> 12) + seed) & 255u);
}

static bool holds(const unsigned char *data, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++)
        if (data[i] != (unsigned char)((i * 31u + (i >> 12) + seed) & 255u))
            return false;
    return true;
}

static const size_t SIZES[] = {1, 1000, 65535, 65536, 65537, 69632, 200000, 1048576, 5000000};

static void alignments(void) {
    for (int round = 0; round < 2; round++) { /* the second one meets cached blocks */
        for (size_t alignment = sizeof(void *); alignment <= 2 * MIB; alignment *= 2) {
            for (size_t i = 0; i < COUNT(SIZES); i++) {
                void *p[3] = {NULL, aligned_alloc(alignment, SIZES[i]), memalign(alignment, SIZES[i])};
                CHECK(do_posix_memalign(&p[0], alignment, SIZES[i]) == 0);
                for (int k = 0; k < 3; k++) {
                    CHECK(p[k] && (uintptr_t)p[k] % alignment == 0);
                    CHECK(malloc_usable_size(p[k]) >= SIZES[i]);
                    fill(p[k], malloc_usable_size(p[k]), (unsigned)k);
                }
                for (int k = 0; k < 3; k++) {
                    CHECK(holds(p[k], malloc_usable_size(p[k]), (unsigned)k));
                    do_free(p[k]);
                }
            }
        }
    }
    size_t page = (size_t)getpagesize();
    void *p = valloc(100000), *q = pvalloc(70001);
    CHECK((uintptr_t)p % page == 0 && (uintptr_t)q % page == 0 && malloc_usable_size(q) % page == 0);
    do_free(p);
    do_free(q);
}

static void errors(void) {
    void *p = (void *)1;
    CHECK(do_posix_memalign(&p, 3, 100) == EINVAL && p == (void *)1);
    CHECK(do_posix_memalign(&p, 4, 100000) == EINVAL && p == (void *)1);
    CHECK(do_posix_memalign(&p, 0, 100000) == EINVAL && p == (void *)1);
    static const size_t impossible[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - 4096, (size_t)PTRDIFF_MAX + 1, PTRDIFF_MAX};
    char *kept = do_malloc(MIB);
    fill((unsigned char *)kept, MIB, 7);
    for (size_t i = 0; i < COUNT(impossible); i++) {
        errno = 0;
        CHECK(!do_malloc(impossible[i]) && errno == ENOMEM);
        errno = 0;
        CHECK(!do_realloc(kept, impossible[i]) && errno == ENOMEM);
        CHECK(do_posix_memalign(&p, 4096, impossible[i]) == ENOMEM && p == (void *)1);
    }
    errno = 0;
    CHECK(!do_calloc(SIZE_MAX / 2, 3) && errno == ENOMEM);
    errno = 0;
    CHECK(!do_reallocarray(kept, SIZE_MAX / 2, 3) && errno == ENOMEM);
    CHECK(holds((unsigned char *)kept, MIB, 7));
    errno = 123;
    do_free(kept);
    void *small = do_malloc(10), *large = do_malloc(MIB);
    do_free(small);
    do_free(large);
    do_free(NULL);
    CHECK(errno == 123);
    CHECK(malloc_usable_size(NULL) == 0);
    CHECK(do_realloc(do_malloc(MIB), 0) == NULL);
    void *empty = do_malloc(0);
    CHECK(empty);
    do_free(empty);
}

static void resizing(void) {
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < COUNT(SIZES); i++) {
            for (size_t j = 0; j < COUNT(SIZES); j++) {
                size_t common = SIZES[i] < SIZES[j] ? SIZES[i] : SIZES[j];
                unsigned char *p = do_realloc(NULL, SIZES[i]);
                CHECK(p);
                fill(p, SIZES[i], 3);
                p = do_realloc(p, SIZES[j]);
                CHECK(p && malloc_usable_size(p) >= SIZES[j] && holds(p, common, 3));
                fill(p, SIZES[j], 5);
                p = do_reallocarray(p, SIZES[i], 1);
                CHECK(p && holds(p, common, 5));
                do_free(p);
            }
        }
    }
    unsigned char *p = NULL; /* as a growing byte array does it */
    for (size_t bytes = 1000; bytes < 20 * MIB; bytes += bytes / 8) {
        p = do_realloc(p, bytes);
        CHECK(p);
        p[bytes - 1] = 9;
        fill(p, 1000, 11);
        CHECK(holds(p, 1000, 11));
    }
    do_free(p);
}

static void zeroes(void) {
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < COUNT(SIZES); i++) {
            unsigned char *p = do_calloc(SIZES[i], 1);
            CHECK(p);
            for (size_t k = 0; k < malloc_usable_size(p) && k < SIZES[i]; k++)
                CHECK(p[k] == 0);
            memset(p, 255, SIZES[i]);
            do_free(p);
        }
    }
}

/* A box where threads leave blocks for others to check and free. */
#define BOX 64
static _Atomic(unsigned char *) box[BOX];
static atomic_bool stop;

static void *exchange(void *argument) {
    uint32_t random = (uint32_t)(uintptr_t)argument;
    for (int i = 0; i < 4000 && !atomic_load(&stop); i++) {
        size_t bytes = 16 + (next_random(&random) >> 8) % (next_random(&random) & 1 ? 300 * KIB : 4 * KIB);
        unsigned char *p = i % 3 ? do_malloc(bytes) : do_calloc(1, bytes);
        CHECK(p);
        if (i % 5 == 0)
            p = do_realloc(p, bytes = bytes / 2 + 16);
        CHECK(p);
        memcpy(p, &bytes, sizeof bytes);
        p[bytes - 1] = (unsigned char)bytes;
        p = atomic_exchange(&box[(next_random(&random) >> 8) % BOX], p);
        if (p) {
            memcpy(&bytes, p, sizeof bytes);
            CHECK(p[bytes - 1] == (unsigned char)bytes || bytes <= 8);
            do_free(p);
        }
    }
    return NULL;
}

static void start_threads(pthread_t *threads, size_t count) {
    for (size_t i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, exchange, (void *)(i * 7919 + 1)) == 0);
}

static void join_threads(pthread_t *threads, size_t count) {
    for (size_t i = 0; i < count; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (size_t i = 0; i < BOX; i++)
        do_free(atomic_exchange(&box[i], NULL));
}

static void threads(void) {
    pthread_t group[8];
    start_threads(group, COUNT(group));
    join_threads(group, COUNT(group));
}

static void forking(void) {
    pthread_t group[4];
    alarm(120); /* a child or parent that hangs on a lock fails the check */
    start_threads(group, COUNT(group));
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(60);
            for (int k = 0; k < 20; k++) {
                unsigned char *small = do_malloc(100), *large = do_calloc(1, 100 * KIB);
                CHECK(small && large && large[99 * KIB] == 0);
                large = do_realloc(large, 300 * KIB);
                CHECK(large);
                fill(large, 300 * KIB, 1);
                do_free(small);
                do_free(large);
            }
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&stop, true);
    join_threads(group, COUNT(group));
}

static void double_free(void) {
    void *p = do_malloc(MIB);
    do_free(p);
    do_free(p); /* aborts with a message */
}

static size_t data_bytes(void) {
    unsigned long pages, ignored, data;
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm && fscanf(statm, "%lu %lu %lu %lu %lu %lu", &pages, &ignored, &ignored, &ignored, &ignored, &data) == 6);
    fclose(statm);
    return data * (size_t)getpagesize();
}

/* The kernel's limit on data counts the cache as well: it has to give way, to blocks and to small requests. */
static void data_limit(void) {
    static void *cached[40], *small[32 << 10];
    for (size_t i = 0; i < COUNT(cached); i++)
        memset(cached[i] = do_malloc(MIB), 1, MIB);
    for (size_t i = 0; i < COUNT(cached); i++)
        do_free(cached[i]);
    struct rlimit limit;
    getrlimit(RLIMIT_DATA, &limit);
    limit.rlim_cur = data_bytes() + 4 * MIB;
    CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    unsigned char *large = do_malloc(36 * MIB); /* no cached block is that large, and 4 MiB are free */
    CHECK(large);
    fill(large, 36 * MIB, 2);
    do_free(large);
    large = do_malloc(2 * MIB); /* part of the cached one or fresh: either way it must not break the next lines */
    CHECK(large);
    for (size_t i = 0; i < COUNT(small); i++) /* 32 MiB in small pieces */
        CHECK((small[i] = do_malloc(1000)));
    errno = 0;
    CHECK(!do_malloc(200 * MIB) && errno == ENOMEM);
    CHECK(!do_realloc(large, 200 * MIB) && errno == ENOMEM);
    for (size_t i = 0; i < COUNT(small); i++)
        do_free(small[i]);
    do_free(large);
    large = do_malloc(MIB);
    CHECK(large);
    do_free(large);
}

/* More blocks at once than the first table and the first slabs hold. */
static void many(void) {
    static unsigned char *p[6000];
    for (size_t i = 0; i < COUNT(p); i++) {
        p[i] = do_malloc(64 * KIB + i % 3 * 4096);
        CHECK(p[i]);
        p[i][0] = (unsigned char)i;
        p[i][64 * KIB - 1] = (unsigned char)(i >> 8);
    }
    for (size_t step = 0; step < 2; step++)
        for (size_t i = step; i < COUNT(p); i += 2) {
            CHECK(p[i][0] == (unsigned char)i && p[i][64 * KIB - 1] == (unsigned char)(i >> 8));
            do_free(p[i]);
        }
}

static size_t soft_data_limit(void) {
    struct rlimit limit;
    return getrlimit(RLIMIT_DATA, &limit) ? 0 : (size_t)limit.rlim_cur;
}

static void await_data_limit(size_t least, size_t most) {
    while (soft_data_limit() < least || soft_data_limit() > most)
        usleep(1000);
}

/* Address space that is only reserved does not count against the kernel's limit on data; what is touched of it does. */
static void reserving(void) {
    void (*allow)(void);
    void *symbol = dlsym(RTLD_DEFAULT, "port_malloc_allow_reservations");
    CHECK(symbol);
    memcpy(&allow, &symbol, sizeof allow);
    allow();
    struct rlimit limit;
    getrlimit(RLIMIT_DATA, &limit);
    const size_t belt = limit.rlim_cur = data_bytes() + 100 * MIB;
    CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    alarm(120);
    const int reserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    for (int round = 0; round < 3; round++) {
        unsigned char *held = mmap(NULL, 1024 * MIB, PROT_READ | PROT_WRITE, reserved, -1, 0);
        CHECK(held != MAP_FAILED);
        await_data_limit(belt + 1020 * MIB, belt + 1024 * MIB);
        memset(held, 1, 64 * MIB);
        await_data_limit(belt + 950 * MIB, belt + 960 * MIB);
        CHECK(mmap(NULL, 400 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
        CHECK(errno == ENOMEM);
        munmap(held, 1024 * MIB);
        await_data_limit(belt, belt);
    }
}

static bool is_preloaded(void) { return dlsym(RTLD_DEFAULT, "port_malloc_version") != NULL; }

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    {"alignments", alignments}, {"errors", errors},           {"resizing", resizing},     {"zeroes", zeroes}, {"threads", threads},
    {"forking", forking},       {"double_free", double_free}, {"data_limit", data_limit}, {"many", many}, {"reserving", reserving},
};

int main(int count, char **arguments) {
    if (count == 2 && !is_preloaded())
        return 3;
    for (size_t i = 0; count == 2 && i < COUNT(CASES); i++)
        if (strcmp(arguments[1], CASES[i].name) == 0) {
            CASES[i].run();
            return 0;
        }
    for (size_t i = 0; i < COUNT(CASES); i++)
        puts(CASES[i].name);
    return count == 1 ? 0 : 2;
}
