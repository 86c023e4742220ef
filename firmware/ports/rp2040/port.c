/* Raspberry Pi RP2040 (Cortex-M0+, the Pico): USB, or UART0 on GP0 and GP1; 125 MHz, sectors of the flash for the snapshots.
 *
 * Source: RP2040 Datasheet: PSM 2.13, resets 2.14, clocks 2.15, crystal 2.16, PLL 2.18, GPIO 2.19, boot ROM 2.8.3,
 * UART 4.2, USB 4.1 (usb.c), watchdog 4.7, ring oscillator 2.17; erratum RP2040-E1. The second core stays in the boot ROM. */
#include <string.h>

#include "cortexm.h"
#include "port.h"
#include "usb.h"

#define CLEAR_BITS 0x3000u /* alias of a register that clears the bits written as 1 */

#define CORE_HZ 125000000u
#define CRYSTAL_MHZ 12u
#define BAUD 115200u

#define RESETS 0x4000C000u
#define RESETS_DONE REGISTER(RESETS + 8u)
#define RESETS_SET REGISTER(RESETS + 0x2000u)
#define RESETS_CLEAR REGISTER(RESETS + CLEAR_BITS)
#define RESET_PINS (1u << 5 | 1u << 8)
#define RESET_PLL_SYSTEM (1u << 12)
#define RESET_PLL_USB (1u << 13)
#define RESET_UART (1u << 22)
#define RESET_USB (1u << 24)

#define CRYSTAL_CONTROL REGISTER(0x40024000u)
#define CRYSTAL_STATUS REGISTER(0x40024004u)
#define CRYSTAL_DELAY REGISTER(0x4002400Cu)
#define CRYSTAL_ON (0xFABu << 12 | 0xAA0u)
#define CRYSTAL_STABLE (1u << 31)
#define CRYSTAL_64_MS 3000u /* of 256 cycles; some boards' crystals start slowly */

#define PLL_SYSTEM 0x40028000u
#define PLL_USB 0x4002C000u
#define PLL_STATUS(pll) REGISTER(pll)
#define PLL_POWER_CLEAR(pll) REGISTER((pll) + 4u + CLEAR_BITS)
#define PLL_FEEDBACK(pll) REGISTER((pll) + 8u)
#define PLL_DIVIDERS(pll) REGISTER((pll) + 12u)
#define PLL_LOCKED (1u << 31)
#define PLL_POWER (1u | 1u << 5)
#define PLL_POWER_DIVIDERS (1u << 3)
#define PLL_BY_12 (6u << 16 | 2u << 12)
#define PLL_BY_25 (5u << 16 | 5u << 12)

#define CLOCK_REFERENCE REGISTER(0x40008030u)
#define CLOCK_REFERENCE_USED REGISTER(0x40008038u)
#define CLOCK_SYSTEM REGISTER(0x4000803Cu)
#define CLOCK_SYSTEM_USED REGISTER(0x40008044u)
#define CLOCK_PERIPHERALS REGISTER(0x40008048u)
#define REFERENCE_CRYSTAL 2u
#define SYSTEM_REFERENCE 0u
#define SYSTEM_PLL 1u
#define CLOCK_USB REGISTER(0x40008054u)
#define FIRST_SOURCE (1u << 11) /* on, from the system's clock or, for USB, its PLL */

#define PIN_FUNCTION(pin) REGISTER(0x40014004u + 8u * (pin))
#define PIN_PAD(pin) REGISTER(0x4001C004u + 4u * (pin))
#define PIN_TX 0u
#define PIN_RX 1u
#define FUNCTION_UART 2u
#define PAD_PULL_UP 0x5Au /* input on, 4 mA, Schmitt trigger: an open line must not look like data */

