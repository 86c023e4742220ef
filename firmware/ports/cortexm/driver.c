/* The half of port.h that does not depend on the chip: the receive ring, and the snapshot slots as addresses.
 *
 * A port's UART interrupt hands over bytes (`cortexm_received`), its flash driver erases and writes (`cortexm_flash_*`). */
#include <string.h>

#include "cortexm.h"
#include "port.h"
#include "receive_ring.h"

static struct receive_ring ring;

void cortexm_received(uint8_t byte)
{
    receive_ring_put(&ring, byte);
}

void cortexm_overrun(void)
{
    ring.overruns++;
}

int port_uart_get(void)
{
    return receive_ring_get(&ring);
}

uint32_t port_uart_overruns(void)
{
    return ring.overruns;
}

int port_uart_attention(void)
{
    return receive_ring_attention(&ring);
}

/* Sleep until an interrupt, unless a byte is waiting. Interrupts are disabled between the check and the sleep. A
 * byte that arrives in between still wakes the core: WFI returns for a pending interrupt even while it is masked. */
void port_idle(void)
{
    __asm__ volatile("cpsid i" ::: "memory");
    if (ring.head == ring.tail) {
        __asm__ volatile("wfi");
    }
    __asm__ volatile("cpsie i" ::: "memory");
}

static uint32_t slot_address(uint32_t slot)
{
    return PORT_STORAGE_ORIGIN + slot * PORT_SLOT_BYTES;
}

uint32_t port_slot_bytes(void)
{
    return PORT_SLOT_BYTES;
}

const uint8_t *port_slot(uint32_t slot)
{
    return (const uint8_t *)(uintptr_t)slot_address(slot);
}

int port_slot_erase(uint32_t slot)
{
    cortexm_flash_erase(slot_address(slot), PORT_SLOT_BYTES);
    return 0;
}

int port_slot_write(uint32_t slot, uint32_t offset, const void *data, uint32_t size)
{
    if (offset > PORT_SLOT_BYTES || size > PORT_SLOT_BYTES - offset) {
        return 1;
    }
    cortexm_flash_write(slot_address(slot) + offset, data, size);
    return memcmp(port_slot(slot) + offset, data, size) != 0;
}
