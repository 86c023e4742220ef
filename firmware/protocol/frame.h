/* Frames on the wire: COBS(header, payload, CRC-32 little-endian of both), then one 0x00.
 *
 * COBS leaves no zero inside a frame, so a receiver that lost its place resynchronises at the next zero. The receiver
 * decodes while bytes arrive, into the caller's memory; the sender encodes while it sends and needs no buffer. Byte
 * layouts: PROTOCOL.md.
 */
#ifndef PORT_FRAME_H
#define PORT_FRAME_H

#include <stdint.h>

#define FRAME_CRC_SIZE 4u

enum frame_event {
    FRAME_PENDING,   /* in the middle of a frame, or between frames */
    FRAME_READY,     /* a whole frame with a correct CRC: `size` bytes at `buffer`, CRC not counted */
    FRAME_BAD_COBS,  /* a block ran over the end of the frame */
    FRAME_BAD_CRC,   /* also: too short to hold a CRC */
    FRAME_OVERLONG,  /* did not fit the buffer; skipped up to its end */
};

struct frame_receiver {
    uint8_t *buffer;
    uint32_t capacity;
    uint32_t used;      /* decoded bytes so far */
    uint32_t size;      /* after FRAME_READY: bytes of header and payload */
    uint32_t crc;       /* after FRAME_READY: the frame's own CRC, part of the key of the reply cache */
    uint8_t remaining;  /* bytes left in the current COBS block */
    uint8_t block;      /* code of the current block; 0 before the first one */
    uint8_t overlong;
};

/* Give memory to a receiver. `capacity` includes the CRC: largest frame + FRAME_CRC_SIZE. */
void frame_receiver_init(struct frame_receiver *receiver, uint8_t *buffer, uint32_t capacity);

/* Take one byte. The frame of FRAME_READY stays valid until the next call. */
enum frame_event frame_receive(struct frame_receiver *receiver, uint8_t byte);

struct frame_part {
    const uint8_t *data;
    uint32_t size;
};

/* Send the parts as one frame with its CRC, byte by byte through `put`. Return the CRC. */
uint32_t frame_send(const struct frame_part *parts, uint32_t count, void (*put)(void *context, uint8_t byte),
                    void *context);

#endif
