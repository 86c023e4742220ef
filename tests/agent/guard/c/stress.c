/* Threads read, write, hand to the kernel, move, allocate and free guarded memory under a limit of a tenth of it, and pages of
 * a file that each has mapped, while another changes the limit, stops all and forks. Every word has a value that follows from its place and how often it was written; exit status 0: all
 * had it, and at the end nothing is held and no address is left open. Linked with the library's sources, with and without a sanitizer. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"
#include "guard_internal.h"

#define WORKERS 4
#define HELD 12
#define SMALLEST ((size_t)64 << 10)
#define FILE_BYTES ((size_t)3 << 20)
#define MEBIBYTE ((size_t)1 << 20)
#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
            abort();                                                         \
        }                                                                    \
    } while (0)

static atomic_int running;
static int rounds;
static int file_; /* of FILE_BYTES; each word is its place */
static size_t largest; /* from 54 MiB on, guarded memory has blocks of a huge page */

struct held {
    uint64_t *words;
    size_t bytes;
    uint64_t salt;
    uint32_t *writes; /* of each page of 4096 bytes, whose words all have the same */
};

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static uint64_t value(const struct held *held, size_t word) {
    return (held->salt + word) * 0x9E3779B97F4A7C15u + held->writes[word / 512];
}

static void write_page(struct held *held, size_t page) {
    held->writes[page]++;
    for (size_t word = page * 512; word < (page + 1) * 512; word++)
        held->words[word] = value(held, word);
}

static void check_page(const struct held *held, const uint64_t *words, size_t page) {
    for (size_t word = 0; word < 512; word++)
        CHECK(words[word] == value(held, page * 512 + word));
}

/* One in four starts away, and is written past its addresses. */
static void fill(struct held *held, uint32_t *random) {
    bool away = next_random(random) % 4 == 0;
    held->bytes = SMALLEST + next_random(random) % (largest - SMALLEST) / 4096 * 4096;
    guard_bear_away(away);
    uint64_t *own = guard_allocate(held->bytes), *made = own;
    guard_bear_away(false);
    held->writes = calloc(held->bytes / 4096, sizeof *held->writes);
    held->salt = (uint64_t)next_random(random) << 24;
    CHECK(own && held->writes && guard_usable(own) == held->bytes);
    if (away)
        CHECK(made = malloc(held->bytes));
    held->words = made;
    for (size_t page = 0; page < held->bytes / 4096; page++)
        write_page(held, page);
    held->words = own;
    if (away) {
        CHECK(guard_copy(own, 0, made, held->bytes, true));
        free(made);
    }
}

static void empty(struct held *held) {
    CHECK(guard_free(held->words));
    free(held->writes);
}

/* What the kernel reads, and what it writes. */
static void through_a_pipe(struct held *held, size_t page, const int *ends) {
    uint64_t there[512];
    char *address = (char *)held->words + page * 4096;
    CHECK(write(ends[1], address, 4096) == 4096 && read(ends[0], there, 4096) == 4096);
    check_page(held, there, page);
    write_page(held, page);
    memcpy(there, address, 4096);
    memset(address, 0, 4096);
    CHECK(write(ends[1], there, 4096) == 4096 && read(ends[0], address, 4096) == 4096);
}

/* A part is read and written without the rest, from and to another piece of guarded memory. */
static void in_parts(struct held *held, struct held *other, uint32_t *random) {
    size_t start = next_random(random) % (held->bytes / MEBIBYTE + 1) * MEBIBYTE;
    size_t bytes = held->bytes - start < MEBIBYTE ? held->bytes - start : MEBIBYTE;
    if (!bytes || other->bytes < bytes || other == held)
        return;
    CHECK(guard_copy(held->words, start, other->words, bytes, false));
    for (size_t page = 0; page < bytes / 4096; page++)
        check_page(held, other->words + page * 512, start / 4096 + page);
    for (size_t page = 0; page < bytes / 4096; page++) {
        held->writes[start / 4096 + page]++;
        for (size_t word = 0; word < 512; word++)
            other->words[page * 512 + word] = value(held, start / 8 + page * 512 + word);
    }
    CHECK(guard_copy(held->words, start, other->words, bytes, true));
    for (size_t page = 0; page < bytes / 4096; page++)
        write_page(other, page);
}

