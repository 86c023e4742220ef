/* Programs that are started by a process inside a budget. The variables that put them inside it, too, are added to
 * their environment here. Our library in them removes these again before their code runs, so no program sees them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <alloca.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "processes.h"

#define EXPORT __attribute__((visibility("default")))

typedef char *const *words_t;
typedef int exec_function(const char *, words_t, words_t);
typedef int spawn_function(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, words_t, words_t);

static exec_function *real_execve_, *real_execvpe_;
static spawn_function *real_spawn_, *real_spawnp_;
static int (*real_fexecve_)(int, words_t, words_t);
static int (*real_execveat_)(int, const char *, words_t, words_t, int);
static int (*real_system_)(const char *);

void starts_begin(void) { /* now, because the first use may be in a child that shares its parent's memory */
    *(void **)&real_execve_ = dlsym(RTLD_NEXT, "execve");
    *(void **)&real_execvpe_ = dlsym(RTLD_NEXT, "execvpe");
    *(void **)&real_spawn_ = dlsym(RTLD_NEXT, "posix_spawn");
    *(void **)&real_spawnp_ = dlsym(RTLD_NEXT, "posix_spawnp");
    *(void **)&real_fexecve_ = dlsym(RTLD_NEXT, "fexecve");
    *(void **)&real_execveat_ = dlsym(RTLD_NEXT, "execveat");
    *(void **)&real_system_ = dlsym(RTLD_NEXT, "system");
}

/* ---- the environment ------------------------------------------------------------------------------------------------ */

static const char *value_of(words_t environment, const char *name) {
    size_t length = strlen(name);
    for (words_t entry = environment; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=')
            return *entry + length + 1;
    return NULL;
}

static size_t count_of(words_t environment) {
    size_t count = 0;
    while (environment && environment[count])
        count++;
    return count;
}

/* Return the length of an entry that puts `first` before the contents of a list; 0 if there is nothing to add. */
static size_t entry_bytes(words_t environment, const char *name, const char *first) {
    const char *value = value_of(environment, name);
    return *first ? strlen(name) + strlen(first) + (value ? strlen(value) : 0) + 3 : 0;
}

static void write_entry(char *entry, size_t bytes, words_t environment, const char *name, const char *first) {
    const char *value = value_of(environment, name);
    snprintf(entry, bytes, "%s=%s%s%s", name, first, value && *value ? ":" : "", value ? value : "");
}

/* Write the entries of `environment` to `with`, with `added` in place of those with the same name. */
static void merge(char **with, words_t environment, char *const added[3]) {
    for (words_t entry = environment; entry && *entry; entry++) {
        bool replaced = false;
        for (int i = 0; i < 3 && !replaced; i++)
            replaced = added[i] && !strncmp(*entry, added[i], (size_t)(strchr(added[i], '=') - added[i]) + 1);
        if (!replaced)
            *with++ = *entry;
    }
    for (int i = 0; i < 3; i++)
        if (added[i])
            *with++ = added[i];
    *with = NULL;
}

/* On the caller's stack: a child that shares its parent's memory may write nothing else. */
#define WITH_OURS(with, environment)                                                                       \
    const struct processes *all = processes_all();                                                         \
    size_t preload_bytes = entry_bytes(environment, "LD_PRELOAD", all->preload);                           \
    size_t library_bytes = entry_bytes(environment, "LD_LIBRARY_PATH", all->library_path);                 \
    size_t file_bytes = strlen(processes_file()) + sizeof PROCESSES_VARIABLE + 1;                          \
    char *added[3] = {alloca(file_bytes), preload_bytes ? alloca(preload_bytes) : NULL,                    \
                      library_bytes ? alloca(library_bytes) : NULL};                                       \
    snprintf(added[0], file_bytes, "%s=%s", PROCESSES_VARIABLE, processes_file());                         \
    if (preload_bytes)                                                                                     \
        write_entry(added[1], preload_bytes, environment, "LD_PRELOAD", all->preload);                     \
    if (library_bytes)                                                                                     \
        write_entry(added[2], library_bytes, environment, "LD_LIBRARY_PATH", all->library_path);           \
    char **with = alloca((count_of(environment) + 4) * sizeof *with);                                      \
    merge(with, environment, added)

/* ---- programs that take the place of this one ------------------------------------------------------------------------ */

static struct start_note note_replacement(words_t words) {
    if (processes_is_first())
        atomic_fetch_add(&processes_all()->replaced, 1);
    return processes_note_start((uint32_t)getpid(), words);
}

static int not_replaced(struct start_note note, int result) {
    int saved = errno;
    if (processes_is_first())
        atomic_fetch_sub(&processes_all()->replaced, 1);
    processes_undo_start(note);
    errno = saved;
    return result;
}

static int replace(exec_function *real, const char *program, words_t words, words_t environment) {
    if (!processes_all())
        return real(program, words, environment);
    WITH_OURS(with, environment);
    struct start_note note = note_replacement(words);
    return not_replaced(note, real(program, words, with));
}

EXPORT int execve(const char *path, words_t words, words_t environment) { return replace(real_execve_, path, words, environment); }

EXPORT int execv(const char *path, words_t words) { return replace(real_execve_, path, words, environ); }

EXPORT int execvpe(const char *file, words_t words, words_t environment) { return replace(real_execvpe_, file, words, environment); }

EXPORT int execvp(const char *file, words_t words) { return replace(real_execvpe_, file, words, environ); }

EXPORT int fexecve(int file, words_t words, words_t environment) {
    if (!processes_all())
        return real_fexecve_(file, words, environment);
    WITH_OURS(with, environment);
    struct start_note note = note_replacement(words);
    return not_replaced(note, real_fexecve_(file, words, with));
}

EXPORT int execveat(int directory, const char *path, words_t words, words_t environment, int flags) {
    if (!processes_all())
        return real_execveat_(directory, path, words, environment, flags);
    WITH_OURS(with, environment);
    struct start_note note = note_replacement(words);
    return not_replaced(note, real_execveat_(directory, path, words, with, flags));
}

/* Collect the words of a variadic call, up to a NULL. */
#define LISTED(words, first, arguments)                              \
    va_list arguments, counted;                                      \
    va_start(arguments, first);                                      \
    va_copy(counted, arguments);                                     \
    size_t count = 1;                                                \
    while (va_arg(counted, char *))                                  \
        count++;                                                     \
    va_end(counted);                                                 \
    char **words = alloca((count + 1) * sizeof *words);              \
    words[0] = (char *)first;                                        \
    for (size_t i = 1; i <= count; i++)                              \
        words[i] = va_arg(arguments, char *)

EXPORT int execl(const char *path, const char *first, ...) {
    LISTED(words, first, arguments);
    va_end(arguments);
    return replace(real_execve_, path, words, environ);
}

EXPORT int execlp(const char *file, const char *first, ...) {
    LISTED(words, first, arguments);
    va_end(arguments);
    return replace(real_execvpe_, file, words, environ);
}

EXPORT int execle(const char *path, const char *first, ...) {
    LISTED(words, first, arguments);
    words_t environment = va_arg(arguments, words_t);
    va_end(arguments);
    return replace(real_execve_, path, words, environment);
}

/* ---- programs in new processes ---------------------------------------------------------------------------------------- */

static int spawn(spawn_function *real, pid_t *pid, const char *program, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, words_t words, words_t environment) {
    if (!processes_all())
        return real(pid, program, actions, attributes, words, environment);
    WITH_OURS(with, environment);
    pid_t started;
    int error = real(&started, program, actions, attributes, words, with);
    if (!error) {
        processes_note_spawned((uint32_t)started, words);
        if (pid)
            *pid = started;
    }
    return error;
}

EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                       words_t words, words_t environment) {
    return spawn(real_spawn_, pid, path, actions, attributes, words, environment);
}

EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                        words_t words, words_t environment) {
    return spawn(real_spawnp_, pid, file, actions, attributes, words, environment);
}

static int status_of(pid_t pid) {
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

void starts_run(char **words) {
    pid_t pid;
    if (!real_spawn_(&pid, words[0], NULL, NULL, words, environ))
        status_of(pid);
}

/* glibc's own version starts the shell without posix_spawn. As in POSIX: while waiting for the command, the caller
 * ignores Ctrl-C, which is meant for the command. */
EXPORT int system(const char *command) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static int waiting;
    static struct sigaction interrupt, quit;
    if (!command || !processes_all())
        return real_system_(command);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigset_t child, before, defaults;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigemptyset(&defaults);
    pthread_mutex_lock(&mutex);
    if (!waiting++) {
        sigaction(SIGINT, &ignore, &interrupt);
        sigaction(SIGQUIT, &ignore, &quit);
    }
    if (interrupt.sa_handler != SIG_IGN)
        sigaddset(&defaults, SIGINT);
    if (quit.sa_handler != SIG_IGN)
        sigaddset(&defaults, SIGQUIT);
    pthread_mutex_unlock(&mutex);
    pthread_sigmask(SIG_BLOCK, &child, &before);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &before);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    char *const words[] = {"sh", "-c", (char *)command, NULL};
    pid_t pid;
    int error = spawn(real_spawn_, &pid, "/bin/sh", NULL, &attributes, words, environ);
    int status = error ? 127 << 8 : status_of(pid);
    posix_spawnattr_destroy(&attributes);
    pthread_mutex_lock(&mutex);
    if (!--waiting) {
        sigaction(SIGINT, &interrupt, NULL);
        sigaction(SIGQUIT, &quit, NULL);
    }
    pthread_mutex_unlock(&mutex);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return status;
}
