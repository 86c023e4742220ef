/* ARM MPS2 with a Cortex-M3, M4F or M7F (AN385, AN386, AN500; QEMU's mps2-an385, -an386, -an500): CMSDK peripherals.
 *
 * Source: Arm DDI 0479 (Cortex-M System Design Kit) chapter 4, UART, watchdog; DAI 0385/0386/0400 for addresses.
 * The board's flash is RAM loaded by the debugger, so the two snapshot slots live in its PSRAM, which the
 * simulator backs with a file. Pages follow them, at PORT_PAGE_BYTES_PER_S (0: as fast as memory). The last word of the
 * PSRAM is where a test pulls the medium: anything but 0 there and it does not answer. */
#include <string.h>

#include "cortexm.h"
#include "model.h"
#include "port.h"
#include "psram.h"

#define UART_DATA REGISTER(0x40004000u)
#define UART_STATE REGISTER(0x40004004u)
#define UART_CONTROL REGISTER(0x40004008u)
#define UART_INTERRUPT REGISTER(0x4000400Cu)
#define UART_DIVIDER REGISTER(0x40004010u)
#define STATE_TX_FULL 1u
#define STATE_RX_FULL 2u
#define STATE_RX_OVERRUN 8u
#define CONTROL_TX 1u
#define CONTROL_RX 2u
#define CONTROL_RX_INTERRUPT 8u
#define INTERRUPT_RX 2u
#define CLOCK_HZ 25000000u
#define BAUD 115200u

#define WATCHDOG_LOAD REGISTER(0x40008000u)
#define WATCHDOG_CONTROL REGISTER(0x40008008u)
#define WATCHDOG_CLEAR REGISTER(0x4000800Cu)
#define WATCHDOG_LOCK REGISTER(0x40008C00u)
#define WATCHDOG_UNLOCK 0x1ACCE551u
#define WATCHDOG_ON 3u           /* interrupt at the first expiry, reset at the second */
#define WATCHDOG_SECONDS 20u     /* far above one layer on a slow emulator */

const struct port_board PORT_BOARD = {PORT_BOARD_NAME, PORT_RAM_BYTES, PORT_FLASH_BYTES, CLOCK_HZ};

void port_uart_interrupt(void)
{
    UART_INTERRUPT = INTERRUPT_RX;
    while (UART_STATE & STATE_RX_FULL) {
        cortexm_received((uint8_t)UART_DATA);
    }
    if (UART_STATE & STATE_RX_OVERRUN) {
        UART_STATE = STATE_RX_OVERRUN;
        cortexm_overrun();
    }
}

void port_init(void)
{
    UART_DIVIDER = CLOCK_HZ / BAUD;
    UART_CONTROL = CONTROL_TX | CONTROL_RX | CONTROL_RX_INTERRUPT;
    cortexm_enable_interrupt(PORT_UART_INTERRUPT);
    cortexm_ticks_start();
    WATCHDOG_LOCK = WATCHDOG_UNLOCK;
    WATCHDOG_LOAD = CLOCK_HZ / 2u * WATCHDOG_SECONDS;
    WATCHDOG_CONTROL = WATCHDOG_ON;
}

void port_uart_put(uint8_t byte)
{
    while (UART_STATE & STATE_TX_FULL) {
    }
    UART_DATA = byte;
}

void port_watchdog_feed(void)
{
    WATCHDOG_CLEAR = 1;
}

uint32_t port_chip_reset_reason(void)
{
    return RESET_POWER;
}

uint64_t port_ticks(void)
{
    return cortexm_ticks();
}

void port_serial(uint8_t serial[8])
{
    memset(serial, 0, 8);
}

uint32_t port_entropy(void)
{
    return 0;
}

#ifdef PORT_MODEL_MEDIUM
#define PAGES_ORIGIN (PORT_STORAGE_ORIGIN + PORT_SLOTS * PORT_SLOT_BYTES)
#define PULLED REGISTER(PORT_STORAGE_ORIGIN + PORT_PSRAM_BYTES - 4u)

static psram pages;
static port_medium page_medium;

static int is_plugged(void)
{
    return PULLED == 0;
}

const port_medium *port_page_medium(void)
{
    pages.memory = (uint8_t *)(uintptr_t)PAGES_ORIGIN;
    pages.bytes_per_s = PORT_PAGE_BYTES_PER_S;
    pages.ticks_hz = CLOCK_HZ;
    pages.ticks = cortexm_ticks;
    pages.is_there = is_plugged;
    page_medium = psram_medium(&pages, PORT_PSRAM_BYTES - PORT_SLOTS * PORT_SLOT_BYTES - 4u);
    return &page_medium;
}
#endif

void cortexm_flash_erase(uint32_t first, uint32_t size)
{
    memset((void *)(uintptr_t)first, 0xFF, size);
}

void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    memcpy((void *)(uintptr_t)at, bytes, size);
}