/* Given up and made again. */
static void again(struct held *held) {
    uint32_t writes;
    if (!guard_seal(held->words, &writes) || !guard_unwritten(held->words, writes) || !guard_drop(held->words, writes))
        return;
    uint64_t *made = guard_allocate(held->bytes);
    CHECK(made);
    for (size_t word = 0; word < held->bytes / 8; word++)
        made[word] = value(held, word);
    CHECK(guard_fill(held->words, made, held->bytes) && guard_free(made));
}

static void advise(struct held *held, uint32_t random) {
    const void *within = (char *)held->words + random % held->bytes;
    if (random % 3 == 0)
        guard_evict(within);
    else if (random % 3 == 1)
        CHECK(guard_bring(within));
    else
        guard_write_back(within);
}

static void map_file(struct held *mapped) {
    *mapped = (struct held){.bytes = FILE_BYTES, .writes = calloc(FILE_BYTES / 4096, sizeof *mapped->writes)};
    mapped->words = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_, 0);
    CHECK(mapped->words != MAP_FAILED && mapped->writes);
}

static void unmap_file(struct held *mapped) {
    CHECK(!munmap(mapped->words, FILE_BYTES));
    free(mapped->writes);
}

static uint64_t value_in_file(const struct held *mapped, size_t page, size_t word) { return page * 512 + word + mapped->writes[page]; }

static void check_in_file(const struct held *mapped, const uint64_t *words, size_t page) {
    for (size_t word = 0; word < 512; word++)
        CHECK(words[word] == value_in_file(mapped, page, word));
}

/* Write past the protection of pages, as a debugger does. */
static void write_as_debugger(struct held *mapped, size_t page) {
    uint64_t there[512], *words = mapped->words + page * 512;
    if (guard_watch(mapped->words, FILE_BYTES) != FILE_PAGES || !guard_pin(words, 4096, false))
        return;
    mapped->writes[page]++;
    for (size_t word = 0; word < 512; word++)
        there[word] = value_in_file(mapped, page, word);
    int memory = open("/proc/self/mem", O_RDWR);
    CHECK(memory >= 0 && pwrite(memory, there, 4096, (off_t)(uintptr_t)words) == 4096);
    close(memory);
    guard_unpin(words, 4096);
}

static void in_file(struct held *mapped, uint32_t *random, const int *ends) {
    size_t page = next_random(random) % (FILE_BYTES / 4096);
    uint64_t there[512], *words = mapped->words + page * 512;
    check_in_file(mapped, words, page);
    switch (next_random(random) % 8) {
    case 0:
        mapped->writes[page]++;
        for (size_t word = 0; word < 512; word++)
            words[word]++;
        break;
    case 1:
        write_as_debugger(mapped, page);
        break;
    case 2:
        CHECK(write(ends[1], words, 4096) == 4096 && read(ends[0], there, 4096) == 4096);
        check_in_file(mapped, there, page);
        break;
    case 3:
        CHECK(!mprotect(words, 4096, PROT_READ | PROT_WRITE));
        break;
    case 4:
        guard_take_from_file(words);
        break;
    case 5:
        unmap_file(mapped);
        map_file(mapped);
        break;
    default:
        guard_evict(words);
    }
    guard_watch(mapped->words, FILE_BYTES);
}

