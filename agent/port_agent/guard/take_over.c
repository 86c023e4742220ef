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

static _Atomic bool took_over_;
static void *ourselves_;
static uintptr_t own_base_;
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

static uintptr_t stand_in_for(const char *name) {
    uintptr_t address = (uintptr_t)dlsym(ourselves_, name);
    return address >= (uintptr_t)__start_port_stand_ins && address < (uintptr_t)__stop_port_stand_ins ? address : 0;
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
    loaded_ = info->dlpi_adds;
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

int guard_take_over(void) {
    Dl_info own;
    if (!ourselves_) {
        guard_page = (size_t)sysconf(_SC_PAGESIZE);
        if (!dladdr((const void *)__start_port_stand_ins, &own) || !(ourselves_ = dlopen(own.dli_fname, RTLD_NOLOAD | RTLD_LAZY)))
            return ENOENT;
        own_base_ = (uintptr_t)own.dli_fbase;
    }
    atomic_store(&took_over_, true);
    int error = 0;
    dl_iterate_phdr(change_library, &error);
    return error;
}

void take_over_new_libraries(void) {
    unsigned long long now = loaded_;
    if (guard_took_over())
        dl_iterate_phdr(note_loaded, &now);
    if (now != loaded_)
        guard_take_over();
}
