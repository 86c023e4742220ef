/* One device: takes received bytes, keeps the session, runs the engine, sends replies.
 *
 * Exactly once: an effect runs only if it carries this boot's nonce and the next sequence number; the same frame
 * again is answered from the cache. The nonce is drawn at the first HELLO after a boot, so a request sent before a
 * reset can never act after it. */
#ifndef PORT_DEVICE_H
#define PORT_DEVICE_H

#include <stdint.h>

#include "frame.h"
#include "messages.h"
#include "port_engine.h"

#ifndef DEVICE_PAYLOAD_MAX
#define DEVICE_PAYLOAD_MAX 1024u /* largest request payload; a board with little RAM sets less */
#endif

struct device_counters {
    uint32_t frames, bad_crc, bad_cobs, overlong; /* received */
    uint32_t duplicates, refused;                 /* answered from the cache; answered with an error */
    uint32_t trained, evaluated, saves;           /* samples, samples, snapshots since boot */
};

/* A request in the frame buffer. */
struct device_request {
    uint16_t sequence;
    uint8_t type;
    uint8_t version;
    uint32_t nonce;
    const uint8_t *payload;
    uint32_t size;
};

/* The last effect and its reply: a repeated request is answered from here. */
struct device_cache {
    uint32_t crc; /* of the request */
    uint16_t sequence, size;
    uint8_t valid, status;
    uint8_t payload[CACHED_REPLY_MAX];
};

struct device {
    port_engine *engine;
    struct frame_receiver receiver;
    struct device_counters counters;
    struct device_cache cache;
    uint32_t nonce;         /* 0 until the first HELLO */
    uint16_t next_sequence;
    uint32_t pushed;        /* bytes of the input pushed so far, in order */
    uint32_t frame[(HEADER_SIZE + DEVICE_PAYLOAD_MAX + FRAME_CRC_SIZE + 3u) / 4u]; /* words: payloads are aligned */
};

/* The engine must be initialised. */
void device_init(struct device *device, port_engine *engine);
/* Take one byte; a complete request runs and is answered before this returns. */
void device_receive(struct device *device, uint8_t byte);

#endif
