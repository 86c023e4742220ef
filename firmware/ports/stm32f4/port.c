/* STM32F405/407 and F446 (Cortex-M4F): USART1 on PA9 and PA10, where the ROM boot loader listens too, or USART2 on PA2 and
 * PA3, which a Nucleo's ST-LINK passes on over USB (UM1724); QEMU's netduinoplus2.
 *
 * Source: ST RM0090 rev 19: RCC 7, GPIO 8, FLASH 3, USART 30, IWDG 21; memory map DS8626. The F446's (RM0390) are the same
 * here. 96 MHz from the internal oscillator: within its 1 % the UART needs no crystal. QEMU has neither RCC nor flash
 * controller, so waits end. */
#include <string.h>

#include "cortexm.h"
#include "port.h"

#define RCC_CONTROL REGISTER(0x40023800u)
#define RCC_PLL REGISTER(0x40023804u)
#define RCC_CONFIG REGISTER(0x40023808u)
#define RCC_AHB1 REGISTER(0x40023830u)
#define RCC_APB1 REGISTER(0x40023840u)
#define RCC_APB2 REGISTER(0x40023844u)
#define RCC_STATUS REGISTER(0x40023874u)
#define PLL_ON (1u << 24)
#define PLL_READY (1u << 25)
/* 16 MHz / 16 * 192 / 2; the top bits, a divisor of the F446 that may not be 0, are as after a reset */
#define PLL_96_MHZ (16u | 192u << 6 | 0u << 16 | 4u << 24 | 2u << 28)
#define CONFIG_PLL (2u | 5u << 10 | 4u << 13)              /* APB1 a quarter, APB2 half of the core clock */
#define CONFIG_USED (3u << 2)
#define CONFIG_USES_PLL (2u << 2)
#define AHB1_PORT_A 1u
#define APB1_USART2 (1u << 17)
#define APB2_USART1 (1u << 4)
#define STATUS_WATCHDOG (1u << 29)
#define STATUS_CLEAR (1u << 24)
#define PATIENCE 100000u

#define CORE_HZ 96000000u
#define BAUD 115200u

#define PORT_A_MODE REGISTER(0x40020000u)
#define PORT_A_PULL REGISTER(0x4002000Cu)
#define PORT_A_FUNCTION(pin) REGISTER(0x40020020u + 4u * ((pin) / 8u))
#define FUNCTION_USART 7u

#if PORT_USART == 2
#define USART 0x40004400u
#define USART_HZ (CORE_HZ / 4u)
#define PIN_TX 2u
#define PIN_RX 3u
#else
#define USART 0x40011000u
#define USART_HZ (CORE_HZ / 2u)
#define PIN_TX 9u
#define PIN_RX 10u
#endif
#define USART_STATUS REGISTER(USART)
#define USART_DATA REGISTER(USART + 4u)
#define USART_BAUD REGISTER(USART + 8u)
#define USART_CONTROL REGISTER(USART + 12u)
#define STATUS_OVERRUN (1u << 3)
#define STATUS_RECEIVED (1u << 5)
#define STATUS_EMPTY (1u << 7)
#define CONTROL_ON (1u << 13 | 1u << 5 | 1u << 3 | 1u << 2) /* enable, receive interrupt, transmitter, receiver */

#define FLASH_ACCESS REGISTER(0x40023C00u)
#define FLASH_KEY REGISTER(0x40023C04u)
#define FLASH_STATUS REGISTER(0x40023C0Cu)
#define FLASH_CONTROL REGISTER(0x40023C10u)
#define ACCESS_3_WAITS (3u | 7u << 8) /* and prefetch and both caches */
#define ACCESS_DATA_CACHE (1u << 10)
#define ACCESS_DATA_CACHE_RESET (1u << 12)
#define FLASH_BUSY (1u << 16)
#define FLASH_ERRORS 0xF2u /* operation, write protection, alignment, parallelism, sequence: one of them blocks the next write */
#define CONTROL_PROGRAM 1u
#define CONTROL_ERASE 2u
#define CONTROL_WORDS (2u << 8)
#define CONTROL_START (1u << 16)
#define CONTROL_LOCK (1u << 31)
#define FIRST_LARGE_SECTOR 5u /* sectors of 128 KB from 0x08020000 */
#define LARGE_SECTORS 0x08020000u

#define WATCHDOG_KEY REGISTER(0x40003000u)
#define WATCHDOG_PRESCALER REGISTER(0x40003004u)
#define WATCHDOG_RELOAD REGISTER(0x40003008u)
#define KEY_UNLOCK 0x5555u
#define KEY_FEED 0xAAAAu
#define KEY_START 0xCCCCu
#define DIVIDE_BY_256 6u
#define RELOAD_20_S 2500u /* of 32 kHz / 256 */

#define UNIQUE_ID 0x1FFF7A10u

const struct port_board PORT_BOARD = {PORT_BOARD_NAME, PORT_RAM_BYTES, PORT_FLASH_BYTES, CORE_HZ};

void port_uart_interrupt(void)
{
    uint32_t status = USART_STATUS;

    if (status & STATUS_OVERRUN) {
        cortexm_overrun(); /* reading the data clears it */
    }
    if (status & (STATUS_RECEIVED | STATUS_OVERRUN)) {
        cortexm_received((uint8_t)USART_DATA);
    }
}

