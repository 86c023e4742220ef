/* Serial NOR flash of the 25 series (W25Q, MX25R, GD25Q) as a page medium. Commands: Winbond W25Q128JV data sheet, chapter 8. */
#ifndef PORT_NOR_H
#define PORT_NOR_H

#include "port_engine.h"
#include "spi.h"

#define NOR_SECTOR_BYTES 4096u /* smallest unit of erasing */
#define NOR_PAGE_BYTES 256u    /* largest unit of programming */

enum nor_state { NOR_IDLE, NOR_READING, NOR_ERASING, NOR_SENDING, NOR_PROGRAMMING };

typedef struct nor {
    const port_spi *spi;
    enum nor_state state;
    const uint8_t *data;            /* data to be written */
    uint32_t at, end, erased, sent; /* on the chip: next byte, end of the transfer, end of what is erased, bytes under way */
    uint64_t since;                 /* start of the operation in progress, in ticks */
} nor;

/* Find the chip, and its size by its JEDEC id. PORT_ERROR_MEDIUM if none answers. Writes cover whole sectors. */
port_status nor_open(nor *chip, const port_spi *spi, port_medium *medium);

#endif
