/* glibc's own names for its allocator, by way of malloc: under a sanitizer that is the sanitizer's. */
#include <malloc.h>
#include <stdlib.h>

void *__libc_malloc(size_t bytes) { return malloc(bytes); }

void *__libc_calloc(size_t count, size_t bytes) { return calloc(count, bytes); }

void *__libc_realloc(void *address, size_t bytes) { return realloc(address, bytes); }

void *__libc_memalign(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

void __libc_free(void *address) { free(address); }
