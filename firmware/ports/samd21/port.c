/* Microchip SAMD21 (Cortex-M0+): SERCOM USART, 48 MHz from the 32 kHz crystal, rows of flash for the snapshots.
 *
 * Source: SAM D21/DA1 Family Data Sheet DS40001882: PM 16, GCLK 15, SYSCTRL 17, NVMCTRL 22, PORT 23, SERCOM USART 26,
 * WDT 18, memories 10. Clock start-up order as in section 17.6.7.1.2 (closed loop), errata 9905 on DFLLCTRL. */
#include <string.h>

#include "cortexm.h"
#include "port.h"

#define REGISTER8(address) (*(volatile uint8_t *)(uintptr_t)(address))
#define REGISTER16(address) (*(volatile uint16_t *)(uintptr_t)(address))

#define CLOCK_HZ 48000000u
#define CRYSTAL_HZ 32768u
#define BAUD 115200u

#define PM_APBC_MASK REGISTER(0x40000420u)
#define PM_RESET_CAUSE REGISTER8(0x40000438u)
#define CAUSE_WATCHDOG 0x20u

#define SYSCTRL_STATUS REGISTER(0x4000080Cu)
#define STATUS_XOSC32K_READY (1u << 1)
#define STATUS_DFLL_READY (1u << 4)
#define STATUS_DFLL_LOCKED (3u << 6)
#define SYSCTRL_XOSC32K REGISTER16(0x40000814u)
#define XOSC32K_ON (6u << 8 | 1u << 3 | 1u << 2) /* 65,536 cycles of start-up, 32 kHz output, crystal */
#define XOSC32K_ENABLE (1u << 1)
#define SYSCTRL_DFLL_CONTROL REGISTER16(0x40000824u)
#define DFLL_ENABLE (1u << 1)
#define DFLL_CLOSED_LOOP (1u << 2)
#define DFLL_WAIT_LOCK (1u << 11)
#define DFLL_NO_QUICK_LOCK (1u << 8)
#define SYSCTRL_DFLL_MULTIPLY REGISTER(0x4000082Cu)

#define GCLK_CONTROL REGISTER8(0x40000C00u)
#define GCLK_RESET 1u
#define GCLK_STATUS REGISTER8(0x40000C01u)
#define GCLK_BUSY 0x80u
#define GCLK_CLOCK REGISTER16(0x40000C02u)
#define GCLK_GENERATOR REGISTER(0x40000C04u)
#define GCLK_DIVIDER REGISTER(0x40000C08u)
#define CLOCK_ENABLE (1u << 14)
#define GENERATOR_ENABLE (1u << 16)
#define GENERATOR_POWER_OF_TWO (1u << 20)
#define SOURCE_ULP32K (3u << 8)
#define SOURCE_XOSC32K (5u << 8)
#define SOURCE_DFLL (7u << 8)
#define CLOCK_DFLL_REFERENCE 0x00u
#define CLOCK_WATCHDOG 0x03u
#define CLOCK_SERCOM_CORE (0x14u + PORT_SERCOM)

#define WATCHDOG_CONTROL REGISTER8(0x40001000u)
#define WATCHDOG_CONFIG REGISTER8(0x40001001u)
#define WATCHDOG_BUSY REGISTER8(0x40001007u)
#define WATCHDOG_CLEAR REGISTER8(0x40001008u)
#define WATCHDOG_KEY 0xA5u
#define WATCHDOG_16_S 0x0Bu /* 16,384 cycles of 1,024 Hz, the longest */

#define NVM_COMMAND REGISTER16(0x41004000u)
#define NVM_CONTROL REGISTER(0x41004004u)
#define NVM_READY REGISTER8(0x41004014u)
#define NVM_ADDRESS REGISTER(0x4100401Cu)
#define NVM_ONE_WAIT_STATE (1u << 1)
#define NVM_MANUAL_WRITE (1u << 7)
#define COMMAND_KEY 0xA500u
#define COMMAND_ERASE_ROW 0x02u
#define COMMAND_WRITE_PAGE 0x04u
#define COMMAND_CLEAR_BUFFER 0x44u
#define FLASH_PAGE_BYTES 64u

