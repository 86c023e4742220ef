/* What all Cortex-M ports share: start-up, stack painting, SysTick, reset. A port adds its UART, clocks and storage.
 *
 * Register addresses: ARMv6-M and ARMv7-M Architecture Reference Manuals, B3.2 (system control) and B3.3 (SysTick). */
#ifndef PORT_CORTEXM_H
#define PORT_CORTEXM_H

#include <stdint.h>

#include "receive_ring.h"

#define REGISTER(address) (*(volatile uint32_t *)(uintptr_t)(address))

#define NVIC_ENABLE 0xE000E100u

static inline void cortexm_enable_interrupt(uint32_t number)
{
    REGISTER(NVIC_ENABLE + 4u * (number / 32u)) = 1u << (number % 32u);
}

/* Sleep until an interrupt, unless a byte is waiting. With interrupts held off between the look and the sleep, a byte
 * that arrives in between still wakes: WFI returns for a pending interrupt even while it is masked. */
static inline void cortexm_wait(const struct receive_ring *ring)
{
    __asm__ volatile("cpsid i" ::: "memory");
    if (ring->head == ring->tail) {
        __asm__ volatile("wfi");
    }
    __asm__ volatile("cpsie i" ::: "memory");
}

/* The port's receive interrupt, the only external one that is ever enabled. */
void port_uart_interrupt(void);
/* Cause that the chip reports, RESET_POWER if it cannot tell; a fault or a requested reset is noticed without it. */
uint32_t port_chip_reset_reason(void);

/* Ticks from SysTick at the core clock, for chips without a better timer. Start once, in port_init. */
void cortexm_ticks_start(void);
uint64_t cortexm_ticks(void);

#endif
