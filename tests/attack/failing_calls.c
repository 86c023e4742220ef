/* Preloaded into a process: the n-th system call that changes (or reads) a file below a directory fails.
   `failing_arm` says which one and how; error 0 stands for a write of half the bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[PATH_MAX];
static long calls, fail_at;
static int fault, stays;

void failing_arm(const char *directory, long at, int error, int stays_so)
{
    strncpy(watched, directory, sizeof watched - 1);
    calls = 0;
    fail_at = at;
    fault = error;
    stays = stays_so;
}

long failing_calls(void) { return calls; }

static int below(const char *path) { return watched[0] && !strncmp(path, watched, strlen(watched)); }

static int fd_below(int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = watched[0] ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(path);
}

static int at_below(int fd, const char *path) { return path[0] == '/' || fd == AT_FDCWD ? below(path) : fd_below(fd); }

static int due(void)
{
    long now = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    return fail_at && (now == fail_at || (stays && now > fail_at));
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define REFUSE do { errno = fault; return -1; } while (0)

#define WRITER(name, offset_declared, offset_passed)                                                \
    ssize_t name(int fd, const void *from, size_t count offset_declared)                            \
    {                                                                                               \
        if (fd_below(fd) && due()) {                                                                \
            if (fault)                                                                              \
                REFUSE;                                                                             \
            count = count > 1 ? count / 2 : count;                                                  \
        }                                                                                           \
        return REAL(name)(fd, from, count offset_passed);                                           \
    }
#define COMMA ,
WRITER(write, , )
WRITER(pwrite, COMMA off_t at, COMMA at)
WRITER(pwrite64, COMMA off64_t at, COMMA at)

#define READER(name, type, kind, count_type)                                                        \
    ssize_t name(int fd, type into, count_type count, kind at)                                      \
    {                                                                                               \
        if (fault == EIO && fd_below(fd) && due())                                                  \
            REFUSE;                                                                                 \
        return REAL(name)(fd, into, count, at);                                                     \
    }
READER(preadv, const struct iovec *, off_t, int)
READER(preadv64, const struct iovec *, off64_t, int)

#define ON_FD(name, declared, passed)                                                               \
    int name(int fd declared)                                                                       \
    {                                                                                               \
        if (fault && fd_below(fd) && due())                                                         \
            REFUSE;                                                                                 \
        return REAL(name)(fd passed);                                                               \
    }
ON_FD(fsync, , )
ON_FD(fdatasync, , )
ON_FD(ftruncate, COMMA off_t size, COMMA size)
ON_FD(ftruncate64, COMMA off64_t size, COMMA size)

#define ALLOCATE(name, kind)                                                                        \
    int name(int fd, kind at, kind count)                                                           \
    {                                                                                               \
        return fault && fd_below(fd) && due() ? fault : REAL(name)(fd, at, count);                  \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int rename(const char *from, const char *to)
{
    if (fault && below(from) && due())
        REFUSE;
    return REAL(rename)(from, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    if (fault && at_below(from_fd, from) && due())
        REFUSE;
    return REAL(renameat)(from_fd, from, to_fd, to);
}

int mkdir(const char *path, mode_t mode)
{
    if (fault && below(path) && due())
        REFUSE;
    return REAL(mkdir)(path, mode);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    if (fault && at_below(at, path) && due())
        REFUSE;
    return REAL(mkdirat)(at, path, mode);
}

int openat(int at, const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (fault && flags & O_CREAT && at_below(at, path) && due())
        REFUSE;
    return REAL(openat)(at, path, flags, mode);
}

#define OPENER(name)                                                                                \
    int name(const char *path, int flags, ...)                                                      \
    {                                                                                               \
        va_list rest;                                                                               \
        va_start(rest, flags);                                                                      \
        mode_t mode = va_arg(rest, mode_t);                                                         \
        va_end(rest);                                                                               \
        if (fault && flags & O_CREAT && below(path) && due())                                       \
            REFUSE;                                                                                 \
        return REAL(name)(path, flags, mode);                                                       \
    }
OPENER(open)
OPENER(open64)