static void *work(void *seed) {
    uint32_t random = (uint32_t)(uintptr_t)seed;
    struct held all[HELD], mapped;
    int ends[2];
    CHECK(!pipe(ends));
    for (int i = 0; i < HELD; i++)
        fill(&all[i], &random);
    map_file(&mapped);
    for (int round = 0; round < rounds; round++) {
        struct held *held = &all[next_random(&random) % HELD];
        size_t page = next_random(&random) % (held->bytes / 4096);
        switch (next_random(&random) % 9) {
        case 0:
            empty(held);
            fill(held, &random);
            break;
        case 1:
            through_a_pipe(held, page, ends);
            break;
        case 2:
            in_parts(held, &all[next_random(&random) % HELD], &random);
            break;
        case 3:
            again(held);
            break;
        case 4:
            advise(held, next_random(&random));
            break;
        case 5:
            write_page(held, page);
            break;
        case 6:
            in_file(&mapped, &random, ends);
            break;
        default:
            check_page(held, held->words + page * 512, page);
        }
    }
    for (int i = 0; i < HELD; i++) {
        for (size_t page = 0; page < all[i].bytes / 4096; page++)
            check_page(&all[i], all[i].words + page * 512, page);
        empty(&all[i]);
    }
    for (size_t page = 0; page < FILE_BYTES / 4096; page++)
        check_in_file(&mapped, mapped.words + page * 512, page);
    unmap_file(&mapped);
    close(ends[0]);
    close(ends[1]);
    atomic_fetch_sub(&running, 1);
    return NULL;
}

/* What a forked child sees and writes is its own. */
static void fork_once(struct held *own) {
    pid_t child = fork();
    if (!child) {
        for (size_t page = 0; page < own->bytes / 4096; page++) {
            check_page(own, own->words + page * 512, page);
            write_page(own, page);
        }
        guard_evict(own->words);
        check_page(own, own->words, 0);
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    for (size_t page = 0; page < own->bytes / 4096; page++)
        check_page(own, own->words + page * 512, page);
}

/* The kernel's own list: no freed address can be read, where zeros would be found instead of a fault. */
static void check_all_closed(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], access[8];
    unsigned long begin;
    CHECK(maps);
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%*x %7s", &begin, access) == 2 && arena_holds((void *)begin))
            CHECK(!strncmp(access, "---", 3));
    fclose(maps);
}

static void make_file(const char *folder) {
    char name[4096];
    snprintf(name, sizeof name, "%s/mapped", folder);
    CHECK((file_ = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600)) >= 0);
    uint64_t part[512];
    for (uint64_t word = 0; word < FILE_BYTES / 8; word++) {
        part[word % 512] = word;
        if (word % 512 == 511)
            CHECK(write(file_, part, sizeof part) == sizeof part);
    }
}

int main(int count, char **words) {
    CHECK(count == 4 && (rounds = atoi(words[2])) > 0 && (largest = (size_t)atoi(words[3]) * MEBIBYTE) > 0);
    const size_t limit = WORKERS * HELD * largest / 2 / 10;
    make_file(words[1]);
    CHECK(!guard_begin(words[1], limit, SMALLEST));
    guard_set_process_limit(SIZE_MAX / 2); /* without one, files' pages are not counted, and stay */
    pthread_t threads[WORKERS];
    running = WORKERS;
    for (uintptr_t i = 0; i < WORKERS; i++)
        CHECK(!pthread_create(&threads[i], NULL, work, (void *)(i + 1)));
    struct held own;
    uint32_t random = 99;
    fill(&own, &random);
    for (int turn = 0; atomic_load(&running); turn++) {
        struct timespec moment = {0, 3000000};
        nanosleep(&moment, NULL);
        guard_tick();
        guard_set_limit(turn % 2 ? limit : limit / 2);
        if (turn % 16 == 3) {
            guard_pause();
            guard_resume();
        }
        if (turn % 64 == 7)
            fork_once(&own);
    }
    for (int i = 0; i < WORKERS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    empty(&own);
    guard_trim();
    struct guard_counters counters;
    guard_read_counters(&counters);
    CHECK(!counters.live_bytes && !counters.live_blocks && !counters.resident_bytes && !guard_held_bytes());
    check_all_closed();
    printf("%llu faults, %llu MiB written, %llu MiB at most\n", (unsigned long long)(counters.read_faults + counters.write_faults),
           (unsigned long long)(counters.written_bytes >> 20), (unsigned long long)(counters.peak_resident_bytes >> 20));
    return 0;
}
