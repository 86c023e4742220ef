/* Functions that a board must provide. PORTING.md says how to write one; each directory beside this file is one.
 *
 * A port may keep file-scope state (its receive ring); everything above it belongs to `main`. */
#ifndef PORT_PORT_H
#define PORT_PORT_H

#include <stddef.h>
#include <stdint.h>

#include "port_engine.h"

#define PORT_UNKNOWN 0xFFFFFFFFu /* a figure that this board cannot give */

enum reset_reason { RESET_POWER = 1, RESET_REQUEST = 2, RESET_FAULT = 3, RESET_WATCHDOG = 4 };

struct port_board {
    const char *name;     /* at most 23 characters; the host finds its board table by it */
    uint32_t ram_bytes;   /* as linked: the linker script's limit, not the chip's promise */
    uint32_t flash_bytes;
    uint32_t ticks_hz;
};

extern const struct port_board PORT_BOARD;

/* Clocks, UART with receive interrupt, tick counter, watchdog. Runs once, before everything else here. */
void port_init(void);

/* Next received byte, or -1. */
int port_uart_get(void);
/* Send one byte; waits while the transmitter is busy. */
void port_uart_put(uint8_t byte);
/* Bytes lost so far: a full ring, or the UART's own overrun flag. */
uint32_t port_uart_overruns(void);
/* Return nonzero once if a run of ATTENTION_ZEROS zeros has arrived since the last call, even if unread. */
int port_uart_attention(void);

/* Wait until an interrupt has probably delivered something; may return at once. */
void port_idle(void);
void port_watchdog_feed(void);
/* Never returns. All bytes of port_uart_put must have left before. */
void port_reset(void);
uint32_t port_reset_reason(void); /* enum reset_reason */

uint64_t port_ticks(void);
/* Bytes that tell boards of one kind apart (factory id); all zero if there are none. */
void port_serial(uint8_t serial[8]);
/* A value that differs from boot to boot, or 0 if there is none. */
uint32_t port_entropy(void);

/* Stack: deepest use so far (painted memory), reserved size, and the statically linked RAM below it. */
uint32_t port_stack_used(void);
uint32_t port_stack_bytes(void);
uint32_t port_static_bytes(void);

/* The external memory that pages go to (port_engine.h; drivers in firmware/media), null: the board has none, or none answers.
 * Only for models that page: PORT_MODEL_MEDIUM of model.h says which medium they were planned for. */
const port_medium *port_page_medium(void);

/* Two slots of non-volatile memory, readable in place. Slot size 0: the board has none. */
#define PORT_SLOTS 2u
uint32_t port_slot_bytes(void);
const uint8_t *port_slot(uint32_t slot);
/* Nonzero on failure. Offsets and sizes of writes are multiples of 4; a written word is erased first. */
int port_slot_erase(uint32_t slot);
int port_slot_write(uint32_t slot, uint32_t offset, const void *data, uint32_t size);

#endif
