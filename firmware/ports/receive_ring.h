/* Ring between a receive interrupt (one writer) and the main loop (one reader), with the attention signal.
 *
 * One aligned word each for head and tail: single loads and stores, so no lock is needed on one core. */
#ifndef PORT_RECEIVE_RING_H
#define PORT_RECEIVE_RING_H

#include <stdint.h>

#include "messages.h"

#ifndef RECEIVE_RING_BYTES
#define RECEIVE_RING_BYTES 1024u /* a power of two; the largest frame should fit while a sample trains */
#endif

struct receive_ring {
    volatile uint32_t head, tail; /* count up freely; the difference is the fill */
    volatile uint32_t overruns;
    volatile uint8_t zeros, attention;
    uint8_t bytes[RECEIVE_RING_BYTES];
};

static inline void receive_ring_put(struct receive_ring *ring, uint8_t byte)
{
    if (byte != 0) {
        ring->zeros = 0;
    } else if (++ring->zeros >= ATTENTION_ZEROS) {
        ring->zeros = 0;
        ring->attention = 1;
    }
    if (ring->head - ring->tail >= RECEIVE_RING_BYTES) {
        ring->overruns++;
        return;
    }
    ring->bytes[ring->head % RECEIVE_RING_BYTES] = byte;
    ring->head++;
}

static inline int receive_ring_get(struct receive_ring *ring)
{
    uint8_t byte;

    if (ring->head == ring->tail) {
        return -1;
    }
    byte = ring->bytes[ring->tail % RECEIVE_RING_BYTES];
    ring->tail++;
    return byte;
}

static inline int receive_ring_attention(struct receive_ring *ring)
{
    int attention = ring->attention;
    ring->attention = 0;
    return attention;
}

#endif