#define PORT_GROUP(pin) (0x41004400u + 0x80u * ((pin) / 32u))
#define PIN_MULTIPLEX(pin) REGISTER8(PORT_GROUP(pin) + 0x30u + (pin) % 32u / 2u)
#define PIN_CONFIG(pin) REGISTER8(PORT_GROUP(pin) + 0x40u + (pin) % 32u)
#define PIN_PERIPHERAL 1u

#define SERCOM (0x42000800u + 0x400u * PORT_SERCOM)
#define USART_CONTROL_A REGISTER(SERCOM)
#define USART_CONTROL_B REGISTER(SERCOM + 0x04u)
#define USART_BAUD REGISTER16(SERCOM + 0x0Cu)
#define USART_INTERRUPT_SET REGISTER8(SERCOM + 0x16u)
#define USART_FLAGS REGISTER8(SERCOM + 0x18u)
#define USART_STATUS REGISTER16(SERCOM + 0x1Au)
#define USART_BUSY REGISTER(SERCOM + 0x1Cu)
#define USART_DATA REGISTER16(SERCOM + 0x28u)
#define CONTROL_A_RESET 1u
#define CONTROL_A_ENABLE 2u
#define CONTROL_A_INTERNAL_CLOCK (1u << 2)
#define CONTROL_A_LSB_FIRST (1u << 30)
#define CONTROL_B_TX (1u << 16)
#define CONTROL_B_RX (1u << 17)
#define FLAG_EMPTY 1u
#define FLAG_SENT 2u
#define FLAG_RECEIVED 4u
#define STATUS_OVERFLOW 4u

#define SERIAL_NUMBER_0 0x0080A00Cu
#define SERIAL_NUMBER_1 0x0080A040u

const struct port_board PORT_BOARD = {PORT_BOARD_NAME, PORT_RAM_BYTES, PORT_FLASH_BYTES, CLOCK_HZ};

void port_uart_interrupt(void)
{
    while (USART_FLAGS & FLAG_RECEIVED) {
        if (USART_STATUS & STATUS_OVERFLOW) {
            USART_STATUS = STATUS_OVERFLOW;
            cortexm_overrun();
        }
        cortexm_received((uint8_t)USART_DATA);
    }
}

static void wait_for_clocks(void)
{
    while (GCLK_STATUS & GCLK_BUSY) {
    }
}

static void wait_for_system(uint32_t bits)
{
    while ((SYSCTRL_STATUS & bits) != bits) {
    }
}

static void set_generator(uint32_t number, uint32_t divider, uint32_t source)
{
    GCLK_DIVIDER = number | divider << 8;
    wait_for_clocks();
    GCLK_GENERATOR = number | source | GENERATOR_ENABLE;
    wait_for_clocks();
}

static void connect_clock(uint32_t consumer, uint32_t generator)
{
    GCLK_CLOCK = (uint16_t)(consumer | generator << 8 | CLOCK_ENABLE);
    wait_for_clocks();
}

static void start_clocks(void)
{
    NVM_CONTROL |= NVM_ONE_WAIT_STATE; /* above 24 MHz */
    GCLK_CONTROL = GCLK_RESET; /* a boot loader may have left the core on the DFLL that is about to be set up */
    while ((GCLK_CONTROL & GCLK_RESET) || (GCLK_STATUS & GCLK_BUSY)) {
    }
    SYSCTRL_XOSC32K = XOSC32K_ON;
    SYSCTRL_XOSC32K |= XOSC32K_ENABLE;
    wait_for_system(STATUS_XOSC32K_READY);
    set_generator(1, 0, SOURCE_XOSC32K);
    connect_clock(CLOCK_DFLL_REFERENCE, 1);
    SYSCTRL_DFLL_CONTROL = DFLL_ENABLE; /* errata 9905: leave on-demand mode before any other access */
    wait_for_system(STATUS_DFLL_READY);
    SYSCTRL_DFLL_MULTIPLY = 31u << 26 | 511u << 16 | (CLOCK_HZ + CRYSTAL_HZ / 2u) / CRYSTAL_HZ;
    wait_for_system(STATUS_DFLL_READY);
    SYSCTRL_DFLL_CONTROL |= DFLL_CLOSED_LOOP | DFLL_WAIT_LOCK | DFLL_NO_QUICK_LOCK;
    wait_for_system(STATUS_DFLL_READY);
    wait_for_system(STATUS_DFLL_LOCKED);
    set_generator(0, 0, SOURCE_DFLL);
}

