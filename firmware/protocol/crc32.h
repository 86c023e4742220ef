/* CRC-32 as in Ethernet and zlib: polynomial 0xEDB88320 (reflected), initial value and final XOR 0xFFFFFFFF. */
#ifndef PORT_CRC32_H
#define PORT_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Return the CRC of `size` bytes at `data` appended to a message whose CRC is `crc` (0 for an empty one). */
uint32_t port_crc32(uint32_t crc, const void *data, size_t size);

#endif
