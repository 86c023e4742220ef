/* nRF51822 and nRF52840: the UART without DMA, a timer, the random generator, the watchdog and the flash controller have the
 * same registers in both families. Differences (interrupt numbers, pins, page size) come from the build.
 *
 * Sources: nRF51 Series Reference Manual v3.0.1 (UART 29, TIMER 19, RNG 21, WDT 24, NVMC 6, FICR 7, POWER 12);
 * nRF52840 Product Specification v1.7 (UART 6.33, TIMER 6.30, RNG 6.19, WDT 6.36, NVMC 4.3, FICR 4.4, POWER 5.3).
 * On the nRF52840 the UART is marked deprecated in favour of UARTE but present; its interrupt per byte fits our ring. */
#include <string.h>

#include "cortexm.h"
#include "port.h"

#define POWER_RESET_REASON REGISTER(0x40000400u)
#define REASON_WATCHDOG (1u << 1)

#define CLOCK_START_CRYSTAL REGISTER(0x40000000u)

#define UART_START_RX REGISTER(0x40002000u)
#define UART_START_TX REGISTER(0x40002008u)
#define UART_RX_READY REGISTER(0x40002108u)
#define UART_TX_READY REGISTER(0x4000211Cu)
#define UART_ERROR REGISTER(0x40002124u)
#define UART_INTERRUPT_SET REGISTER(0x40002304u)
#define UART_ERROR_SOURCE REGISTER(0x40002480u)
#define UART_ENABLE REGISTER(0x40002500u)
#define UART_PIN_TX REGISTER(0x4000250Cu)
#define UART_PIN_RX REGISTER(0x40002514u)
#define UART_RX REGISTER(0x40002518u)
#define UART_TX REGISTER(0x4000251Cu)
#define UART_BAUD REGISTER(0x40002524u)
#define INTERRUPT_RX (1u << 2)
#define INTERRUPT_ERROR (1u << 9)
#define ENABLE_UART 4u
#define BAUD_115200 0x01D7E000u
#define ERROR_OVERRUN 1u

#define TIMER_START REGISTER(0x40008000u)
#define TIMER_CAPTURE REGISTER(0x40008040u)
#define TIMER_WIDTH REGISTER(0x40008508u)
#define TIMER_PRESCALER REGISTER(0x40008510u)
#define TIMER_CAPTURED REGISTER(0x40008540u)
#define WIDTH_32 3u
#define PRESCALER_1_MHZ 4u /* 16 MHz / 2^4 */

#define RNG_START REGISTER(0x4000D000u)
#define RNG_STOP REGISTER(0x4000D004u)
#define RNG_READY REGISTER(0x4000D100u)
#define RNG_VALUE REGISTER(0x4000D508u)
#define RNG_PATIENCE 1000000u

#define WATCHDOG_START REGISTER(0x40010000u)
#define WATCHDOG_SPAN REGISTER(0x40010504u)
#define WATCHDOG_ENABLE REGISTER(0x40010508u)
#define WATCHDOG_CONFIG REGISTER(0x4001050Cu)
#define WATCHDOG_PAUSE 0u /* while the core sleeps, and while a debugger holds it; after a reset it runs in sleep */
#define WATCHDOG_RELOAD REGISTER(0x40010600u)
#define WATCHDOG_RELOAD_KEY 0x6E524635u
#define WATCHDOG_SECONDS 20u

#define NVMC_READY REGISTER(0x4001E400u)
#define NVMC_CONFIG REGISTER(0x4001E504u)
#define NVMC_ERASE_PAGE REGISTER(0x4001E508u)
#define NVMC_READ 0u
#define NVMC_WRITE 1u
#define NVMC_ERASE 2u

#define FICR_DEVICE_ID 0x10000060u

const struct port_board PORT_BOARD = {PORT_BOARD_NAME, PORT_RAM_BYTES, PORT_FLASH_BYTES, 1000000u};

static uint32_t ticks_low, ticks_high;
static uint8_t transmitting;

