/* A thread of a process inside a budget: it measures while no fault and no allocation does, and makes room for what it finds. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "guard.h"
#include "guard_internal.h"
#include "processes.h"

#define STACK_BYTES ((size_t)256 << 10)
#define TICK_NS 5000000
#define TICK_NS_WITHOUT_BLOCKS 50000000
#define LOOK_NS 200000000u
#define MEASURE_SHARE 200 /* looking takes at most this part of the time */

static _Atomic bool runs_;

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Look at others, and at what is shared with them; return when to look again. */
static uint64_t look(void) {
    uint64_t begin = now_ns();
    processes_look_around();
    guard_measure_shared();
    uint64_t took = now_ns() - begin, pause = took * MEASURE_SHARE;
    return begin + (pause > LOOK_NS ? pause : LOOK_NS);
}

static void obey_pause(void) {
    static enum pause_state state;
    if (processes_paused()) {
        guard_hold();
        if (state == RUNS)
            processes_say_paused(HELD);
        bool all = guard_release();
        if (state == RUNS)
            malloc_trim(0);
        state = all ? RELEASED : HELD;
    } else if (state != RUNS) {
        guard_resume();
        state = RUNS;
    }
    guard_tick();
    processes_say_paused(state);
}

static void *serve(void *nothing) {
    for (uint64_t next_look = 0;;) {
        if (processes_all() && now_ns() >= next_look)
            next_look = look();
        obey_pause();
        processes_say_need();
        struct timespec tick = {0, guard_active() ? TICK_NS : TICK_NS_WITHOUT_BLOCKS};
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

void service_in_child(void) { atomic_store(&runs_, false); }
