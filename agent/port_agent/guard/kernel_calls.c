/* System calls with a buffer: kernel accesses do not fault into our handler, so buffers are brought in and stay until
 * the call is done. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "guard.h"
#include "guard_internal.h"

#undef fread_unlocked /* macros of <stdio.h> where the compiler optimises */
#undef fwrite_unlocked

static bool pin_all(const struct iovec *parts, int count, bool write) {
    bool any = false;
    for (int i = 0; i < count; i++)
        any |= guard_pin(parts[i].iov_base, parts[i].iov_len, write);
    return any;
}

static void unpin_all(const struct iovec *parts, int count) {
    for (int i = 0; i < count; i++)
        guard_unpin(parts[i].iov_base, parts[i].iov_len);
}

/* A call with one buffer. */
#define CALL(type, name, parameters, arguments, buffer, bytes, write)   \
    STANDS_IN type name parameters {                                       \
        static type(*real) parameters;                                  \
        if (!real)                                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                  \
        bool pinned = guard_active() && guard_pin(buffer, bytes, write); \
        type result = real arguments;                                   \
        if (pinned)                                                     \
            guard_unpin(buffer, bytes);                                 \
        return result;                                                  \
    }

/* A call with several. */
#define CALL_PARTS(type, name, parameters, arguments, parts, count, write)   \
    STANDS_IN type name parameters {                                            \
        static type(*real) parameters;                                       \
        if (!real)                                                           \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                       \
        bool pinned = guard_active() && pin_all(parts, (int)(count), write); \
        type result = real arguments;                                        \
        if (pinned)                                                          \
            unpin_all(parts, (int)(count));                                  \
        return result;                                                       \
    }

CALL(ssize_t, read, (int file, void *to, size_t bytes), (file, to, bytes), to, bytes, true)
CALL(ssize_t, pread, (int file, void *to, size_t bytes, off_t at), (file, to, bytes, at), to, bytes, true)
CALL(ssize_t, pread64, (int file, void *to, size_t bytes, off64_t at), (file, to, bytes, at), to, bytes, true)
CALL(ssize_t, write, (int file, const void *from, size_t bytes), (file, from, bytes), from, bytes, false)
CALL(ssize_t, pwrite, (int file, const void *from, size_t bytes, off_t at), (file, from, bytes, at), from, bytes, false)
CALL(ssize_t, pwrite64, (int file, const void *from, size_t bytes, off64_t at), (file, from, bytes, at), from, bytes, false)
CALL(size_t, fread, (void *to, size_t size, size_t count, FILE *file), (to, size, count, file), to, size *count, true)
CALL(size_t, fwrite, (const void *from, size_t size, size_t count, FILE *file), (from, size, count, file), from, size *count, false)
CALL(ssize_t, send, (int file, const void *from, size_t bytes, int flags), (file, from, bytes, flags), from, bytes, false)
CALL(ssize_t, recv, (int file, void *to, size_t bytes, int flags), (file, to, bytes, flags), to, bytes, true)
CALL(ssize_t, sendto, (int file, const void *from, size_t bytes, int flags, const struct sockaddr *address, socklen_t length),
     (file, from, bytes, flags, address, length), from, bytes, false)
CALL(ssize_t, recvfrom, (int file, void *to, size_t bytes, int flags, struct sockaddr *address, socklen_t *length),
     (file, to, bytes, flags, address, length), to, bytes, true)
CALL_PARTS(ssize_t, readv, (int file, const struct iovec *parts, int count), (file, parts, count), parts, count, true)
CALL_PARTS(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count), parts, count, false)
CALL_PARTS(ssize_t, preadv, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), parts, count, true)
CALL_PARTS(ssize_t, preadv64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at), parts, count, true)
CALL_PARTS(ssize_t, pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), parts, count, false)
CALL_PARTS(ssize_t, pwritev64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at), parts, count, false)
CALL_PARTS(ssize_t, sendmsg, (int file, const struct msghdr *message, int flags), (file, message, flags), message->msg_iov,
           message->msg_iovlen, false)