void port_uart_interrupt(void)
{
    if (UART_ERROR) {
        UART_ERROR = 0;
        if (UART_ERROR_SOURCE & ERROR_OVERRUN) {
            cortexm_overrun();
        }
        UART_ERROR_SOURCE = UART_ERROR_SOURCE;
    }
    while (UART_RX_READY) {
        UART_RX_READY = 0;
        cortexm_received((uint8_t)UART_RX);
    }
}

static void start_uart(void)
{
    UART_PIN_TX = PORT_PIN_TX;
    UART_PIN_RX = PORT_PIN_RX;
    UART_BAUD = BAUD_115200;
    UART_ENABLE = ENABLE_UART;
    UART_INTERRUPT_SET = INTERRUPT_RX | INTERRUPT_ERROR;
    UART_START_RX = 1;
    UART_START_TX = 1;
    cortexm_enable_interrupt(PORT_UART_INTERRUPT);
}

void port_init(void)
{
    CLOCK_START_CRYSTAL = 1; /* the RC oscillator is 1.5 % off, too much in addition to the host's own error */
    TIMER_WIDTH = WIDTH_32;
    TIMER_PRESCALER = PRESCALER_1_MHZ;
    TIMER_START = 1;
    start_uart();
    WATCHDOG_SPAN = 32768u * WATCHDOG_SECONDS;
    WATCHDOG_ENABLE = 1;
    WATCHDOG_CONFIG = WATCHDOG_PAUSE; /* a silent host is not a fault, and no timer wakes the core to feed the watchdog */
    WATCHDOG_START = 1;
}

void port_uart_put(uint8_t byte)
{
    while (transmitting && !UART_TX_READY) {
    }
    transmitting = 1;
    UART_TX_READY = 0;
    UART_TX = byte;
}

/* The timer wraps every 71 minutes; this runs far more often. */
uint64_t port_ticks(void)
{
    uint32_t now;

    TIMER_CAPTURE = 1;
    now = TIMER_CAPTURED;
    if (now < ticks_low) {
        ticks_high++;
    }
    ticks_low = now;
    return (uint64_t)ticks_high << 32 | now;
}

void port_watchdog_feed(void)
{
    WATCHDOG_RELOAD = WATCHDOG_RELOAD_KEY;
    (void)port_ticks();
}

uint32_t port_chip_reset_reason(void)
{
    uint32_t found = POWER_RESET_REASON;

    POWER_RESET_REASON = found; /* writing ones clears */
    return found & REASON_WATCHDOG ? RESET_WATCHDOG : RESET_POWER;
}

void port_serial(uint8_t serial[8])
{
    uint32_t id[2] = {REGISTER(FICR_DEVICE_ID), REGISTER(FICR_DEVICE_ID + 4u)};
    memcpy(serial, id, sizeof id);
}

uint32_t port_entropy(void)
{
    uint32_t value = 0;

    RNG_START = 1;
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t patience = RNG_PATIENCE; !RNG_READY && patience > 0; patience--) {
        }
        RNG_READY = 0;
        value = value << 8 | (RNG_VALUE & 0xFFu);
    }
    RNG_STOP = 1;
    return value;
}

static void wait_for_flash(void)
{
    while (!(NVMC_READY & 1u)) {
    }
}

void cortexm_flash_erase(uint32_t first, uint32_t size)
{
    NVMC_CONFIG = NVMC_ERASE;
    wait_for_flash();
    for (uint32_t page = first; page < first + size; page += PORT_PAGE_BYTES) {
        NVMC_ERASE_PAGE = page;
        wait_for_flash();
        port_watchdog_feed();
    }
    NVMC_CONFIG = NVMC_READ;
    wait_for_flash();
}

void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    uint32_t word;

    NVMC_CONFIG = NVMC_WRITE;
    wait_for_flash();
    for (uint32_t i = 0; i + 4u <= size; i += 4u) {
        memcpy(&word, bytes + i, sizeof word);
        REGISTER(at + i) = word;
        wait_for_flash();
    }
    NVMC_CONFIG = NVMC_READ;
    wait_for_flash();
}
