/* A serial port over the RP2040's USB (CDC ACM), so that a Pico needs no adapter. */
#ifndef PORT_RP2040_USB_H
#define PORT_RP2040_USB_H

#include <stdint.h>

#define USB_INTERRUPT 5u

/* Start the controller and appear on the bus with these (at most 8) bytes as the serial number; its clock must run. */
void usb_start(const uint8_t *serial, uint32_t size);
/* Do what the host asked for, in every interrupt. Return whether it delivered bytes (`cortexm_received`). */
int usb_interrupt(void);
/* Add a byte to a packet, which leaves with a frame's last byte, 0, or when it is full. Dropped if the host takes none. */
void usb_put(uint8_t byte);

#endif
