#include "frame.h"

#include "bytes.h"
#include "crc32.h"

#define COBS_FULL 255u /* code of a block of 254 bytes that is not followed by a zero */

static void start_frame(struct frame_receiver *receiver)
{
    receiver->used = 0;
    receiver->remaining = 0;
    receiver->block = 0;
    receiver->overlong = 0;
}

void frame_receiver_init(struct frame_receiver *receiver, uint8_t *buffer, uint32_t capacity)
{
    receiver->buffer = buffer;
    receiver->capacity = capacity;
    receiver->size = 0;
    receiver->crc = 0;
    start_frame(receiver);
}

static void append(struct frame_receiver *receiver, uint8_t byte)
{
    if (receiver->used < receiver->capacity) {
        receiver->buffer[receiver->used++] = byte;
    } else {
        receiver->overlong = 1;
    }
}

static enum frame_event end_frame(struct frame_receiver *receiver)
{
    enum frame_event event = FRAME_READY;

    if (receiver->block == 0) {
        event = FRAME_PENDING; /* zeros between frames, also the host's way to start clean */
    } else if (receiver->overlong) {
        event = FRAME_OVERLONG;
    } else if (receiver->remaining > 0) {
        event = FRAME_BAD_COBS;
    } else if (receiver->used < FRAME_CRC_SIZE) {
        event = FRAME_BAD_CRC;
    } else {
        receiver->size = receiver->used - FRAME_CRC_SIZE;
        receiver->crc = port_get32(receiver->buffer + receiver->size);
        if (port_crc32(0, receiver->buffer, receiver->size) != receiver->crc) {
            event = FRAME_BAD_CRC;
        }
    }
    start_frame(receiver);
    return event;
}

enum frame_event frame_receive(struct frame_receiver *receiver, uint8_t byte)
{
    if (byte == 0) {
        return end_frame(receiver);
    }
    if (receiver->remaining > 0) {
        receiver->remaining--;
        append(receiver, byte);
        return FRAME_PENDING;
    }
    if (receiver->block != 0 && receiver->block != COBS_FULL) {
        append(receiver, 0);
    }
    receiver->block = byte;
    receiver->remaining = (uint8_t)(byte - 1u);
    return FRAME_PENDING;
}

/* The parts of a frame seen as one string of bytes. */
static uint8_t byte_at(const struct frame_part *parts, uint32_t index)
{
    while (index >= parts->size) {
        index -= parts->size;
        parts++;
    }
    return parts->data[index];
}

#define FRAME_PARTS_MAX 3u /* header, payload, CRC */

uint32_t frame_send(const struct frame_part *parts, uint32_t count, void (*put)(void *context, uint8_t byte),
                    void *context)
{
    struct frame_part all[FRAME_PARTS_MAX];
    uint8_t trailer[FRAME_CRC_SIZE];
    uint32_t crc = 0, total = 0, start = 0, i;

    for (i = 0; i < count && i < FRAME_PARTS_MAX - 1u; i++) {
        all[i] = parts[i];
        crc = port_crc32(crc, parts[i].data, parts[i].size);
        total += parts[i].size;
    }
    port_put32(trailer, crc);
    all[i].data = trailer;
    all[i].size = FRAME_CRC_SIZE;
    total += FRAME_CRC_SIZE;
    for (;;) {
        uint32_t end = start;
        while (end < total && end - start < COBS_FULL - 1u && byte_at(all, end) != 0) {
            end++;
        }
        put(context, (uint8_t)(end - start + 1u));
        for (i = start; i < end; i++) {
            put(context, byte_at(all, i));
        }
        if (end == total) {
            break;
        }
        start = end - start == COBS_FULL - 1u ? end : end + 1u;
    }
    put(context, 0);
    return crc;
}
