/* The processes inside one budget: a small file that all of them map, with a slot for each.
 *
 * Who starts a program (program_starts.c) notes its process; the program's library finds the note and says that it is guarded. What
 * stays a note has no library of ours: it is measured from outside, and named. Every figure is written by one process at a time.
 */
#ifndef PORT_PROCESSES_H
#define PORT_PROCESSES_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROCESSES_VERSION 1u
#define PROCESS_SLOTS 256
#define PATH_BYTES PATH_MAX

enum process_state {
    NO_PROCESS,
    STARTED,  /* a program was started in it, and has not said anything */
    GUARDED,
    ENDED,
};

enum pause_state {
    RUNS,
    HELD,     /* who touches a tensor waits */
    RELEASED, /* and nothing of tensors is resident */
};

struct process_slot {
    _Atomic uint32_t state;
    _Atomic uint32_t pid;
    _Atomic uint32_t guarded;        /* whether its last program was */
    _Atomic uint32_t measures;       /* whether it measures itself; others are measured by the first process */
    _Atomic uint32_t pause;          /* enum pause_state */
    uint32_t reserved;
    _Atomic uint64_t now_bytes;      /* its part of what is resident: shared pages are divided among those that share them */
    _Atomic uint64_t peak_bytes;
    _Atomic uint64_t rest_bytes;     /* of these, what is not tensors */
    _Atomic uint64_t tensor_bytes;
    _Atomic uint64_t wanted_bytes;   /* of tensors in use, resident or not */
    _Atomic uint64_t read_faults, write_faults;
    _Atomic uint64_t read_bytes, written_bytes;
    char name[96];                   /* its command */
};

struct processes {
    uint32_t version;
    uint32_t first_pid;              /* of the program itself */
    uint64_t ram_bytes;              /* of all processes together; 0: no limit but that of tensors */
    uint64_t tensor_bytes;           /* of all tensors together; UINT64_MAX: no limit */
    uint64_t smallest_bytes;         /* smaller tensors are not guarded */
    _Atomic uint64_t peak_bytes;     /* the most that all held together */
    _Atomic uint64_t peak_tensor_bytes;
    _Atomic uint64_t rest_bytes;     /* the most that was not tensors */
    _Atomic uint64_t needed_bytes;   /* what would have sufficed; 0: the budget did */
    _Atomic uint64_t forgotten;      /* processes whose slots others have now */
    _Atomic uint32_t replaced;       /* how often the program became another (execve) */
    _Atomic uint32_t accounted;      /* whether somebody said what it took */
    _Atomic uint32_t paused;         /* enum pause_state, that all shall reach */
    uint32_t followed;               /* whether the program's own tensors are not guarded: others hold them to the budget */
    char page_directory[PATH_BYTES];
    char preload[PATH_BYTES];        /* what belongs at the beginning of LD_PRELOAD in each program that is started */
    char library_path[PATH_BYTES];   /* and of LD_LIBRARY_PATH; mostly empty */
    char accounting[2 * PATH_BYTES]; /* a command, its words ended by zeros, that says what the program took */
    struct process_slot slots[PROCESS_SLOTS];
};

#define PROCESSES_VARIABLE "PORT_GUARD_PROCESSES"

/* What a process holds. */
struct process_use {
    size_t now_bytes, tensor_bytes, rest_bytes, wanted_bytes;
    uint64_t read_faults, write_faults, read_bytes, written_bytes;
};

/* Map the file that the environment names, and take a slot; the environment is then as if nothing had been added. */
struct processes *processes_attach(int count, char **words);
struct processes *processes_all(void);        /* NULL: this process shares no budget */
const char *processes_file(void);
bool processes_is_first(void);
bool processes_has_company(void);             /* whether others live */
void processes_in_child(bool guarded);

/* Say what this process holds, and return how much its tensors may: `alone`, less what the others need. */
size_t processes_share(const struct process_use *use, size_t alone);
/* Say what the budget lacks where nothing of it is left for tensors, once, and again where the need has grown by half. */
void processes_say_need(void);
/* Return whether all together would hold more than the budget with so much more. */
bool processes_pass_limit(size_t coming);

/* Around the start of a program in a process; `undo` where it did not start. */
struct start_note {
    struct process_slot *slot;
    uint32_t state_before;
};
struct start_note processes_note_start(uint32_t pid, char *const *words);
void processes_undo_start(struct start_note note);
void processes_note_spawned(uint32_t pid, char *const *words);

/* What only the first process does, now and then: look at those that do not measure themselves, and for unknown ones. */
void processes_look_around(void);
void processes_measures_itself(void);
enum pause_state processes_wanted_pause(void);
void processes_want_pause(enum pause_state state);
void processes_say_paused(enum pause_state state);
/* Return which part of `resident_bytes` is this process's own, where pages are shared; costs milliseconds. */
size_t processes_own_part(uint32_t pid, size_t resident_bytes);
size_t processes_resident(uint32_t pid);
void processes_end(void);

/* program_starts.c */
void starts_begin(void);
void starts_run(char **words);                /* run a command outside of the budget, and wait for its end */

/* service.c: a thread that measures, and makes room while nothing else does. */
void service_begin(void);
/* Have the thread obey commands to pause, to release memory and to go on that come there (a socket; -1: none) and stay unread. The
 * lines are what it answers when this process is held, and when it has released its memory. */
void service_watch_line(int line, const char *held, const char *released);
/* Whether who listens obeys what is on the line, and leaves it there until it has. */
void service_line_is_obeyed(bool now);
/* Hold all, or have them release theirs, and send that line when this process has. */
void service_pause_and_say(enum pause_state state);
void service_resume(void);
void service_in_child(void);

#endif