#define UART_DATA REGISTER(0x40034000u)
#define UART_FLAGS REGISTER(0x40034018u)
#define UART_DIVIDER REGISTER(0x40034024u)
#define UART_DIVIDER_64TH REGISTER(0x40034028u)
#define UART_LINE REGISTER(0x4003402Cu)
#define UART_CONTROL REGISTER(0x40034030u)
#define UART_INTERRUPTS REGISTER(0x40034038u)
#define DATA_OVERRUN (1u << 11)
#define FLAG_BUSY (1u << 3)
#define FLAG_NOTHING_RECEIVED (1u << 4)
#define LINE_8N1_FIFO (3u << 5 | 1u << 4)
#define CONTROL_ON (1u << 9 | 1u << 8 | 1u)
#define INTERRUPT_RECEIVED (1u << 6 | 1u << 4) /* the FIFO is at its mark, or holds something for 32 bits' time */

#define WATCHDOG_CONTROL REGISTER(0x40058000u)
#define WATCHDOG_LOAD REGISTER(0x40058004u)
#define WATCHDOG_REASON REGISTER(0x40058008u)
#define WATCHDOG_TICK REGISTER(0x4005802Cu)
#define WATCHDOG_ENABLE (1u << 30 | 7u << 24) /* paused by a debugger */
#define WATCHDOG_8_S 0xFFFFFFu /* the longest: microseconds, counted twice each (E1) */
#define TICK_ENABLE (1u << 9)
#define REASON_TIMER 1u
#define PSM_WATCHDOG REGISTER(0x40010008u)
#define PSM_ALL_BUT_OSCILLATORS 0x1FFFCu

#define RANDOM_BIT REGISTER(0x4006001Cu)

#define FLASH 0x10000000u
#define FLASH_PAGE_BYTES 256u
#define SECTOR_ERASE 0x20u
#define BOOT_WORDS 64u
#define READ_UNIQUE_ID 0x4Bu
#define ID_BEFORE 5u /* the command and four dummy bytes */
#define ID_BYTES 8u
#define SSI_STATUS REGISTER(0x18000028u)
#define SSI_DATA REGISTER(0x18000060u)
#define SSI_HAS_ROOM (1u << 1)
#define SSI_HAS_BYTE (1u << 3)
#define FLASH_SELECT REGISTER(0x4001800Cu) /* control of the flash's select pin */
#define SELECT_OVERRIDE 0x300u
#define SELECT_LOW 0x200u
#define SELECT_HIGH 0x300u
#define IN_RAM __attribute__((section(".ram_code"), noinline, long_call))

const struct port_board PORT_BOARD = {PORT_BOARD_NAME, PORT_RAM_BYTES, PORT_FLASH_BYTES, CORE_HZ};

static uint32_t boot_copy[BOOT_WORDS]; /* used while the flash cannot be read */
static volatile uint8_t asked_by_usb;  /* where the last byte came from: answers go there */
static uint8_t flash_id[ID_BYTES];     /* the chip itself has no number */

void port_uart_interrupt(void)
{
    while (!(UART_FLAGS & FLAG_NOTHING_RECEIVED)) {
        uint32_t data = UART_DATA;
        if (data & DATA_OVERRUN) {
            cortexm_overrun(); /* a byte after this one was lost; the flag is cleared with the next */
        }
        cortexm_received((uint8_t)data);
        asked_by_usb = 0;
    }
    if (usb_interrupt()) {
        asked_by_usb = 1;
    }
}

static void leave_reset(uint32_t parts)
{
    RESETS_CLEAR = parts;
    while ((RESETS_DONE & parts) != parts) {
    }
}

/* Let a PLL give the crystal's 12 MHz times `times`, by `dividers`. */
static void start_pll(uint32_t pll, uint32_t reset, uint32_t times, uint32_t dividers)
{
    RESETS_SET = reset;
    leave_reset(reset);
    PLL_STATUS(pll) = 1; /* the crystal's clock, undivided */
    PLL_FEEDBACK(pll) = times;
    PLL_POWER_CLEAR(pll) = PLL_POWER;
    while (!(PLL_STATUS(pll) & PLL_LOCKED)) {
    }
    PLL_DIVIDERS(pll) = dividers;
    PLL_POWER_CLEAR(pll) = PLL_POWER_DIVIDERS;
}

