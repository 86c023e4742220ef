/* Shared by all Cortex-M ports: start-up, stack painting, SysTick, reset, the receive ring and the
 * snapshot slots. A port adds its UART, clocks and flash controller.
 *
 * Register addresses: ARMv6-M and ARMv7-M Architecture Reference Manuals, B3.2 (system control) and B3.3 (SysTick). */
#ifndef PORT_CORTEXM_H
#define PORT_CORTEXM_H

#include <stdint.h>

#define REGISTER(address) (*(volatile uint32_t *)(uintptr_t)(address))

#define NVIC_ENABLE 0xE000E100u

static inline void cortexm_enable_interrupt(uint32_t number)
{
    REGISTER(NVIC_ENABLE + 4u * (number / 32u)) = 1u << (number % 32u);
}

/* Called by a port's UART interrupt: with a received byte, or to report that the UART lost one. */
void cortexm_received(uint8_t byte);
void cortexm_overrun(void);

/* Implemented by a port's flash driver for the snapshot slots: erase whole pages, write words that are erased.
 * driver.c checks the range and reads back. */
void cortexm_flash_erase(uint32_t first, uint32_t size);
void cortexm_flash_write(uint32_t at, const uint8_t *bytes, uint32_t size);

/* The port's receive interrupt, the only external one that is ever enabled. */
void port_uart_interrupt(void);
/* Return the cause that the chip reports, RESET_POWER if it cannot tell. Faults and requested resets are noticed
 * without it. */
uint32_t port_chip_reset_reason(void);

/* Ticks from SysTick at the core clock, for chips without a better timer. Start once, in port_init. */
void cortexm_ticks_start(void);
uint64_t cortexm_ticks(void);

#endif
