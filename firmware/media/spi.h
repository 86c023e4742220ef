/* Interface that a board provides to the drivers of SPI media: one bus, one chip select. */
#ifndef PORT_SPI_H
#define PORT_SPI_H

#include <stdint.h>

typedef struct port_spi {
    /* Clock `bytes` out of `out` (null: 0xFF) and into `in` (null: discarded). With DMA it returns at once, and buffers
     * must stay unchanged until `busy` returns 0; without DMA, it returns when the transfer is complete. */
    void (*start)(void *context, const uint8_t *out, uint8_t *in, uint32_t bytes);
    int (*busy)(void *context);
    void (*select)(void *context, int on);
    uint64_t (*microseconds)(void);
    void *context;
} port_spi;

/* A short blocking exchange. */
static inline void spi_exchange(const port_spi *spi, const uint8_t *out, uint8_t *in, uint32_t bytes) {
    spi->start(spi->context, out, in, bytes);
    while (spi->busy(spi->context)) {
    }
}

#endif
