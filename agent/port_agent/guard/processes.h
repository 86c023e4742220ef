/* The processes inside one budget: a small file that all of them map, with a slot for each.
 *
 * A process that starts a program (program_starts.c) notes the new process; the program's library finds the note and
 * reports that it is guarded. A process that remains a note does not have our library: it is measured from outside, and
 * named. Every figure has one writer at a time.
 */
#ifndef PORT_PROCESSES_H
#define PORT_PROCESSES_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROCESSES_VERSION 2u
#define PROCESS_SLOTS 256
#define PATH_BYTES PATH_MAX

enum process_state {
    NO_PROCESS,
    STARTED,  /* a program was started in it, which has not reported yet */
    GUARDED,
    ENDED,
};

enum pause_state {
    RUNS,
    HELD,     /* threads that touch a tensor wait */
    RELEASED, /* and no tensors are resident */
};

struct process_slot {
    _Atomic uint32_t state;
    _Atomic uint32_t pid;
    _Atomic uint32_t guarded;        /* whether its last program was guarded */
    _Atomic uint32_t measures;       /* whether it measures itself; otherwise the first process measures it */
    _Atomic uint32_t pause;          /* enum pause_state */
    uint32_t reserved;
    _Atomic uint64_t now_bytes;      /* its share of resident memory: shared pages are divided by their sharers */
    _Atomic uint64_t peak_bytes;
    _Atomic uint64_t rest_bytes;     /* of these, all but tensors */
    _Atomic uint64_t tensor_bytes;
    _Atomic uint64_t wanted_bytes;   /* of tensors in use, resident or not */
    _Atomic uint64_t read_faults, write_faults;
    _Atomic uint64_t read_bytes, written_bytes;
    char name[96];                   /* its command */
};

struct processes {
    uint32_t version;
    uint32_t first_pid;              /* of the program itself */
    uint64_t ram_bytes;              /* of all processes together; 0: only tensors are limited */
    uint64_t tensor_bytes;           /* of all tensors together; UINT64_MAX: no limit */
    uint64_t smallest_bytes;         /* smaller tensors are not guarded */
    _Atomic uint64_t peak_bytes;     /* most bytes of all processes together */
    _Atomic uint64_t peak_tensor_bytes;
    _Atomic uint64_t rest_bytes;     /* most bytes other than tensors */
    _Atomic uint64_t needed_bytes;   /* the sufficient budget; 0: the given one is */
    _Atomic uint64_t forgotten;      /* processes whose slots were reused */
    _Atomic uint32_t replaced;       /* how often the program replaced itself (execve) */
    _Atomic uint32_t accounted;      /* whether its use was reported */
    _Atomic uint32_t paused;         /* enum pause_state that all processes are to reach */
    char page_directory[PATH_BYTES];
    char preload[PATH_BYTES];        /* prefix of LD_PRELOAD in each program that is started */
    char library_path[PATH_BYTES];   /* prefix of LD_LIBRARY_PATH; mostly empty */
    char accounting[2 * PATH_BYTES]; /* a command, as zero-terminated words, that reports the program's use */
    struct process_slot slots[PROCESS_SLOTS];
};

#define PROCESSES_VARIABLE "PORT_GUARD_PROCESSES"

/* Memory of a process. */
struct process_use {
    size_t now_bytes, tensor_bytes, rest_bytes, wanted_bytes;
    uint64_t read_faults, write_faults, read_bytes, written_bytes;
};

/* Map the file named by the environment, and take a slot; restores the environment to what it was without our additions. */
struct processes *processes_attach(int count, char **words);
struct processes *processes_all(void);        /* NULL: this process shares no budget */
const char *processes_file(void);
bool processes_is_first(void);
bool processes_has_company(void);             /* whether other processes live */
void processes_in_child(bool guarded);

/* Report this process's memory, and return how much its tensors may take: `alone`, minus what the others need. */
size_t processes_share(const struct process_use *use, size_t alone);
/* Report the missing memory if the budget leaves none for tensors: once, and again if the need has grown by half. */
void processes_say_need(void);
/* Return whether all processes together would exceed the budget with `coming` more bytes. */
bool processes_pass_limit(size_t coming);

/* To be called before and after a program is started in a process; `undo` if it did not start. */
struct start_note {
    struct process_slot *slot;
    uint32_t state_before;
};
struct start_note processes_note_start(uint32_t pid, char *const *words);
void processes_undo_start(struct start_note note);
void processes_note_spawned(uint32_t pid, char *const *words);

/* Only the first process does this, periodically: measure processes that do not measure themselves, and find unknown
 * ones. */
void processes_look_around(void);
void processes_measures_itself(void);
enum pause_state processes_wanted_pause(void);
void processes_want_pause(enum pause_state state);
void processes_say_paused(enum pause_state state);
/* Return the part of `resident_bytes` that is this process's own, where pages are shared; takes milliseconds. */
size_t processes_own_part(uint32_t pid, size_t resident_bytes);
size_t processes_resident(uint32_t pid);
void processes_end(void);

/* program_starts.c */
void starts_begin(void);
void starts_run(char **words);                /* run a command outside the budget, and wait for its end */

/* service.c: a thread that measures, and frees memory while no fault or allocation does. */
void service_begin(void);
/* Have the thread obey commands to pause, to release memory and to resume that arrive on a socket (-1: none) and stay
 * unread. The lines are its answers when this process is held, and when it has released its memory. */
void service_watch_line(int line, const char *held, const char *released);
/* Set whether the listener obeys the commands on the line; it leaves them there until it has. */
void service_line_is_obeyed(bool now);
/* Hold all processes, or have them release their memory, and send that line when this process has. */
void service_pause_and_report(enum pause_state state);
void service_resume(void);
void service_in_child(void);

#endif
