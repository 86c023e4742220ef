/* The processes inside one budget. See processes.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "processes.h"

#define SHARED_MARGIN ((uint64_t)8 << 20) /* for each process with tensors: small allocations between two measurements */
#define LATE_BYTES ((uint64_t)24 << 20)   /* of tensors, which may return while requested memory is being filled */

static struct processes *all_;
static struct process_slot *own_;
static char file_[PATH_BYTES];

struct processes *processes_all(void) { return all_; }

const char *processes_file(void) { return file_; }

bool processes_is_first(void) { return all_ && (uint32_t)getpid() == all_->first_pid; }

/* ---- what the kernel reports about a process
 * ------------------------------------------------------------------------ */

static ssize_t read_text(const char *path, char *text, size_t bytes) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    ssize_t done = 0, part;
    while ((size_t)done < bytes - 1 && (part = syscall(SYS_read, file, text + done, bytes - 1 - (size_t)done)) > 0)
        done += part;
    syscall(SYS_close, file);
    text[done] = 0;
    return done;
}

static ssize_t read_of(uint32_t pid, const char *name, char *text, size_t bytes) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/%s", pid, name);
    return read_text(path, text, bytes);
}

static size_t kib_after(const char *text, const char *name) {
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) << 10 : 0;
}

size_t processes_resident(uint32_t pid) {
    char text[128];
    const char *second = read_of(pid, "statm", text, sizeof text) > 0 ? strchr(text, ' ') : NULL;
    return second ? strtoull(second + 1, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

size_t processes_own_part(uint32_t pid, size_t resident_bytes) {
    char text[2048];
    size_t part = read_of(pid, "smaps_rollup", text, sizeof text) > 0 ? kib_after(text, "\nPss:") : 0;
    return part && part < resident_bytes ? part : resident_bytes;
}

/* Return the parent of a living process; 0 if it is gone, or waits for its parent to collect its status. */
static uint32_t parent_of(uint32_t pid) {
    char text[512];
    const char *end = read_of(pid, "stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    char state;
    uint32_t parent;
    return end && sscanf(end + 1, " %c %u", &state, &parent) == 2 && state != 'Z' && state != 'X' ? parent : 0;
}

/* ---- slots ---------------------------------------------------------------------------------------------------------- */

static void raise_to(_Atomic uint64_t *figure, uint64_t value) {
    uint64_t before = atomic_load(figure);
    while (before < value && !atomic_compare_exchange_weak(figure, &before, value)) {
    }
}

static bool lives(const struct process_slot *slot) {
    uint32_t state = atomic_load(&slot->state);
    return state == STARTED || state == GUARDED;
}

static struct process_slot *living(uint32_t pid) {
    for (int i = 0; i < PROCESS_SLOTS; i++)
        if (atomic_load(&all_->slots[i].pid) == pid && lives(&all_->slots[i]))
            return &all_->slots[i];
    return NULL;
}

static void end_slot(struct process_slot *slot) {
    atomic_store(&slot->now_bytes, 0);
    atomic_store(&slot->rest_bytes, 0);
    atomic_store(&slot->tensor_bytes, 0);
    atomic_store(&slot->wanted_bytes, 0);
    atomic_store(&slot->state, ENDED);
}

static bool claim(struct process_slot *slot, uint32_t from, uint32_t pid) {
    if (!atomic_compare_exchange_strong(&slot->state, &from, STARTED))
        return false;
    char *begin = (char *)slot + offsetof(struct process_slot, guarded);
    memset(begin, 0, sizeof *slot - offsetof(struct process_slot, guarded));
    atomic_store(&slot->pid, pid);
    return true;
}

/* Take an empty slot or, if there is none, that of an ended process, guarded ones first. NULL: all processes are alive. */
static struct process_slot *take_slot(uint32_t pid) {
    for (int i = 0; i < PROCESS_SLOTS; i++)
        if (claim(&all_->slots[i], NO_PROCESS, pid))
            return &all_->slots[i];
    for (int unguarded = 0; unguarded < 2; unguarded++)
        for (int i = 0; i < PROCESS_SLOTS; i++)
            if ((unguarded || atomic_load(&all_->slots[i].guarded)) && claim(&all_->slots[i], ENDED, pid)) {
                atomic_fetch_add(&all_->forgotten, 1);
                return &all_->slots[i];
            }
    return NULL;
}

static void name_by(struct process_slot *slot, char *const *words, const char *before) {
    size_t length = (size_t)snprintf(slot->name, sizeof slot->name, "%s", before);
    for (int i = 0; words && words[i] && length < sizeof slot->name - 1; i++)
        length += (size_t)snprintf(slot->name + length, sizeof slot->name - length, "%s%s", i ? " " : "", words[i]);
}

struct start_note processes_note_start(uint32_t pid, char *const *words) {
    struct start_note note = {.slot = living(pid)};
    if (note.slot) {
        note.state_before = atomic_exchange(&note.slot->state, STARTED);
    } else {
        note.slot = take_slot(pid);
        if (!note.slot)
            return note;
    }
    atomic_store(&note.slot->guarded, 0);
    atomic_store(&note.slot->measures, 0);
    if (pid != all_->first_pid)
        name_by(note.slot, words, "");
    return note;
}

/* Record a process that has already been started and may have reported itself by now. */
void processes_note_spawned(uint32_t pid, char *const *words) {
    if (living(pid))
        return;
    struct start_note note = processes_note_start(pid, words);
    for (int i = 0; i < PROCESS_SLOTS; i++)
        if (note.slot && &all_->slots[i] != note.slot && atomic_load(&all_->slots[i].pid) == pid && lives(&all_->slots[i])) {
            processes_undo_start(note);
            return;
        }
}

static void drop_twins(uint32_t pid) {
    for (int i = 0; i < PROCESS_SLOTS; i++) {
        uint32_t started = STARTED;
        if (&all_->slots[i] != own_ && atomic_load(&all_->slots[i].pid) == pid)
            atomic_compare_exchange_strong(&all_->slots[i].state, &started, NO_PROCESS);
    }
}

void processes_undo_start(struct start_note note) {
    if (!note.slot)
        return;
    if (note.state_before == NO_PROCESS)
        atomic_store(&note.slot->pid, 0);
    atomic_store(&note.slot->guarded, note.state_before == GUARDED);
    atomic_store(&note.slot->measures, note.state_before == GUARDED && note.slot == own_);
    atomic_store(&note.slot->state, note.state_before);
}

/* ---- beginning and end ---------------------------------------------------------------------------------------------- */

static struct processes *map_file(const char *path) {
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    off_t bytes = lseek(file, 0, SEEK_END);
    void *mapped = bytes == sizeof(struct processes) ? mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    syscall(SYS_close, file);
    if (mapped == MAP_FAILED)
        return NULL;
    struct processes *found = mapped;
    if (found->version == PROCESSES_VERSION)
        return found;
    munmap(mapped, (size_t)bytes);
    return NULL;
}

/* Remove an entry from the beginning of a list variable, and the variable itself with its last entry. */
static void take_from_list(const char *variable, const char *entry) {
    const char *value = *entry ? getenv(variable) : NULL;
    size_t length = strlen(entry);
    if (!value || strncmp(value, entry, length) || (value[length] && value[length] != ':'))
        return;
    if (value[length]) {
        char rest[2 * PATH_BYTES];
        snprintf(rest, sizeof rest, "%s", value + length + 1);
        setenv(variable, rest, 1);
    } else {
        unsetenv(variable);
    }
}

static void begin_own(bool guarded) {
    if (own_) {
        atomic_store(&own_->guarded, guarded);
        atomic_store(&own_->state, GUARDED);
    }
}

struct processes *processes_attach(int count, char **words) {
    const char *path = getenv(PROCESSES_VARIABLE);
    if (!path || strlen(path) >= sizeof file_)
        return NULL;
    strcpy(file_, path);
    unsetenv(PROCESSES_VARIABLE);
    all_ = map_file(file_);
    if (!all_)
        return NULL;
    take_from_list("LD_PRELOAD", all_->preload);
    take_from_list("LD_LIBRARY_PATH", all_->library_path);
    uint32_t pid = (uint32_t)getpid();
    own_ = living(pid);
    if (own_ && atomic_load(&own_->state) == GUARDED) { /* another process's, whose number this one has now */
        end_slot(own_);
        own_ = NULL;
    }
    if (!own_)
        own_ = take_slot(pid);
    drop_twins(pid);
    if (own_ && !*own_->name && count)
        name_by(own_, words, "");
    begin_own(true);
    return all_;
}

void processes_measures_itself(void) {
    if (own_)
        atomic_store(&own_->measures, 1);
}

enum pause_state processes_wanted_pause(void) { return all_ ? atomic_load(&all_->paused) : RUNS; }

void processes_want_pause(enum pause_state state) {
    if (all_)
        atomic_store(&all_->paused, state);
}

void processes_say_paused(enum pause_state state) {
    if (own_)
        atomic_store(&own_->pause, state);
}

void processes_in_child(bool guarded) {
    if (!all_)
        return;
    const struct process_slot *parent = own_;
    own_ = living((uint32_t)getpid());
    if (!own_)
        own_ = take_slot((uint32_t)getpid());
    if (own_ && parent && own_ != parent) {
        char *const words[] = {(char *)parent->name, NULL};
        name_by(own_, words, strncmp(parent->name, "(forked)", 8) ? "(forked) " : "");
    }
    begin_own(guarded);
}

/* After the program replaced itself (execve), no code in it knows its memory use, so a program of ours reports it. */
static void account(void) {
    if (!processes_is_first() || !atomic_load(&all_->replaced) || atomic_exchange(&all_->accounted, 1) || !*all_->accounting)
        return;
    char *words[32];
    int count = 0;
    for (char *word = all_->accounting; *word && count < 31; word += strlen(word) + 1)
        words[count++] = word;
    words[count] = NULL;
    starts_run(words);
}

void processes_end(void) {
    if (!own_ || atomic_load(&own_->pid) != (uint32_t)getpid())
        return;
    account();
    end_slot(own_);
}

/* ---- sharing -------------------------------------------------------------------------------------------------------- */

bool processes_has_company(void) {
    for (int i = 0; all_ && i < PROCESS_SLOTS; i++)
        if (&all_->slots[i] != own_ && lives(&all_->slots[i]))
            return true;
    return false;
}

/* Return the level up to which each process may fill, so that all together take no more than `budget`: a process that
 * needs less leaves the rest to the others. Overwrites `wanted`. */
static uint64_t level_of(uint64_t *wanted, uint64_t count, uint64_t budget) {
    for (bool changed = true; changed;) {
        changed = false;
        for (uint64_t i = 0; i < count; i++)
            if (wanted[i] <= budget / count) {
                budget -= wanted[i];
                wanted[i--] = wanted[--count];
                changed = true;
            }
    }
    return count ? budget / count : budget;
}

static void note_use(const struct process_use *use) {
    atomic_store(&own_->now_bytes, use->now_bytes);
    raise_to(&own_->peak_bytes, use->now_bytes);
    atomic_store(&own_->rest_bytes, use->rest_bytes);
    atomic_store(&own_->tensor_bytes, use->tensor_bytes);
    atomic_store(&own_->wanted_bytes, use->wanted_bytes);
    atomic_store(&own_->read_faults, use->read_faults);
    atomic_store(&own_->write_faults, use->write_faults);
    atomic_store(&own_->read_bytes, use->read_bytes);
    atomic_store(&own_->written_bytes, use->written_bytes);
}

bool processes_pass_limit(size_t coming) {
    uint64_t all = coming;
    for (int i = 0; all_ && i < PROCESS_SLOTS; i++)
        if (lives(&all_->slots[i]))
            all += atomic_load(&all_->slots[i].now_bytes);
    return all_ && all_->ram_bytes && all > all_->ram_bytes;
}

size_t processes_share(const struct process_use *use, size_t alone) {
    if (!own_)
        return alone;
    note_use(use);
    uint64_t wanted[PROCESS_SLOTS], sum = 0, all = 0, tensors = 0, rest = 0, margins = 0;
    uint64_t count = 0;
    for (int i = 0; i < PROCESS_SLOTS; i++) {
        const struct process_slot *slot = &all_->slots[i];
        if (!lives(slot))
            continue;
        all += atomic_load(&slot->now_bytes);
        tensors += atomic_load(&slot->tensor_bytes);
        rest += atomic_load(&slot->rest_bytes);
        uint64_t needs = atomic_load(&slot->wanted_bytes);
        if (needs || slot == own_) {
            wanted[count++] = needs;
            sum += needs;
            margins += SHARED_MARGIN;
        }
    }
    raise_to(&all_->peak_bytes, all);
    raise_to(&all_->peak_tensor_bytes, tensors);
    uint64_t beside = all > tensors ? all - tensors : 0;
    raise_to(&all_->rest_bytes, beside);
    bool crowded = beside + margins > all_->ram_bytes;
    if (all_->ram_bytes && (all > all_->ram_bytes || crowded))
        raise_to(&all_->needed_bytes, all + 2 * margins + (sum < LATE_BYTES ? sum : LATE_BYTES));
    if (!processes_has_company())
        return alone;
    uint64_t budget = all_->tensor_bytes, taken = rest + margins;
    uint64_t left = all_->ram_bytes > taken ? all_->ram_bytes - taken : 0;
    if (all_->ram_bytes && left < budget)
        budget = left;
    uint64_t others = sum - use->wanted_bytes;
    return sum <= budget ? budget - others : level_of(wanted, count, budget);
}

static void report(const char *text, size_t bytes) {
    if (syscall(SYS_write, 2, text, bytes) < 0) { /* nobody listens */
    }
}

void processes_say_need(void) {
    static uint64_t reported;
    if (!processes_is_first())
        return;
    uint64_t needed = atomic_load(&all_->needed_bytes), rest = atomic_load(&all_->rest_bytes);
    if (!atomic_load(&all_->peak_tensor_bytes)) /* libraries are still being loaded: what they will take is not known */
        return;
    if (!needed || rest + SHARED_MARGIN <= all_->ram_bytes || needed < reported + reported / 2)
        return;
    reported = needed;
    char text[256];
    int length = snprintf(text, sizeof text,
                          "port-agent: Python, libraries and your objects take %.1f MiB of %.1f MiB; nothing is left for tensors; "
                          "give at least %lluM\n",
                          (double)rest / (1 << 20), (double)all_->ram_bytes / (1 << 20), (unsigned long long)(needed >> 20) + 1);
    report(text, (size_t)length);
}

/* ---- others --------------------------------------------------------------------------------------------------------- */

static void look_at(struct process_slot *slot) {
    uint32_t pid = atomic_load(&slot->pid);
    size_t resident = parent_of(pid) ? processes_resident(pid) : 0;
    if (!resident) {
        end_slot(slot);
        return;
    }
    if (atomic_load(&slot->measures))
        return;
    char text[PATH_BYTES];
    size_t part = processes_own_part(pid, resident);
    size_t shared = resident - part, peak = read_of(pid, "status", text, sizeof text) > 0 ? kib_after(text, "\nVmHWM:") : 0;
    raise_to(&slot->peak_bytes, peak > resident ? peak - shared : part);
    atomic_store(&slot->now_bytes, part);
    atomic_store(&slot->rest_bytes, part);
}

#define STRANGERS 64

/* Record a process whose start was not observed, if its parent is inside the budget. One that was not there the last
 * time may be about to report itself. */
static void note_unknown(uint32_t pid, const uint32_t *before, uint32_t *strangers, int *count) {
    uint32_t parent = living(pid) ? 0 : parent_of(pid);
    if (!parent || !living(parent))
        return;
    if (*count < STRANGERS)
        strangers[(*count)++] = pid;
    for (int i = 0; i < STRANGERS; i++)
        if (before[i] == pid) {
            char text[96];
            ssize_t length = read_of(pid, "cmdline", text, sizeof text);
            for (ssize_t at = 0; at < length - 1; at++)
                text[at] = text[at] ? text[at] : ' ';
            char *const words[] = {text, NULL};
            if (length > 0)
                processes_note_spawned(pid, words);
            return;
        }
}

struct directory_entry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

static void look_for_unknown(void) {
    static uint32_t before[STRANGERS];
    uint32_t strangers[STRANGERS] = {0};
    int count = 0;
    int directory = (int)syscall(SYS_openat, AT_FDCWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return;
    _Alignas(struct directory_entry) char entries[16 << 10];
    long bytes;
    while ((bytes = syscall(SYS_getdents64, directory, entries, sizeof entries)) > 0)
        for (long at = 0; at < bytes;) {
            const struct directory_entry *entry = (const void *)(entries + at);
            uint32_t pid = (uint32_t)strtoul(entry->name, NULL, 10);
            if (pid)
                note_unknown(pid, before, strangers, &count);
            at += entry->length;
        }
    syscall(SYS_close, directory);
    memcpy(before, strangers, sizeof before);
}

void processes_look_around(void) {
    for (int i = 0; i < PROCESS_SLOTS; i++)
        if (&all_->slots[i] != own_ && lives(&all_->slots[i]))
            look_at(&all_->slots[i]);
    if (processes_is_first())
        look_for_unknown();
}
