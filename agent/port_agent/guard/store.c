/* The page file of guarded blocks: unnamed, allocated before it is used, with a checksum verified whenever a page comes
 * back.
 *
 * A forked child reads its parent's file and writes one of its own. While a child may read it, the parent overwrites
 * nothing that was there at the fork; an era ends with the last process that holds its pipe.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guard_internal.h"

#define MOST_FILES 8
#define GROWTH ((off_t)64 << 20)
#define MOST_ERAS 64
#define MOST_FILE_BYTES ((size_t)1 << 42)

struct hole {
    off_t offset;
    size_t bytes;
    uint64_t era;
};

static struct {
    int descriptor;
    dev_t device;
    ino_t inode;
} files_[MOST_FILES];
static uint64_t *sums_[MOST_FILES]; /* checksum of each chunk in a file, by the granule where it begins; 0: nothing was written */
static size_t sums_bytes_;          /* usable bytes of the newest table */
static int file_count_;
static char directory_[4096];
static bool direct_ = true;
static off_t used_, reserved_;
static size_t promised_;
static struct hole holes_[1 << 16]; /* freed places; those that do not fit here are lost until the process ends */
static uint32_t hole_count_;
static uint64_t era_ = 1;
static struct {
    uint64_t era;
    int pipe;
} readers_[MOST_ERAS];
static int reader_count_;
static int fork_pipe_[2] = {-1, -1};

/* The bytes of a block in a file: whole granules, so that each of its chunks has its own checksum. */
static size_t place_of(size_t bytes) { return (bytes + GRANULE - 1) & ~(GRANULE - 1); }

static bool is_still_open(int index) {
    struct stat found;
    return !fstat(files_[index].descriptor, &found) && found.st_dev == files_[index].device && found.st_ino == files_[index].inode;
}

/* Return the descriptor of a page file. A program may close all descriptors and open files of its own, which never
 * receive a page. */
static int own_file(int index, const struct block *block) {
    if (!is_still_open(index)) {
        errno = EBADF;
        guard_die("the program closed the page file, whose descriptor must stay open (os.closerange?)", block);
    }
    return files_[index].descriptor;
}

static bool open_file(int index) {
    int flags = O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL;
    int descriptor = direct_ ? (int)syscall(SYS_openat, AT_FDCWD, directory_, flags | O_DIRECT, 0600) : -1;
    if (descriptor < 0) {
        direct_ = false;
        descriptor = (int)syscall(SYS_openat, AT_FDCWD, directory_, flags, 0600);
    }
    if (descriptor >= 0 && descriptor < 64) { /* away from the small numbers that programs count on */
        int higher = fcntl(descriptor, F_DUPFD_CLOEXEC, 64);
        if (higher >= 0) {
            close(descriptor);
            descriptor = higher;
        }
    }
    struct stat made;
    if (descriptor < 0 || fstat(descriptor, &made))
        return false;
    files_[index].descriptor = descriptor;
    files_[index].device = made.st_dev;
    files_[index].inode = made.st_ino;
    return true;
}

int store_begin(const char *directory) {
    if (strlen(directory) >= sizeof directory_)
        return ENAMETOOLONG;
    strcpy(directory_, directory);
    direct_ = true;
    int own = file_count_ ? file_count_ - 1 : 0;
    if (!open_file(own))
        return errno;
    if (!sums_[own])
        sums_[own] = arena_reserve(MOST_FILE_BYTES / GRANULE * sizeof **sums_);
    if (!sums_[own])
        return errno;
    file_count_ = own + 1;
    return store_reserve(0) ? 0 : errno;
}

void store_end(void) {
    if (is_still_open(file_count_ - 1))
        close(files_[file_count_ - 1].descriptor);
    hole_count_ = 0;
    used_ = reserved_ = 0;
    promised_ = 0;
}

uint64_t store_bytes(void) { return (uint64_t)reserved_; }

static bool grow_file(off_t bytes) {
    int own = file_count_ - 1;
    if ((size_t)bytes > MOST_FILE_BYTES || !arena_grow(sums_[own], &sums_bytes_, (size_t)bytes / GRANULE * sizeof **sums_))
        return false;
    if (fallocate(own_file(own, NULL), 0, 0, bytes) && errno != EOPNOTSUPP)
        return false;
    reserved_ = bytes;
    return true;
}

/* The file is never smaller than all blocks in use plus the freed places: a full medium shows when a block is allocated. */
bool store_reserve(size_t bytes) {
    size_t more = place_of(bytes);
    promised_ += more;
    off_t held = 0;
    for (uint32_t i = 0; i < hole_count_; i++)
        held += (off_t)holes_[i].bytes;
    off_t wanted = (off_t)promised_ + held;
    if (wanted < used_ + (off_t)more)
        wanted = used_ + (off_t)more;
    if (wanted <= reserved_ || grow_file(wanted + GROWTH) || grow_file(wanted))
        return true;
    promised_ -= more;
    return false;
}

