/* SD card over SPI as a page medium, with the CRCs that SPI mode leaves off until asked. Source: SD Physical Layer Simplified
 * Specification 6.00, chapter 7 (SPI mode). */
#ifndef PORT_SD_H
#define PORT_SD_H

#include "port_engine.h"
#include "spi.h"

#define SD_BLOCK_BYTES 512u

enum sd_state { SD_IDLE, SD_AWAITING, SD_RECEIVING, SD_SENDING, SD_PROGRAMMING };

typedef struct sd {
    const port_spi *spi;
    enum sd_state state;
    uint8_t by_bytes;    /* a standard capacity card is addressed by bytes, others by blocks */
    uint8_t writes;
    const uint8_t *from; /* source of the transfer */
    uint8_t *to;
    uint32_t block, left, sent; /* next block; remaining bytes of the transfer; bytes in progress */
    uint64_t since;
} sd;

/* Wake the card. PORT_ERROR_MEDIUM if none answers or the card is older than SD 2.0. */
port_status sd_open(sd *card, const port_spi *spi, port_medium *medium);

#endif
