/* Little-endian fields at any alignment: a Cortex-M0 faults on an unaligned word. */
#ifndef PORT_BYTES_H
#define PORT_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint16_t port_get16(const uint8_t *at)
{
    return (uint16_t)(at[0] | (uint16_t)at[1] << 8);
}

static inline uint32_t port_get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline float port_get_float(const uint8_t *at)
{
    uint32_t bits = port_get32(at);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint8_t *port_put16(uint8_t *at, uint16_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    return at + 2;
}

static inline uint8_t *port_put32(uint8_t *at, uint32_t value)
{
    at = port_put16(at, (uint16_t)value);
    return port_put16(at, (uint16_t)(value >> 16));
}

static inline uint8_t *port_put_float(uint8_t *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return port_put32(at, bits);
}

#endif