static void start_clocks(void)
{
    CRYSTAL_DELAY = CRYSTAL_64_MS;
    CRYSTAL_CONTROL = CRYSTAL_ON;
    while (!(CRYSTAL_STATUS & CRYSTAL_STABLE)) {
    }
    CLOCK_SYSTEM = SYSTEM_REFERENCE; /* after a reset of the core alone it may still run from the PLL */
    while (CLOCK_SYSTEM_USED != 1u << SYSTEM_REFERENCE) {
    }
    CLOCK_REFERENCE = REFERENCE_CRYSTAL;
    while (CLOCK_REFERENCE_USED != 1u << REFERENCE_CRYSTAL) {
    }
    start_pll(PLL_SYSTEM, RESET_PLL_SYSTEM, 125, PLL_BY_12);
    start_pll(PLL_USB, RESET_PLL_USB, 100, PLL_BY_25);
    CLOCK_SYSTEM = SYSTEM_PLL;
    while (CLOCK_SYSTEM_USED != 1u << SYSTEM_PLL) {
    }
    CLOCK_PERIPHERALS = FIRST_SOURCE;
    CLOCK_USB = FIRST_SOURCE;
}

static void start_uart(void)
{
    uint32_t divider = (CORE_HZ * 4u + BAUD / 2u) / BAUD; /* in 64ths of 16 clocks, 4.2.7.1 */

    RESETS_SET = RESET_UART;
    leave_reset(RESET_UART | RESET_PINS);
    UART_DIVIDER = divider / 64u;
    UART_DIVIDER_64TH = divider % 64u;
    UART_LINE = LINE_8N1_FIFO;
    UART_CONTROL = CONTROL_ON;
    PIN_PAD(PIN_RX) = PAD_PULL_UP;
    PIN_FUNCTION(PIN_TX) = FUNCTION_UART;
    PIN_FUNCTION(PIN_RX) = FUNCTION_UART;
    UART_INTERRUPTS = INTERRUPT_RECEIVED;
    cortexm_enable_interrupt(PORT_UART_INTERRUPT);
}

static void start_watchdog(void)
{
    WATCHDOG_TICK = CRYSTAL_MHZ | TICK_ENABLE;
    PSM_WATCHDOG = PSM_ALL_BUT_OSCILLATORS;
    WATCHDOG_LOAD = WATCHDOG_8_S;
    WATCHDOG_CONTROL = WATCHDOG_ENABLE;
}

/* Functions of the boot ROM, 2.8.3.1.3. */
struct flash_functions {
    void (*connect)(void);
    void (*leave_xip)(void);
    void (*erase)(uint32_t offset, uint32_t size, uint32_t block, uint8_t command);
    void (*program)(uint32_t offset, const uint8_t *bytes, uint32_t size);
    void (*flush_cache)(void);
};

static uintptr_t rom_function(char first, char second)
{
    static const volatile uintptr_t tables = 0x14u; /* volatile: GCC takes a constant this low for a null pointer */
    const uint16_t *rom = (const uint16_t *)tables;
    uintptr_t (*find)(uintptr_t table, uint32_t code) = (uintptr_t(*)(uintptr_t, uint32_t))(uintptr_t)rom[2];

    return find(rom[0], (uint32_t)second << 8 | (uint32_t)first);
}

static struct flash_functions find_flash_functions(void)
{
    return (struct flash_functions){
        .connect = (void (*)(void))rom_function('I', 'F'),
        .leave_xip = (void (*)(void))rom_function('E', 'X'),
        .erase = (void (*)(uint32_t, uint32_t, uint32_t, uint8_t))rom_function('R', 'E'),
        .program = (void (*)(uint32_t, const uint8_t *, uint32_t))rom_function('R', 'P'),
        .flush_cache = (void (*)(void))rom_function('F', 'C'),
    };
}

static void IN_RAM stop_reading(const struct flash_functions *rom)
{
    __asm__ volatile("cpsid i" ::: "memory");
    rom->connect();
    rom->leave_xip();
}

