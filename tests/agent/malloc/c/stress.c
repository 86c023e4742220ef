/* Threads hammer one block cache while another changes its limits and trims it; built with and without sanitizers, which
 * is why it is linked with block_cache.c instead of being preloaded. Exit status 0: every content check and the final
 * books were right. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mremap */
#endif
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block_cache.h"

#define WORKERS 6
#define HELD 24
#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition);       \
            abort();                                                              \
        }                                                                         \
    } while (0)

static struct block_cache cache = BLOCK_CACHE_INITIALIZER;
static atomic_int running;
static int rounds;

struct held {
    unsigned char *data;
    size_t bytes;
    unsigned char mark;
};

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

#ifdef REFUSE
/* Linked in place of the kernel's own (-Wl,--wrap): now and then a move is refused, before or after the target has been
 * unmapped, as the kernel does it, and access is not granted. */
void *__real_mremap(void *old, size_t old_bytes, size_t bytes, int flags, ...);
int __real_mprotect(void *address, size_t bytes, int access);
void *__wrap_mremap(void *old, size_t old_bytes, size_t bytes, int flags, void *target);
int __wrap_mprotect(void *address, size_t bytes, int access);
static atomic_uint moves, grants, refused;

void *__wrap_mremap(void *old, size_t old_bytes, size_t bytes, int flags, void *target) {
    if (!(flags & MREMAP_FIXED) || atomic_fetch_add(&moves, 1) % 150 != 149)
        return __real_mremap(old, old_bytes, bytes, flags, target);
    if (atomic_fetch_add(&refused, 1) % 2)
        munmap(target, bytes);
    errno = EFAULT;
    return MAP_FAILED;
}

int __wrap_mprotect(void *address, size_t bytes, int access) {
    if (atomic_fetch_add(&grants, 1) % 3 != 0)
        return __real_mprotect(address, bytes, access);
    errno = ENOMEM;
    return -1;
}
#endif

static void mark(struct held *held, unsigned char value) {
    held->mark = value;
    for (size_t i = 0; i < held->bytes; i += 4096)
        held->data[i] = value;
    held->data[held->bytes - 1] = value;
}

static void check(const struct held *held, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 4096)
        CHECK(held->data[i] == held->mark);
}

static void replace(struct held *held, uint32_t *random) {
    if (held->data) {
        check(held, held->bytes);
        CHECK(block_cache_free(&cache, held->data));
    }
    bool zeroed;
    size_t alignment = next_random(random) % 16 ? 1 : (size_t)4096 << next_random(random) % 6;
    held->bytes = 65536 + next_random(random) % 40 * 20000;
    held->data = block_cache_allocate(&cache, held->bytes, alignment, &zeroed);
    if (!held->data)
        return;
    CHECK((uintptr_t)held->data % alignment == 0);
    for (size_t i = 0; zeroed && i < held->bytes; i += 512)
        CHECK(held->data[i] == 0);
    mark(held, (unsigned char)next_random(random));
}

static void resize(struct held *held, uint32_t *random) {
    if (!held->data)
        return;
    size_t bytes = 65536 + next_random(random) % 40 * 20000;
    unsigned char *moved = block_cache_resize(&cache, held->data, bytes);
    if (!moved)
        return;
    held->data = moved;
    check(held, held->bytes < bytes ? held->bytes : bytes);
    held->bytes = bytes;
    mark(held, held->mark);
}

static void *work(void *argument) {
    uint32_t random = (uint32_t)(uintptr_t)argument;
    struct held held[HELD] = {0};
    for (int i = 0; i < rounds; i++) {
        struct held *one = &held[next_random(&random) % HELD];
        if (i % 4)
            replace(one, &random);
        else
            resize(one, &random);
        CHECK(block_cache_usable(&cache, one->data) >= (one->data ? one->bytes : 0));
        CHECK(!block_cache_free(&cache, (void *)4096) && !block_cache_free(&cache, &random));
    }
    for (size_t i = 0; i < HELD; i++)
        if (held[i].data)
            CHECK(block_cache_free(&cache, held[i].data));
    atomic_fetch_sub(&running, 1);
    return NULL;
}

#ifdef REFUSE
/* At a budget that is nearly full all the time most requests are assembled, after each rise with a fresh tail. */
static void *govern(void *argument) {
    uint32_t random = 99;
    for (; atomic_load(&running); usleep(500))
        block_cache_set_limit(&cache, (68 + next_random(&random) % 8) << 20);
    return argument;
}
#else
static void *govern(void *argument) {
    uint32_t random = 99;
    (void)argument;
    while (atomic_load(&running)) {
        struct block_cache_stats stats;
        block_cache_set_limit(&cache, next_random(&random) % 4 ? next_random(&random) * (size_t)4 : SIZE_MAX);
        block_cache_set_hard_limit(&cache, next_random(&random) % 4 ? SIZE_MAX : (size_t)40 << 20);
        block_cache_trim(&cache, next_random(&random));
        block_cache_reset_peak(&cache);
        block_cache_read(&cache, &stats);
        CHECK(stats.live_bytes + stats.cached_bytes <= stats.limit_bytes || stats.cached_bytes == 0);
        CHECK(stats.peak_live_bytes >= stats.live_bytes);
        CHECK(stats.peak_mapped_bytes >= stats.live_bytes + stats.cached_bytes);
    }
    return NULL;
}
#endif

int main(int count, char **arguments) {
    pthread_t workers[WORKERS], governor;
    rounds = count > 1 ? atoi(arguments[1]) : 2000;
    atomic_store(&running, WORKERS);
    CHECK(pthread_create(&governor, NULL, govern, NULL) == 0);
    for (size_t i = 0; i < WORKERS; i++)
        CHECK(pthread_create(&workers[i], NULL, work, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < WORKERS; i++)
        CHECK(pthread_join(workers[i], NULL) == 0);
    CHECK(pthread_join(governor, NULL) == 0);
    struct block_cache_stats stats;
    block_cache_trim(&cache, 0);
    block_cache_read(&cache, &stats);
    CHECK(stats.live_bytes == 0 && stats.live_blocks == 0 && stats.cached_bytes == 0 && stats.cached_blocks == 0);
    CHECK(stats.maps && stats.reuses && stats.splits && stats.assemblies && stats.moved_bytes && stats.evicted_bytes);
#ifdef REFUSE
    fprintf(stderr, "moves %u refused %u grants %u\n", atomic_load(&moves), atomic_load(&refused), atomic_load(&grants));
    CHECK(atomic_load(&refused) >= 4 && atomic_load(&grants) >= 1);
#endif
    printf("maps %llu reuses %llu splits %llu assemblies %llu refusals %llu\n", (unsigned long long)stats.maps,
           (unsigned long long)stats.reuses, (unsigned long long)stats.splits, (unsigned long long)stats.assemblies,
           (unsigned long long)stats.refusals);
    return 0;
}