CALL_PARTS(ssize_t, recvmsg, (int file, struct msghdr *message, int flags), (file, message, flags), message->msg_iov,
           message->msg_iovlen, true)
CALL_PARTS(ssize_t, preadv2, (int file, const struct iovec *parts, int count, off_t at, int flags), (file, parts, count, at, flags),
           parts, count, true)
CALL_PARTS(ssize_t, preadv64v2, (int file, const struct iovec *parts, int count, off64_t at, int flags),
           (file, parts, count, at, flags), parts, count, true)
CALL_PARTS(ssize_t, pwritev2, (int file, const struct iovec *parts, int count, off_t at, int flags), (file, parts, count, at, flags),
           parts, count, false)
CALL_PARTS(ssize_t, pwritev64v2, (int file, const struct iovec *parts, int count, off64_t at, int flags),
           (file, parts, count, at, flags), parts, count, false)
CALL(ssize_t, getrandom, (void *to, size_t bytes, unsigned flags), (to, bytes, flags), to, bytes, true)
CALL(size_t, fread_unlocked, (void *to, size_t size, size_t count, FILE *file), (to, size, count, file), to, size *count, true)
CALL(size_t, fwrite_unlocked, (const void *from, size_t size, size_t count, FILE *file), (from, size, count, file), from,
     size *count, false)

/* Variants by _FORTIFY_SOURCE, with the size of the buffer as far as the compiler knew it. */
CALL(ssize_t, __read_chk, (int file, void *to, size_t bytes, size_t known), (file, to, bytes, known), to, bytes, true)
CALL(ssize_t, __pread_chk, (int file, void *to, size_t bytes, off_t at, size_t known), (file, to, bytes, at, known), to, bytes, true)
CALL(ssize_t, __pread64_chk, (int file, void *to, size_t bytes, off64_t at, size_t known), (file, to, bytes, at, known), to, bytes,
     true)
CALL(size_t, __fread_chk, (void *to, size_t known, size_t size, size_t count, FILE *file), (to, known, size, count, file), to,
     size *count, true)
CALL(ssize_t, __recv_chk, (int file, void *to, size_t bytes, size_t known, int flags), (file, to, bytes, known, flags), to, bytes,
     true)

/* ---- calls that keep their arguments, or take memory that cannot be seen from here
 * ------------------------------------ */

#define REMEDY "; hand it a copy instead, as bytes(...) or numpy.array(..., copy=True) make one"

/* Refuse to lend pages to the kernel: it reads them until a later notification, and they may belong to another block
 * by then. */
static void refuse_lending(const struct iovec *parts, size_t count, const char *what) {
    for (size_t i = 0; guard_active() && i < count; i++) {
        const struct block *block = guard_first_within(parts[i].iov_base, parts[i].iov_len);
        if (block) {
            errno = ENOTSUP;
            guard_die(what, block);
        }
    }
}

#define LOOKED_AT 16
#define TO_THE_END SIZE_MAX /* of an allocation, if the size that the kernel will touch is not known */

/* If the kernel refused memory of a block that an argument points to, report that and end the process. */
static void end_if_refused(long result, const void *handed, const char *what) {
    uintptr_t words[LOOKED_AT] = {0};
    struct iovec here = {words, sizeof words}, there = {(void *)handed, sizeof words};
    if (result != -1 || errno != EFAULT || !guard_active())
        return;
    syscall(SYS_process_vm_readv, getpid(), &here, 1, &there, 1, 0); /* the argument may not be an address */
    errno = EFAULT;
    for (int i = 0; i < LOOKED_AT; i++) {
        const struct block *block = guard_first_within((const void *)words[i], TO_THE_END);
        if (block)
            guard_die(what, block);
    }
}

#define ARGUMENTS 6

static void collect(long *arguments, va_list list) {
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i] = va_arg(list, long);
}

extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

STANDS_IN long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    long a[ARGUMENTS];
    va_list list;
    va_start(list, number);
    collect(a, list);
    va_end(list);
    const char *caller = __builtin_return_address(0);
    bool ours = caller >= __ehdr_start && caller < _end; /* these functions read and write pages */
    bool pinned[ARGUMENTS] = {false};
    for (int i = 0; !ours && i < ARGUMENTS; i++)
        pinned[i] = guard_pin((void *)a[i], TO_THE_END, true);
    long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    for (int i = 0; !ours && i < ARGUMENTS; i++)
        if (pinned[i])
            guard_unpin((void *)a[i], TO_THE_END);
    return result;
}

STANDS_IN int ioctl(int file, unsigned long request, ...) {
    static int (*real)(int, unsigned long, ...);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "ioctl");
    va_list list;
    va_start(list, request);
    void *handed = va_arg(list, void *);
    va_end(list);
    bool pinned = guard_pin(handed, TO_THE_END, true);
    int result = real(file, request, handed);
    if (pinned)
        guard_unpin(handed, TO_THE_END);
    end_if_refused(result, handed, "the kernel cannot reach a tensor whose address is inside of what ioctl is handed" REMEDY);
    return result;
}

CALL_PARTS(ssize_t, process_vm_readv,
           (pid_t pid, const struct iovec *parts, unsigned long count, const struct iovec *theirs, unsigned long their_count,
            unsigned long flags),
           (pid, parts, count, theirs, their_count, flags), parts, count, true)
CALL_PARTS(ssize_t, process_vm_writev,
           (pid_t pid, const struct iovec *parts, unsigned long count, const struct iovec *theirs, unsigned long their_count,
            unsigned long flags),
           (pid, parts, count, theirs, their_count, flags), parts, count, false)

STANDS_IN ssize_t vmsplice(int file, const struct iovec *parts, size_t count, unsigned flags) {
    static ssize_t (*real)(int, const struct iovec *, size_t, unsigned);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "vmsplice");
    refuse_lending(parts, count, "vmsplice lends memory to a pipe, and a tensor's cannot be lent" REMEDY);
    return real(file, parts, count, flags);
}

/* Fails as on kernels and sockets without the option, so that programs send copies. It would not be known for a long
 * time when lent memory is free again. */
STANDS_IN int setsockopt(int file, int level, int option, const void *value, socklen_t bytes) {
    static int (*real)(int, int, int, const void *, socklen_t);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "setsockopt");
    if (guard_active() && level == SOL_SOCKET && option == SO_ZEROCOPY) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return real(file, level, option, value, bytes);
}

static bool pin_messages(struct mmsghdr *messages, unsigned count, bool write) {
    bool any = false;
    for (unsigned i = 0; guard_active() && i < count; i++)
        any |= pin_all(messages[i].msg_hdr.msg_iov, (int)messages[i].msg_hdr.msg_iovlen, write);
    return any;
}

static void unpin_messages(struct mmsghdr *messages, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        unpin_all(messages[i].msg_hdr.msg_iov, (int)messages[i].msg_hdr.msg_iovlen);
}

/* A call with several messages of several parts each. */
#define CALL_MESSAGES(name, parameters, arguments, write)                   \
    STANDS_IN int name parameters {                                            \
        static int(*real) parameters;                                       \
        if (!real)                                                          \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                      \
        bool pinned = pin_messages(messages, count, write);                 \
        int result = real arguments;                                        \
        if (pinned)                                                         \
            unpin_messages(messages, count);                                \
        return result;                                                      \
    }

CALL_MESSAGES(sendmmsg, (int file, struct mmsghdr *messages, unsigned count, int flags), (file, messages, count, flags), false)
CALL_MESSAGES(recvmmsg, (int file, struct mmsghdr *messages, unsigned count, int flags, struct timespec *patience),
              (file, messages, count, flags, patience), true)