void store_forgo(size_t bytes) { promised_ -= place_of(bytes); }

static bool may_be_read_by_a_child(uint64_t era) {
    int kept = 0;
    bool read = false;
    for (int i = 0; i < reader_count_; i++) {
        struct pollfd ended = {.fd = readers_[i].pipe, .events = 0};
        if (poll(&ended, 1, 0) == 1 && ended.revents & (POLLHUP | POLLERR)) {
            close(readers_[i].pipe);
            continue;
        }
        read = read || era <= readers_[i].era;
        readers_[kept++] = readers_[i];
    }
    reader_count_ = kept;
    return read;
}

/* Find a freed place: the smallest that fits. */
static bool take_hole(struct block *block) {
    size_t bytes = place_of(block->bytes);
    struct hole *best = NULL;
    for (uint32_t i = 0; i < hole_count_; i++)
        if (holes_[i].bytes >= bytes && (!best || holes_[i].bytes < best->bytes) && !may_be_read_by_a_child(holes_[i].era)) {
            best = &holes_[i];
            if (best->bytes == bytes)
                break;
        }
    if (!best)
        return false;
    block->offset = best->offset;
    best->offset += (off_t)bytes;
    best->bytes -= bytes;
    if (!best->bytes)
        memmove(best, best + 1, (size_t)(&holes_[--hole_count_] - best) * sizeof *best);
    return true;
}

/* Keep freed places sorted by position, with neighbours merged. */
static void give_hole(struct hole hole) {
    uint32_t low = 0, high = hole_count_;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (holes_[middle].offset < hole.offset)
            low = middle + 1;
        else
            high = middle;
    }
    struct hole *before = low ? &holes_[low - 1] : NULL, *after = low < hole_count_ ? &holes_[low] : NULL;
    if (before && before->offset + (off_t)before->bytes == hole.offset && before->era == hole.era) {
        before->bytes += hole.bytes;
        if (after && before->offset + (off_t)before->bytes == after->offset && after->era == hole.era) {
            before->bytes += after->bytes;
            memmove(after, after + 1, (size_t)(&holes_[--hole_count_] - after) * sizeof *after);
        }
    } else if (after && hole.offset + (off_t)hole.bytes == after->offset && after->era == hole.era) {
        after->offset = hole.offset;
        after->bytes += hole.bytes;
    } else if (hole_count_ < sizeof holes_ / sizeof *holes_) {
        memmove(&holes_[low + 1], &holes_[low], (hole_count_++ - low) * sizeof *holes_);
        holes_[low] = hole;
    }
}

static bool is_own(const struct block *block) { return block->offset >= 0 && block->file == (uint8_t)(file_count_ - 1); }

static bool may_overwrite(const struct block *block) {
    return is_own(block) && !(block->era < era_ && may_be_read_by_a_child(block->era));
}

static uint64_t *sum_at(const struct block *block, size_t start) {
    return &sums_[block->file][((size_t)block->offset + start) / GRANULE];
}

bool store_may_write(const struct block *block, size_t start, size_t bytes) {
    if (!is_own(block))
        return false;
    bool empty = true;
    for (size_t done = 0; done < bytes; done += CHUNK)
        empty = empty && !*sum_at(block, start + done);
    return empty || may_overwrite(block);
}

/* Give a block a place in the file: a different one if a child may still read the old one. */
bool store_take(struct block *block) {
    if (may_overwrite(block))
        return true;
    store_release(block);
    block->file = (uint8_t)(file_count_ - 1);
    block->era = era_;
    if (take_hole(block))
        return true;
    off_t end = used_ + (off_t)place_of(block->bytes);
    if (end > reserved_ && !grow_file(end))
        return false;
    block->offset = used_;
    used_ = end;
    return true;
}

void store_release(struct block *block) {
    if (block->offset >= 0 && block->file == file_count_ - 1)
        give_hole((struct hole){block->offset, place_of(block->bytes), block->era});
    block->offset = -1;
}

#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define WIDEST
#endif

typedef uint64_t lanes __attribute__((vector_size(32)));

/* Each word is mixed and multiplied by an odd number that depends on its position. So the sum changes if a word
 * differs, or if two are swapped. Runs at the speed of memory with AVX2. `data` is page-aligned, and `bytes` are
 * whole pages. */
WIDEST static uint64_t checksum_of(const void *data, size_t bytes) {
    const lanes *word = data;
    lanes sums[2] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    lanes odd[2] = {{0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u},
                    {0x27D4EB2F165667C5u, 0x61C8864E7A143579u, 0xB8FE6C3923A44BBFu, 0x7C01812CF721AD1Du}};
    const lanes even = {0xDED46DE9839097DAu, 0x7240A4A4B7B3671Eu, 0xCB79E64ECCC0E57Au, 0x92D6EB4D1A4E3C36u};
    for (size_t i = 0; i < bytes / sizeof *word; i += 2)
        for (int k = 0; k < 2; k++) {
            lanes mixed = word[i + k] ^ word[i + k] >> 32;
            sums[k] += mixed * odd[k];
            odd[k] += even;
        }
    uint64_t sum = 0;
    for (int k = 0; k < 2; k++)
        for (int lane = 0; lane < 4; lane++)
            sum = (sum << 9 | sum >> 55) ^ sums[k][lane];
    return sum ? sum : 1;
}

