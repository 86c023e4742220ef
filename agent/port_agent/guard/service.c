/* A thread of a process inside a budget: it measures while no fault or allocation does, and frees memory
 * accordingly. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "guard.h"
#include "guard_internal.h"
#include "processes.h"

#define STACK_BYTES ((size_t)256 << 10)
#define TICK_NS 5000000
#define QUIET_TICK_NS 50000000
#define LOOK_NS 200000000u
#define PATIENCE_TICKS 10
#define ANSWER_BYTES 512
#define LINES_BYTES 2000
#define MEASURE_SHARE 200 /* divisor: measuring may take one part in this many of the time */

static _Atomic bool runs_;
static _Atomic int line_ = -1; /* connection to whoever decides when the program runs */
static char answers_[RELEASED + 1][ANSWER_BYTES];
static _Atomic bool being_obeyed_; /* whether the listener obeys what is on the line */
static _Atomic uint32_t owed_; /* the state to report when it is reached; RUNS: nothing */

/* Measure other processes and what is shared with them; return when to measure again. */
static uint64_t look(void) {
    uint64_t begin = guard_now_ns();
    processes_look_around();
    guard_measure_shared();
    uint64_t took = guard_now_ns() - begin, pause = took * MEASURE_SHARE;
    return begin + (pause > LOOK_NS ? pause : LOOK_NS);
}

void service_pause_and_report(enum pause_state state) {
    processes_want_pause(state);
    atomic_store(&owed_, state);
}

void service_resume(void) {
    atomic_store(&owed_, RUNS);
    processes_want_pause(RUNS);
}

/* Return the last command in some lines (`port_agent.worker.protocol`); a program that must clean up or resume runs. */
static enum pause_state commanded(const char *lines) {
    const char *last = NULL;
    for (const char *next = lines; (next = strstr(next, "\"cmd\":\"")); next++) /* no quoted text can hold these quotes */
        last = next + sizeof "\"cmd\":\"" - 1;
    if (last && !strncmp(last, "pause\"", 6))
        return HELD;
    return last && !strncmp(last, "release\"", 8) ? RELEASED : RUNS;
}

/* Obey commands on the line that nobody else reads. The listener may be waiting for the interpreter's lock, held by
 * a thread that computes. Or it may be waiting, with such a thread, for the end of this very pause. */
static void obey_line(enum pause_state reached) {
    static unsigned unread;
    char lines[LINES_BYTES];
    int line = atomic_load(&line_);
    if (line < 0)
        return;
    ssize_t length = recv(line, lines, sizeof lines - 1, MSG_PEEK | MSG_DONTWAIT);
    lines[length > 0 ? length : 0] = '\0';
    enum pause_state wanted = commanded(lines), paused = processes_wanted_pause();
    if (length < 0)
        unread = 0;
    else if (wanted == RUNS) /* or the line has ended: otherwise the program could never resume */
        service_resume();
    else if (wanted <= paused || (paused == RUNS && atomic_load(&being_obeyed_)))
        unread = 0; /* once paused, a thread that waits there may hold the lock that the listener needs to go on */
    else if (++unread == PATIENCE_TICKS)
        service_pause_and_report(wanted);
    enum pause_state owed = atomic_load(&owed_);
    if (owed != RUNS && reached >= owed && atomic_compare_exchange_strong(&owed_, &owed, RUNS))
        send(line, answers_[owed], strlen(answers_[owed]), MSG_DONTWAIT | MSG_NOSIGNAL);
}

static enum pause_state obey_pause(void) {
    static enum pause_state state;
    static bool trimmed;
    enum pause_state wanted = processes_wanted_pause();
    if (wanted != RUNS) {
        guard_hold();
        if (state == RUNS)
            processes_say_paused(HELD);
        state = wanted == RELEASED && guard_release() ? RELEASED : HELD;
        if (wanted == RELEASED && !trimmed)
            malloc_trim(0);
        trimmed = wanted == RELEASED;
    } else if (state != RUNS) {
        guard_resume();
        state = RUNS;
    }
    guard_tick();
    processes_say_paused(state);
    return state;
}

static void *serve(void *nothing) {
    enum pause_state reached = RUNS;
    for (uint64_t next_look = 0;;) {
        if (processes_all() && guard_now_ns() >= next_look)
            next_look = look();
        obey_line(reached);
        reached = obey_pause();
        processes_say_need();
        take_over_new_libraries();
        bool quiet = !guard_active() || processes_wanted_pause() != RUNS;
        struct timespec tick = {0, quiet ? QUIET_TICK_NS : TICK_NS};
        nanosleep(&tick, NULL);
    }
    return nothing;
}

void service_begin(void) {
    if (atomic_exchange(&runs_, true))
        return;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are for its own threads */
    pthread_t thread;
    if (pthread_create(&thread, &attributes, serve, NULL))
        atomic_store(&runs_, false);
    else
        processes_measures_itself();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void service_watch_line(int line, const char *held, const char *released) {
    atomic_store(&line_, -1);
    if (line < 0)
        return;
    snprintf(answers_[HELD], ANSWER_BYTES, "%s", held);
    snprintf(answers_[RELEASED], ANSWER_BYTES, "%s", released);
    atomic_store(&line_, line);
    service_begin();
}

void service_line_is_obeyed(bool now) { atomic_store(&being_obeyed_, now); }

void service_in_child(void) {
    atomic_store(&runs_, false);
    atomic_store(&line_, -1);
}
