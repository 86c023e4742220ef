#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "huge_pages.h"

#define SIZE_FILE "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"

bool huge_pages_fit(void) {
    static _Atomic int known = -1;
    int fit = atomic_load_explicit(&known, memory_order_relaxed);
    if (fit >= 0)
        return fit;
    char text[24] = "";
    int file = open(SIZE_FILE, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t length = read(file, text, sizeof text - 1);
        text[length > 0 ? length : 0] = '\0';
        close(file);
    }
    unsigned long long bytes = strtoull(text, NULL, 10);
    fit = bytes && bytes <= HUGE_PAGE_BYTES;
    atomic_store_explicit(&known, fit, memory_order_relaxed);
    return fit;
}

void huge_pages_wish(void *pages, size_t bytes) { madvise(pages, bytes, huge_pages_fit() ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); }
