/* Memory-mapped external RAM as a page medium: PSRAM behind a QSPI or a memory controller, or ordinary memory in its place. */
#ifndef PORT_PSRAM_H
#define PORT_PSRAM_H

#include "port_engine.h"

/* `bytes_per_s` 0: at memory speed, complete when `write` and `read` return. Otherwise a transfer takes its time by
 * `ticks`, so that an emulator can simulate a slow part with DMA. `is_there`: null, or returns whether the part
 * responds. */
typedef struct psram {
    uint8_t *memory;
    uint32_t bytes_per_s, ticks_hz;
    uint64_t (*ticks)(void);
    int (*is_there)(void);
    uint8_t *to; /* destination of the pending transfer */
    const uint8_t *from;
    uint32_t done, total;
    uint64_t started;
} psram;

port_medium psram_medium(psram *part, uint32_t bytes);

#endif