static void wait_for(uint32_t address, uint32_t mask, uint32_t value)
{
    for (uint32_t patience = PATIENCE; (REGISTER(address) & mask) != value && patience > 0; patience--) {
    }
}

static void start_clocks(void)
{
    FLASH_ACCESS = ACCESS_3_WAITS;
    RCC_PLL = PLL_96_MHZ;
    RCC_CONTROL |= PLL_ON;
    wait_for(0x40023800u, PLL_READY, PLL_READY);
    RCC_CONFIG = CONFIG_PLL;
    wait_for(0x40023808u, CONFIG_USED, CONFIG_USES_PLL);
    RCC_AHB1 |= AHB1_PORT_A;
#if PORT_USART == 2
    RCC_APB1 |= APB1_USART2;
#else
    RCC_APB2 |= APB2_USART1;
#endif
}

static void use_pin(uint32_t pin)
{
    uint32_t shift = 4u * (pin % 8u);

    PORT_A_FUNCTION(pin) = (PORT_A_FUNCTION(pin) & ~(0xFu << shift)) | FUNCTION_USART << shift;
    PORT_A_MODE = (PORT_A_MODE & ~(3u << 2u * pin)) | 2u << 2u * pin;
    PORT_A_PULL = (PORT_A_PULL & ~(3u << 2u * pin)) | 1u << 2u * pin; /* an open line must not look like data */
}

void port_init(void)
{
    start_clocks();
    use_pin(PIN_TX);
    use_pin(PIN_RX);
    USART_BAUD = (USART_HZ + BAUD / 2u) / BAUD;
    USART_CONTROL = CONTROL_ON;
    cortexm_enable_interrupt(PORT_UART_INTERRUPT);
    cortexm_ticks_start();
    WATCHDOG_KEY = KEY_UNLOCK;
    WATCHDOG_PRESCALER = DIVIDE_BY_256;
    WATCHDOG_RELOAD = RELOAD_20_S;
    WATCHDOG_KEY = KEY_START;
}

void port_uart_put(uint8_t byte)
{
    while (!(USART_STATUS & STATUS_EMPTY)) {
    }
    USART_DATA = byte;
}

void port_watchdog_feed(void)
{
    WATCHDOG_KEY = KEY_FEED;
}

uint32_t port_chip_reset_reason(void)
{
    uint32_t status = RCC_STATUS;

    RCC_STATUS = status | STATUS_CLEAR;
    return status & STATUS_WATCHDOG ? RESET_WATCHDOG : RESET_POWER;
}

uint64_t port_ticks(void)
{
    return cortexm_ticks();
}

#if PORT_EMULATED /* no factory id, and reading it faults */
void port_serial(uint8_t serial[8])
{
    memset(serial, 0, 8);
}
#else
void port_serial(uint8_t serial[8])
{
    uint32_t words[3] = {REGISTER(UNIQUE_ID), REGISTER(UNIQUE_ID + 4u), REGISTER(UNIQUE_ID + 8u)};

    words[0] ^= words[2]; /* 96 bits into 64: position on the wafer with the lot */
    memcpy(serial, words, 8);
}
#endif

uint32_t port_entropy(void)
{
    return 0;
}

static void flash_wait(void)
{
    while (FLASH_STATUS & FLASH_BUSY) {
        port_watchdog_feed(); /* a sector takes up to two seconds */
    }
}

static void flash_unlock(void)
{
    flash_wait();
    FLASH_STATUS = FLASH_ERRORS; /* writing ones clears; later failures are detected by reading back (driver.c) */
    FLASH_KEY = 0x45670123u;
    FLASH_KEY = 0xCDEF89ABu;
}

/* RM0090 3.5.5: lines of the data cache that were read before an erase or a write stay in the cache and are stale. */
static void flash_lock(void)
{
    FLASH_CONTROL = CONTROL_LOCK;
    FLASH_ACCESS &= ~ACCESS_DATA_CACHE;
    FLASH_ACCESS |= ACCESS_DATA_CACHE_RESET;
    FLASH_ACCESS &= ~ACCESS_DATA_CACHE_RESET;
    FLASH_ACCESS |= ACCESS_DATA_CACHE;
}

void cortexm_flash_erase(uint32_t first, uint32_t size)
{
    flash_unlock();
    for (uint32_t at = first; at < first + size; at += PORT_PAGE_BYTES) {
        uint32_t sector = FIRST_LARGE_SECTOR + (at - LARGE_SECTORS) / PORT_PAGE_BYTES;
        FLASH_CONTROL = CONTROL_ERASE | CONTROL_WORDS | sector << 3;
        FLASH_CONTROL |= CONTROL_START;
        flash_wait();
    }
    flash_lock();
}

void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    uint32_t word;

    flash_unlock();
    FLASH_CONTROL = CONTROL_PROGRAM | CONTROL_WORDS;
    for (uint32_t i = 0; i + 4u <= size; i += 4u) {
        memcpy(&word, bytes + i, sizeof word);
        REGISTER(at + i) = word;
        flash_wait();
    }
    flash_lock();
}