static void IN_RAM read_again(const struct flash_functions *rom)
{
    void (*enter_xip)(void) = (void (*)(void))((uintptr_t)boot_copy | 1u);

    rom->flush_cache();
    enter_xip();
    __asm__ volatile("cpsie i" ::: "memory");
}

/* Write a page at `offset`, or erase the sector there if `page` is null. The flash cannot be read meanwhile:
 * interrupts, whose table lies in it, are off, and only RAM and ROM are called. */
static void IN_RAM change_flash(const struct flash_functions *rom, uint32_t offset, const uint8_t *page)
{
    stop_reading(rom);
    if (page == 0) {
        rom->erase(offset, PORT_PAGE_BYTES, PORT_PAGE_BYTES, SECTOR_ERASE);
    } else {
        rom->program(offset, page, FLASH_PAGE_BYTES);
    }
    read_again(rom);
}

/* Exchange bytes with the flash chip one by one, in the mode that the ROM left it in: a serial line of eight bits. */
static void IN_RAM read_flash_id(const struct flash_functions *rom)
{
    stop_reading(rom);
    FLASH_SELECT = (FLASH_SELECT & ~SELECT_OVERRIDE) | SELECT_LOW;
    for (uint32_t i = 0; i < ID_BEFORE + ID_BYTES; i++) {
        while (!(SSI_STATUS & SSI_HAS_ROOM)) {
        }
        SSI_DATA = i == 0 ? READ_UNIQUE_ID : 0;
        while (!(SSI_STATUS & SSI_HAS_BYTE)) {
        }
        uint32_t byte = SSI_DATA;
        if (i >= ID_BEFORE) {
            flash_id[i - ID_BEFORE] = (uint8_t)byte;
        }
    }
    FLASH_SELECT = (FLASH_SELECT & ~SELECT_OVERRIDE) | SELECT_HIGH;
    read_again(rom);
}


void port_init(void)
{
    struct flash_functions rom = find_flash_functions();

    memcpy(boot_copy, (const void *)(uintptr_t)FLASH, sizeof boot_copy);
    read_flash_id(&rom);
    start_clocks();
    start_uart();
    RESETS_SET = RESET_USB;
    leave_reset(RESET_USB);
    usb_start(flash_id, sizeof flash_id);
    cortexm_ticks_start();
    start_watchdog();
}

void port_uart_put(uint8_t byte)
{
    if (asked_by_usb) {
        usb_put(byte);
        return;
    }
    while (UART_FLAGS & FLAG_BUSY) { /* byte by byte: a reset must not find a full FIFO */
    }
    UART_DATA = byte;
}

void port_watchdog_feed(void)
{
    WATCHDOG_LOAD = WATCHDOG_8_S;
}

uint32_t port_chip_reset_reason(void)
{
    return WATCHDOG_REASON & REASON_TIMER ? RESET_WATCHDOG : RESET_POWER;
}

uint64_t port_ticks(void)
{
    return cortexm_ticks();
}

void port_serial(uint8_t serial[8])
{
    memcpy(serial, flash_id, sizeof flash_id);
}

uint32_t port_entropy(void)
{
    uint32_t value = 0;

    for (uint32_t bit = 0; bit < 32u; bit++) {
        value = value << 1 | (RANDOM_BIT & 1u);
    }
    return value;
}

void cortexm_flash_erase(uint32_t first, uint32_t size)
{
    struct flash_functions rom = find_flash_functions();

    for (uint32_t sector = first; sector < first + size; sector += PORT_PAGE_BYTES) {
        change_flash(&rom, sector - FLASH, 0);
        port_watchdog_feed();
    }
}

void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    struct flash_functions rom = find_flash_functions();
    uint8_t page[FLASH_PAGE_BYTES];

    while (size > 0) {
        uint32_t start = at % FLASH_PAGE_BYTES;
        uint32_t part = size < FLASH_PAGE_BYTES - start ? size : FLASH_PAGE_BYTES - start;
        memset(page, 0xFF, sizeof page); /* ones leave the flash as it is */
        memcpy(page + start, bytes, part);
        change_flash(&rom, at - start - FLASH, page);
        at += part;
        bytes += part;
        size -= part;
    }
}
