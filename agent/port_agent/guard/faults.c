/* Faults: which are ours, and what the program itself set up for the others. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include "guard_internal.h"

typedef int sigaction_function(int, const struct sigaction *, struct sigaction *);
typedef int mask_function(int, const sigset_t *, sigset_t *);

static struct sigaction theirs_; /* the program's own action for SIGSEGV */
static bool begun_;
static _Thread_local const sigset_t *outside_; /* the signals blocked where the thread faulted; NULL: it is not in a fault */

static void *next_symbol(const char *name) { return dlsym(RTLD_NEXT, name); }

static sigaction_function *real_sigaction(void) {
    static sigaction_function *real;
    if (!real)
        *(void **)&real = next_symbol("sigaction");
    return real;
}

static bool was_write(const ucontext_t *context, bool *known) {
#if defined(__x86_64__)
    *known = true;
    return context->uc_mcontext.gregs[REG_ERR] & 2;
#else
    (void)context;
    *known = false;
    return false;
#endif
}

static void pass_on(int number, siginfo_t *info, void *context) {
    struct sigaction action = theirs_;
    if (action.sa_flags & SA_RESETHAND)
        memset(&theirs_, 0, sizeof theirs_);
    if (action.sa_flags & SA_SIGINFO && action.sa_sigaction) {
        action.sa_sigaction(number, info, context);
    } else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) {
        action.sa_handler(number);
    } else {
        struct sigaction usual = {.sa_handler = SIG_DFL};
        real_sigaction()(SIGSEGV, &usual, NULL); /* the access faults again, and ends the process as it would have */
        if (info->si_code <= 0)
            raise(SIGSEGV);
    }
}

bool faults_let_user_in(sigset_t *inside) {
    static const int users[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP};
    sigset_t pending, let;
    if (!outside_ || sigpending(&pending))
        return false;
    bool waited = false;
    sigemptyset(&let);
    for (size_t i = 0; i < sizeof users / sizeof *users; i++)
        if (!sigismember(outside_, users[i])) {
            sigaddset(&let, users[i]);
            waited = waited || sigismember(&pending, users[i]);
        }
    pthread_sigmask(SIG_UNBLOCK, &let, inside);
    return waited;
}

void faults_keep_user_out(const sigset_t *inside) {
    if (outside_)
        pthread_sigmask(SIG_SETMASK, inside, NULL);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    int saved = errno;
    const sigset_t *before = outside_;
    outside_ = &((const ucontext_t *)context)->uc_sigmask;
    bool known, write = was_write(context, &known);
    if (info->si_code <= 0 || guard_resolve((uintptr_t)info->si_addr, write, known) == NOT_OURS)
        pass_on(number, info, context);
    outside_ = before;
    errno = saved;
}

bool faults_begin(void) {
    if (begun_)
        return true;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    sigfillset(&action.sa_mask);
    sigdelset(&action.sa_mask, SIGSEGV); /* a fault of ours inside the handler must end the process with a message, not silently */
    if (!real_sigaction() || real_sigaction()(SIGSEGV, &action, &theirs_))
        return false;
    begun_ = true;
    return true;
}

static int keep_action(int number, const struct sigaction *action, struct sigaction *old) {
    if (number != SIGSEGV || !begun_)
        return real_sigaction()(number, action, old);
    struct sigaction before = theirs_;
    if (action)
        theirs_ = *action;
    if (old)
        *old = before;
    return 0;
}

STANDS_IN int sigaction(int number, const struct sigaction *action, struct sigaction *old) { return keep_action(number, action, old); }

STANDS_IN sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return keep_action(number, &action, &old) ? SIG_ERR : old.sa_handler;
}

static const sigset_t *without_ours(const sigset_t *set, sigset_t *copy) {
    if (!set || !begun_ || !sigismember(set, SIGSEGV))
        return set;
    *copy = *set;
    sigdelset(copy, SIGSEGV); /* a thread that blocks it would be killed by its first fault */
    return copy;
}

STANDS_IN int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
    static mask_function *real;
    if (!real)
        *(void **)&real = next_symbol("pthread_sigmask");
    sigset_t copy;
    return real(how, how == SIG_UNBLOCK ? set : without_ours(set, &copy), old);
}

STANDS_IN int sigprocmask(int how, const sigset_t *set, sigset_t *old) {
    static mask_function *real;
    if (!real)
        *(void **)&real = next_symbol("sigprocmask");
    sigset_t copy;
    return real(how, how == SIG_UNBLOCK ? set : without_ours(set, &copy), old);
}
