/* System calls with a buffer: the kernel does not fault for the program, so what it is handed is brought, and stays until it is done. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "guard.h"

#undef fread_unlocked /* macros of <stdio.h> where the compiler optimises */
#undef fwrite_unlocked

#define EXPORT __attribute__((visibility("default")))

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
    EXPORT type name parameters {                                       \
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
    EXPORT type name parameters {                                            \
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

/* What _FORTIFY_SOURCE makes of them: the size of the buffer, as far as the compiler knew it, comes along. */
CALL(ssize_t, __read_chk, (int file, void *to, size_t bytes, size_t known), (file, to, bytes, known), to, bytes, true)
CALL(ssize_t, __pread_chk, (int file, void *to, size_t bytes, off_t at, size_t known), (file, to, bytes, at, known), to, bytes, true)
CALL(ssize_t, __pread64_chk, (int file, void *to, size_t bytes, off64_t at, size_t known), (file, to, bytes, at, known), to, bytes,
     true)
CALL(size_t, __fread_chk, (void *to, size_t known, size_t size, size_t count, FILE *file), (to, known, size, count, file), to,
     size *count, true)
CALL(ssize_t, __recv_chk, (int file, void *to, size_t bytes, size_t known, int flags), (file, to, bytes, known, flags), to, bytes,
     true)
