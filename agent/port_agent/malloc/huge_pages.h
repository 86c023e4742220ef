/* Huge pages: one fault in place of 512, direct I/O pins one page in place of 512, and a change of protection or address
 * is one entry of a page table. */
#ifndef PORT_HUGE_PAGES_H
#define PORT_HUGE_PAGES_H

#include <stdbool.h>
#include <stddef.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* Whether the kernel has huge pages of at most HUGE_PAGE_BYTES. Where pages have 16 or 64 KiB a huge one has 32 or 512 MiB:
 * an end that a block leaves untouched would pass a budget, so none are asked for. */
bool huge_pages_fit(void);

/* Ask for huge pages in a range; for none where they do not fit. A wish: kernels without them refuse it. */
void huge_pages_wish(void *pages, size_t bytes);

#endif
