#include "device.h"

#include <string.h>

#include "bytes.h"
#include "crc32.h"
#include "device_parts.h"
#include "port.h"

static void put_byte(void *context, uint8_t byte)
{
    (void)context;
    port_uart_put(byte);
}

/* A layer of a large model takes longer than a watchdog period; a posix port also polls its input here. */
static void between_steps(void *context, uint32_t step)
{
    (void)context;
    (void)step;
    port_watchdog_feed();
}

void device_init(struct device *device, port_engine *engine)
{
    memset(device, 0, sizeof *device);
    device->engine = engine;
    device->next_sequence = 1;
    frame_receiver_init(&device->receiver, (uint8_t *)device->frame, sizeof device->frame);
    port_yield_set(engine, between_steps, NULL);
}

void device_reply(struct device *device, const struct device_request *request, uint8_t status, const uint8_t *payload,
                  uint32_t size)
{
    uint8_t header[HEADER_SIZE];
    struct frame_part parts[2] = {{header, sizeof header}, {payload, size}};

    port_put16(header, request->sequence);
    header[2] = (uint8_t)(request->type | REPLY_BIT);
    header[3] = status;
    port_put32(header + 4, device->nonce);
    if (status != REPLY_OK) {
        device->counters.refused++;
    }
    frame_send(parts, 2, put_byte, NULL);
}

static void refuse(struct device *device, const struct device_request *request, uint8_t status)
{
    device_reply(device, request, status, NULL, 0);
}

static void answer_from_cache(struct device *device, const struct device_request *request)
{
    device_reply(device, request, device->cache.status, device->cache.payload, device->cache.size);
}

static void run_effect(struct device *device, const struct device_request *request)
{
    struct device_cache *cache = &device->cache;

    if (cache->valid && request->sequence == cache->sequence && device->receiver.crc == cache->crc) {
        device->counters.duplicates++;
        answer_from_cache(device, request);
        return;
    }
    if (request->sequence != device->next_sequence) {
        uint8_t expected[2];
        port_put16(expected, device->next_sequence);
        device_reply(device, request, REPLY_BAD_SEQUENCE, expected, sizeof expected);
        return;
    }
    cache->valid = 1;
    cache->crc = device->receiver.crc;
    cache->sequence = request->sequence;
    cache->size = 0;
    device->next_sequence++;
    cache->status = device_effect(device, request);
    answer_from_cache(device, request);
    if (request->type == MESSAGE_RESET && cache->status == REPLY_OK) {
        port_reset();
    }
}

static void handle(struct device *device, const struct device_request *request)
{
    if (request->type == MESSAGE_HELLO || request->type == MESSAGE_STATUS) {
        device_query(device, request); /* these two are answered for any version and any nonce */
    } else if (request->version != PROTOCOL_VERSION) {
        refuse(device, request, REPLY_BAD_VERSION);
    } else if (device->nonce == 0 || request->nonce != device->nonce) {
        refuse(device, request, REPLY_WRONG_NONCE);
    } else if (request->type < MESSAGE_FIRST_EFFECT) {
        device_query(device, request);
    } else {
        run_effect(device, request);
    }
}

static void take_frame(struct device *device)
{
    const uint8_t *frame = device->receiver.buffer;
    struct device_request request;

    if (device->receiver.size < HEADER_SIZE || (frame[2] & REPLY_BIT) != 0) {
        device->counters.refused++; /* not a request, so no host waits for an answer */
        return;
    }
    request.sequence = port_get16(frame);
    request.type = frame[2];
    request.version = frame[3];
    request.nonce = port_get32(frame + 4);
    request.payload = frame + HEADER_SIZE;
    request.size = device->receiver.size - HEADER_SIZE;
    handle(device, &request);
}

void device_receive(struct device *device, uint8_t byte)
{
    switch (frame_receive(&device->receiver, byte)) {
    case FRAME_PENDING:
        break;
    case FRAME_READY:
        device->counters.frames++;
        take_frame(device);
        break;
    case FRAME_BAD_COBS:
        device->counters.bad_cobs++;
        break;
    case FRAME_BAD_CRC:
        device->counters.bad_crc++;
        break;
    case FRAME_OVERLONG:
        device->counters.overlong++;
        break;
    }
}