static void use_pin(uint32_t pin)
{
    uint32_t shift = pin % 2u * 4u;

    PIN_MULTIPLEX(pin) = (uint8_t)((PIN_MULTIPLEX(pin) & ~(0xFu << shift)) | PORT_PIN_FUNCTION << shift);
    PIN_CONFIG(pin) = PIN_PERIPHERAL;
}

static void start_uart(void)
{
    PM_APBC_MASK |= 1u << (2u + PORT_SERCOM);
    connect_clock(CLOCK_SERCOM_CORE, 0);
    use_pin(PORT_PIN_TX);
    use_pin(PORT_PIN_RX);
    USART_CONTROL_A = CONTROL_A_RESET;
    while (USART_BUSY) {
    }
    USART_CONTROL_A = CONTROL_A_INTERNAL_CLOCK | CONTROL_A_LSB_FIRST | PORT_PADS_TX << 16 | PORT_PAD_RX << 20;
    /* arithmetic baud rate, 26.6.2.3: 65536 * (1 - 16 * baud / clock) */
    USART_BAUD = (uint16_t)(65536u - (uint32_t)(65536ull * 16u * BAUD / CLOCK_HZ));
    USART_CONTROL_B = CONTROL_B_TX | CONTROL_B_RX;
    while (USART_BUSY) {
    }
    USART_INTERRUPT_SET = FLAG_RECEIVED;
    USART_CONTROL_A |= CONTROL_A_ENABLE;
    while (USART_BUSY) {
    }
    cortexm_enable_interrupt(PORT_UART_INTERRUPT);
}

static void start_watchdog(void)
{
    set_generator(2, 4, SOURCE_ULP32K | GENERATOR_POWER_OF_TWO); /* 32,768 Hz / 2^(4 + 1) */
    connect_clock(CLOCK_WATCHDOG, 2);
    WATCHDOG_CONFIG = WATCHDOG_16_S;
    WATCHDOG_CONTROL = 2;
}

void port_init(void)
{
    start_clocks();
    start_uart();
    cortexm_ticks_start();
    start_watchdog();
}

void port_uart_put(uint8_t byte)
{
    while (!(USART_FLAGS & FLAG_EMPTY)) {
    }
    USART_DATA = byte;
}

void port_watchdog_feed(void)
{
    if (!WATCHDOG_BUSY) { /* a clear still on its way to the slow clock is as good as another one */
        WATCHDOG_CLEAR = WATCHDOG_KEY;
    }
}

uint32_t port_chip_reset_reason(void)
{
    return PM_RESET_CAUSE & CAUSE_WATCHDOG ? RESET_WATCHDOG : RESET_POWER;
}

uint64_t port_ticks(void)
{
    return cortexm_ticks();
}

void port_serial(uint8_t serial[8])
{
    uint32_t words[2] = {REGISTER(SERIAL_NUMBER_0), REGISTER(SERIAL_NUMBER_1)};
    memcpy(serial, words, sizeof words);
}

uint32_t port_entropy(void)
{
    return 0; /* no random generator on this chip; the host's token makes the nonce */
}

static void run_command(uint32_t command)
{
    while (!(NVM_READY & 1u)) {
    }
    NVM_COMMAND = (uint16_t)(COMMAND_KEY | command);
    while (!(NVM_READY & 1u)) {
    }
}

void cortexm_flash_erase(uint32_t first, uint32_t size)
{
    for (uint32_t row = first; row < first + size; row += PORT_PAGE_BYTES) {
        NVM_ADDRESS = row / 2u; /* the controller counts half words */
        run_command(COMMAND_ERASE_ROW);
        port_watchdog_feed();
    }
}

void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    uint32_t word;

    NVM_CONTROL |= NVM_MANUAL_WRITE;
    run_command(COMMAND_CLEAR_BUFFER);
    for (uint32_t i = 0; i + 4u <= size; i += 4u) {
        memcpy(&word, bytes + i, sizeof word);
        REGISTER(at + i) = word; /* into the page buffer; words not written stay as they are in the flash */
        if ((at + i + 4u) % FLASH_PAGE_BYTES == 0 || i + 8u > size) {
            NVM_ADDRESS = (at + i) / 2u;
            run_command(COMMAND_WRITE_PAGE);
            run_command(COMMAND_CLEAR_BUFFER);
        }
    }
}