static void transfer_all(const struct block *block, size_t start, uintptr_t address, size_t bytes, bool write) {
    int file = own_file(block->file, block);
    off_t offset = block->offset + (off_t)start;
    for (size_t done = 0; done < bytes;) {
        ssize_t part = syscall(write ? SYS_pwrite64 : SYS_pread64, file, address + done, bytes - done, offset + (off_t)done);
        if (part > 0) {
            done += (size_t)part;
        } else if (part == 0) {
            errno = EIO;
            guard_die("the page file ended early", block);
        } else if (errno == EINVAL && direct_) {
            direct_ = false; /* the medium does not support direct transfers after all */
            for (int i = 0; i < file_count_; i++)
                fcntl(own_file(i, block), F_SETFL, fcntl(files_[i].descriptor, F_GETFL) & ~O_DIRECT);
        } else if (errno != EINTR) {
            guard_die(write ? "a page could not be written" : "a page could not be read", block);
        }
    }
    if (!direct_ && write)
        posix_fadvise(file, offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

void store_empty(struct block *block) {
    for (size_t done = 0; done < block->bytes; done += CHUNK)
        *sum_at(block, done) = 0;
}

/* Whole pages are transferred; anything unaligned, or ending within a page, goes through a separate buffer. */
static void *bounce_for(uintptr_t address, size_t bytes, const struct block *block) {
    if (!((address | bytes) & (guard_page - 1)))
        return NULL;
    void *buffer = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        guard_die("the kernel gave no memory", block);
    return buffer;
}

static size_t whole_pages(size_t bytes) { return (bytes + guard_page - 1) & ~(guard_page - 1); }

void store_write(struct block *block, size_t start, uintptr_t source, size_t bytes) {
    void *bounce = bounce_for(source, bytes, block);
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t part = bytes - done < CHUNK ? bytes - done : CHUNK;
        const void *from = (void *)(source + done);
        if (bounce)
            from = memcpy(bounce, from, part);
        *sum_at(block, start + done) = checksum_of(from, whole_pages(part));
        if (bounce)
            transfer_all(block, start + done, (uintptr_t)bounce, whole_pages(part), true);
    }
    if (bounce)
        munmap(bounce, CHUNK);
    else
        transfer_all(block, start, source, bytes, true);
}

void store_read(struct block *block, size_t start, uintptr_t target, size_t bytes) {
    void *bounce = bounce_for(target, bytes, block);
    if (!bounce)
        transfer_all(block, start, target, bytes, false);
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t part = bytes - done < CHUNK ? bytes - done : CHUNK;
        void *to = (void *)(target + done);
        if (bounce)
            transfer_all(block, start + done, (uintptr_t)bounce, whole_pages(part), false);
        if (checksum_of(bounce ? bounce : to, whole_pages(part)) != *sum_at(block, start + done)) {
            errno = EIO;
            guard_die("a page came back from the medium with other bytes than were written", block);
        }
        if (bounce)
            memcpy(to, bounce, part);
    }
    if (bounce)
        munmap(bounce, CHUNK);
}

void store_before_fork(void) {
    if (reader_count_ == MOST_ERAS || pipe2(fork_pipe_, O_CLOEXEC))
        fork_pipe_[0] = fork_pipe_[1] = -1;
}

void store_after_fork(void) {
    if (fork_pipe_[1] < 0) {
        /* the end of this child will not be noticed, so the present contents of the file are never overwritten */
        readers_[reader_count_ < MOST_ERAS ? reader_count_++ : MOST_ERAS - 1].era = era_++;
        readers_[reader_count_ - 1].pipe = -1;
        return;
    }
    close(fork_pipe_[1]);
    readers_[reader_count_].era = era_++;
    readers_[reader_count_++].pipe = fork_pipe_[0];
}

void store_in_child(void) {
    if (fork_pipe_[0] >= 0)
        close(fork_pipe_[0]); /* the other end stays open for as long as this process lives */
    for (int i = 0; i < reader_count_; i++)
        if (readers_[i].pipe >= 0)
            close(readers_[i].pipe);
    reader_count_ = 0;
    hole_count_ = 0;
    used_ = reserved_ = 0;
    promised_ = 0;
    if (file_count_ == MOST_FILES)
        guard_die("too many generations of forked processes", NULL);
    bool opened = open_file(file_count_);
    sums_[file_count_] = arena_reserve(MOST_FILE_BYTES / GRANULE * sizeof **sums_);
    sums_bytes_ = 0;
    if (!opened || !sums_[file_count_])
        guard_die("a forked process could not open its page file", NULL);
    file_count_++;
}
