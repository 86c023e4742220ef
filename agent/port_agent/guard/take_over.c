/* Guarded memory in a process that was not started with it: a notebook, or a program with `with budget(...)`.
 *
 * A preloaded library stands in for others by its names. A library that is loaded later does so by the tables through
 * which the loaded ones call functions outside themselves (ELF's global offset tables): each entry that names one of
 * our stand-ins gets its address. Those who hold a function's address elsewhere still call the original; then the
 * kernel refuses a buffer that is away (EFAULT), and the call fails instead of moving other bytes.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guard_internal.h"

#if defined(__x86_64__)
#define IS_CALL(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_CALL(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_CALL(type) 0
#endif

extern const char __start_port_stand_ins[] __attribute__((visibility("hidden")));
extern const char __stop_port_stand_ins[] __attribute__((visibility("hidden")));

#define MOST_STAND_INS 128

static _Atomic bool took_over_;
static struct {
    const char *name;
    uintptr_t address;
} stand_ins_[MOST_STAND_INS];
static size_t stand_in_count_;
static uintptr_t own_base_;
static pthread_mutex_t listing_ = PTHREAD_MUTEX_INITIALIZER; /* held while the loader's list is read: a fork must not copy that lock */
static unsigned long long loaded_; /* libraries that were ever loaded when the tables were last changed */

struct library {
    uintptr_t base;
    const ElfW(Sym) * symbols;
    const char *names;
    uintptr_t sealed_begin, sealed_end; /* read-only after relocation (PT_GNU_RELRO) */
};

/* Return whether a library calls a function outside itself, or one that others may replace: libc10 calls its own so. */
static bool is_replaceable(const struct library *library, const ElfW(Sym) * symbol) {
    return symbol->st_shndx == SHN_UNDEF || !strncmp(library->names + symbol->st_name, "_ZN3c10", 7);
}

/* dlsym may not be called while libraries are listed: whoever loads one at that moment holds its lock and waits for ours. */
static uintptr_t stand_in_for(const char *name) {
    for (size_t i = 0; i < stand_in_count_; i++)
        if (!strcmp(stand_ins_[i].name, name))
            return stand_ins_[i].address;
    return 0;
}

static int change_entry(const struct library *library, uintptr_t entry, uintptr_t function) {
    uintptr_t page = entry & ~(guard_page - 1);
    bool sealed = page >= library->sealed_begin && page < library->sealed_end;
    if (sealed && syscall(SYS_mprotect, page, guard_page, PROT_READ | PROT_WRITE))
        return errno;
    atomic_store((_Atomic uintptr_t *)entry, function);
    if (sealed)
        syscall(SYS_mprotect, page, guard_page, PROT_READ);
    return 0;
}

static int change_table(const struct library *library, uintptr_t table, size_t bytes) {
    const ElfW(Rela) *entries = (const ElfW(Rela) *)table;
    for (size_t i = 0; table && i < bytes / sizeof *entries; i++) {
        const ElfW(Sym) *symbol = &library->symbols[ELF64_R_SYM(entries[i].r_info)];
        if (!IS_CALL(ELF64_R_TYPE(entries[i].r_info)) || !is_replaceable(library, symbol))
            continue;
        uintptr_t function = stand_in_for(library->names + symbol->st_name);
        int error = function ? change_entry(library, library->base + entries[i].r_offset, function) : 0;
        if (error)
            return error;
    }
    return 0;
}

/* The loader has made most addresses of a dynamic section absolute. */
static uintptr_t absolute(uintptr_t base, uintptr_t value) { return value && value < base ? value + base : value; }

