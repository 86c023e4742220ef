/* Blocks that come on access, by two mechanisms: SIGSEGV on protected pages, as the guard does it, and userfaultfd(2).
 *
 * Prints a line each: mechanism, nanoseconds per block, whether read(2) by a raw system call into such a block succeeds. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BLOCK ((size_t)256 << 10)
#define BLOCKS 256
#define KERNEL_READS 1

static char *area_, *source_, *frames_; /* frames: pages of blocks that were evicted, which the guard moves and never zeroes */
static size_t taken_;
static int uffd_;

static double now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static _Noreturn void fail(const char *what) {
    perror(what);
    exit(1);
}

static char *block_at(uintptr_t address) { return area_ + (address - (uintptr_t)area_) / BLOCK * BLOCK; }

/* Fill pages elsewhere and move them in, so that no other thread sees them half filled. */
static void on_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    char *block = block_at((uintptr_t)info->si_addr), *frame = frames_ + BLOCK * taken_++;
    memcpy(frame, source_, BLOCK);
    if (mremap(frame, BLOCK, BLOCK, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, block) != block)
        _exit(1);
}

static void *serve(void *nothing) {
    struct uffd_msg message;
    while (read(uffd_, &message, sizeof message) == sizeof message) {
        struct uffdio_copy copy = {.dst = (uintptr_t)block_at(message.arg.pagefault.address), .src = (uintptr_t)source_, .len = BLOCK};
        if (ioctl(uffd_, UFFDIO_COPY, &copy))
            fail("UFFDIO_COPY");
    }
    return nothing;
}

static void measure(const char *mechanism) {
    int file = open("/dev/zero", O_RDONLY);
    const char *served = syscall(SYS_read, file, area_, 1) == 1 ? "yes" : "no";
    double begin = now_ns();
    unsigned sum = 0;
    for (size_t i = KERNEL_READS; i < BLOCKS; i++)
        sum += (unsigned char)area_[i * BLOCK];
    double each = (now_ns() - begin) / (BLOCKS - KERNEL_READS);
    if (sum != BLOCKS - KERNEL_READS)
        fail("contents");
    printf("%s %.0f %s\n", mechanism, each, served);
    close(file);
}

static char *map(size_t bytes, int protection) {
    char *address = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED)
        fail("mmap");
    return address;
}

int main(void) {
    source_ = map(BLOCK, PROT_READ | PROT_WRITE);
    memset(source_, 1, BLOCK);
    frames_ = map(BLOCK * BLOCKS, PROT_READ | PROT_WRITE);
    memset(frames_, 0, BLOCK * BLOCKS);
    area_ = map(BLOCK * BLOCKS, PROT_NONE);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    measure("sigsegv");

    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    uffd_ = device < 0 ? (int)syscall(SYS_userfaultfd, O_CLOEXEC) : ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC);
    if (uffd_ < 0)
        fail("userfaultfd");
    struct uffdio_api api = {.api = UFFD_API};
    if (ioctl(uffd_, UFFDIO_API, &api))
        fail("UFFDIO_API");
    area_ = map(BLOCK * BLOCKS, PROT_READ | PROT_WRITE);
    struct uffdio_register range = {.range = {(uintptr_t)area_, BLOCK * BLOCKS}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(uffd_, UFFDIO_REGISTER, &range))
        fail("UFFDIO_REGISTER");
    pthread_t thread;
    pthread_create(&thread, NULL, serve, NULL);
    measure("userfaultfd");
    return 0;
}
