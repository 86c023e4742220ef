/* Huge pages: one fault in place of 512, direct I/O pins one page in place of 512, and a change of protection or address
 * is one entry of a page table. */
#ifndef PORT_HUGE_PAGES_H
#define PORT_HUGE_PAGES_H

#include <stdbool.h>
#include <stddef.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* Whether the kernel has huge pages of at most HUGE_PAGE_BYTES. With pages of 16 or 64 KiB, a huge page has 32 or
 * 512 MiB. The untouched end of a block could then exceed the budget, so none are requested. */
bool huge_pages_fit(void);

/* Request huge pages in a range, if they fit. Only a hint: kernels without huge pages ignore it. */
void huge_pages_wish(void *pages, size_t bytes);

#endif