static int change_library(struct dl_phdr_info *info, size_t size, void *error) {
    (void)size;
    struct library library = {.base = info->dlpi_addr};
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(library.base + part->p_vaddr);
        if (part->p_type == PT_GNU_RELRO) {
            library.sealed_begin = (library.base + part->p_vaddr) & ~(guard_page - 1);
            library.sealed_end = (library.base + part->p_vaddr + part->p_memsz) & ~(guard_page - 1);
        }
    }
    if (!dynamic || library.base == own_base_)
        return 0;
    uintptr_t tables[2] = {0}; /* of functions, and of other names */
    size_t bytes[2] = {0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        uintptr_t value = dynamic->d_un.d_ptr;
        switch (dynamic->d_tag) {
        case DT_SYMTAB: library.symbols = (const ElfW(Sym) *)absolute(library.base, value); break;
        case DT_STRTAB: library.names = (const char *)absolute(library.base, value); break;
        case DT_JMPREL: tables[0] = absolute(library.base, value); break;
        case DT_PLTRELSZ: bytes[0] = value; break;
        case DT_RELA: tables[1] = absolute(library.base, value); break;
        case DT_RELASZ: bytes[1] = value; break;
        default: break;
        }
    }
    for (int i = 0; i < 2 && library.symbols && library.names && !*(int *)error; i++)
        *(int *)error = change_table(&library, tables[i], bytes[i]);
    return *(int *)error;
}

static int note_loaded(struct dl_phdr_info *info, size_t size, void *now) {
    (void)size;
    *(unsigned long long *)now = info->dlpi_adds;
    return 1;
}

bool guard_took_over(void) { return atomic_load_explicit(&took_over_, memory_order_relaxed); }

/* The number of symbols in a table: one more than the highest that its hash table names. */
static uint32_t symbols_of(const uint32_t *hash) {
    uint32_t buckets = hash[0], first = hash[1], bloom_words = hash[2], last = 0;
    const uint32_t *bucket = hash + 4 + bloom_words * (sizeof(uintptr_t) / sizeof *hash), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    while (last >= first && !(chain[last - first] & 1))
        last++;
    return last + 1;
}

/* List our functions in the section of stand-ins, from our own table of symbols. */
static bool find_stand_ins(const struct link_map *own) {
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *hash = NULL;
    for (const ElfW(Dyn) *entry = own->l_ld; entry->d_tag != DT_NULL; entry++) {
        uintptr_t value = absolute(own->l_addr, entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ElfW(Sym) *)value;
        if (entry->d_tag == DT_STRTAB)
            names = (const char *)value;
        if (entry->d_tag == DT_GNU_HASH)
            hash = (const uint32_t *)value;
    }
    for (uint32_t i = 0; symbols && names && hash && i < symbols_of(hash); i++) {
        uintptr_t address = own->l_addr + symbols[i].st_value;
        if (address < (uintptr_t)__start_port_stand_ins || address >= (uintptr_t)__stop_port_stand_ins)
            continue;
        if (stand_in_count_ == MOST_STAND_INS)
            return false;
        stand_ins_[stand_in_count_].name = names + symbols[i].st_name;
        stand_ins_[stand_in_count_++].address = address;
    }
    own_base_ = own->l_addr;
    return stand_in_count_ > 0;
}

static unsigned long long libraries_loaded(void) {
    unsigned long long now = 0;
    pthread_mutex_lock(&listing_);
    dl_iterate_phdr(note_loaded, &now);
    pthread_mutex_unlock(&listing_);
    return now;
}

/* Change the tables of all libraries. Those that another thread is loading are not relocated yet, which would undo the
 * change: the loader's lock is free when that is done. Libraries beyond the number noted before are looked at again. */
static int change_all(void) {
    int error = 0;
    unsigned long long before = libraries_loaded();
    dlsym(RTLD_DEFAULT, "port_guard_version"); /* for the lock */
    pthread_mutex_lock(&listing_);
    dl_iterate_phdr(change_library, &error);
    loaded_ = before;
    pthread_mutex_unlock(&listing_);
    return error;
}

int guard_take_over(void) {
    Dl_info info;
    struct link_map *own;
    guard_page = (size_t)sysconf(_SC_PAGESIZE);
    if (!stand_in_count_ && !(dladdr1((const void *)__start_port_stand_ins, &info, (void **)&own, RTLD_DL_LINKMAP) && find_stand_ins(own)))
        return ENOENT;
    atomic_store(&took_over_, true);
    return change_all();
}

void take_over_new_libraries(void) {
    if (guard_took_over() && guard_active() && libraries_loaded() != loaded_)
        change_all();
}

void take_over_before_fork(void) { pthread_mutex_lock(&listing_); }

void take_over_after_fork(void) { pthread_mutex_unlock(&listing_); }
