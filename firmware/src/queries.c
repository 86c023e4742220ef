/* HELLO, STATUS, ECHO, PAGES, READ, CRC: they change nothing (except that HELLO draws the nonce) and may run twice. */
#include <string.h>

#include "bytes.h"
#include "crc32.h"
#include "device_parts.h"
#include "firmware_version.h"
#include "port.h"
#include "snapshot.h"

/* Two boots must not share a nonce: it is made from the host's random token and the board's entropy. */
static void draw_nonce(struct device *device, uint32_t token)
{
    uint32_t mixed[3] = {token, port_entropy(), (uint32_t)port_ticks()};

    device->nonce = port_crc32(0, mixed, sizeof mixed);
    if (device->nonce == 0) {
        device->nonce = 1;
    }
}

static uint32_t hello_flags(struct device *device)
{
    const port_model *model = device->engine->model;
    struct snapshot_info info;
    enum snapshot_result found = snapshot_find(device->engine, &info);

    return (port_model_trains(model) ? HELLO_TRAINS : 0u) | (port_model_has_q88(model) ? HELLO_HAS_Q88 : 0u)
        | (found != SNAPSHOT_NO_STORAGE ? HELLO_HAS_STORAGE : 0u) | (found == SNAPSHOT_OK ? HELLO_HAS_SNAPSHOT : 0u)
        | (port_sample_bytes(model) > port_input_bytes(model) ? HELLO_HAS_TARGETS : 0u);
}

static void copy_name(uint8_t *at, uint32_t size, const char *name)
{
    size_t length = strlen(name);
    memcpy(at, name, length < size ? length : size);
}

static void hello(struct device *device, const struct device_request *request)
{
    uint8_t reply[HELLO_REPLY_SIZE];
    const port_model *model = device->engine->model;

    if (request->size != HELLO_REQUEST_SIZE) {
        device_reply(device, request, REPLY_BAD_LENGTH, NULL, 0);
        return;
    }
    if (device->nonce == 0) {
        draw_nonce(device, port_get32(request->payload));
    }
    memset(reply, 0, sizeof reply);
    reply[0] = PROTOCOL_VERSION;
    reply[1] = PROTOCOL_OLDEST;
    reply[2] = FIRMWARE_MAJOR;
    reply[3] = FIRMWARE_MINOR;
    port_put16(reply + 4, FIRMWARE_PATCH);
    port_put16(reply + 6, DEVICE_PAYLOAD_MAX);
    port_put32(reply + 8, PORT_BOARD.ram_bytes);
    port_put32(reply + 12, PORT_BOARD.flash_bytes);
    port_put32(reply + 16, device->nonce);
    port_put16(reply + 20, device->next_sequence);
    port_put16(reply + 22, (uint16_t)port_class_count(model));
    port_put32(reply + 24, port_input_bytes(model));
    port_put32(reply + 28, port_parameter_bytes(model));
    port_put32(reply + 32, port_arena_bytes(model));
    port_put32(reply + 36, hello_flags(device));
    port_put32(reply + 40, port_slot_bytes());
    port_put32(reply + 44, PORT_BOARD.ticks_hz);
    memcpy(reply + 48, port_model_hash(model), HELLO_HASH_SIZE);
    copy_name(reply + 80, HELLO_BOARD_SIZE, PORT_BOARD.name);
    copy_name(reply + 104, HELLO_MODEL_SIZE, port_model_name(model));
    port_serial(reply + 136);
    device_reply(device, request, REPLY_OK, reply, sizeof reply);
}

static void status(struct device *device, const struct device_request *request)
{
    const struct device_counters *count = &device->counters;
    uint64_t ticks = port_ticks();
    const uint32_t fields[STATUS_REPLY_SIZE / 4] = {
        count->frames, count->bad_crc, count->bad_cobs, count->overlong,
        count->duplicates, count->refused, port_uart_overruns(), count->trained,
        count->evaluated, count->saves, port_stack_used(), port_stack_bytes(),
        port_static_bytes(), port_reset_reason(), (uint32_t)ticks, (uint32_t)(ticks >> 32),
    };
    uint8_t reply[STATUS_REPLY_SIZE];

    for (uint32_t i = 0; i < STATUS_REPLY_SIZE / 4; i++) {
        port_put32(reply + 4 * i, fields[i]);
    }
    device_reply(device, request, REPLY_OK, reply, sizeof reply);
}

static void put64(uint8_t *at, uint64_t value)
{
    port_put32(at, (uint32_t)value);
    port_put32(at + 4, (uint32_t)(value >> 32));
}

/* PAGES: the page medium, and its traffic since boot. */
static void pages(struct device *device, const struct device_request *request)
{
    const port_engine *engine = device->engine;
    const port_medium *medium = engine->pager.medium;
    port_page_counters count = port_page_counters_get(engine);
    uint8_t reply[PAGES_REPLY_SIZE];

    memset(reply, 0, sizeof reply);
    if (medium != NULL) {
        copy_name(reply, PAGES_NAME_SIZE, medium->name);
        port_put32(reply + 8, medium->bytes);
        port_put32(reply + 12, medium->block_bytes);
    }
    port_put32(reply + 16, port_medium_bytes(engine->model));
    put64(reply + 20, count.read_bytes);
    put64(reply + 28, count.written_bytes);
    port_put32(reply + 36, count.failed);
    port_put32(reply + 40, count.damaged);
    port_put32(reply + 44, (uint32_t)port_is_torn(engine));
    device_reply(device, request, REPLY_OK, reply, sizeof reply);
}

/* READ and CRC: region u32, offset u32, length u32. */
static void region(struct device *device, const struct device_request *request)
{
    const uint8_t *data = port_parameters_view(device->engine);
    uint32_t size = port_parameter_bytes(device->engine->model), offset, length;
    uint8_t crc[4];

    if (request->size != 12) {
        device_reply(device, request, REPLY_BAD_LENGTH, NULL, 0);
        return;
    }
    if (port_get32(request->payload) == REGION_LOGITS) {
        data = (const uint8_t *)port_logits(device->engine);
        size = 4u * port_class_count(device->engine->model);
    } else if (port_get32(request->payload) != REGION_PARAMETERS) {
        size = 0;
    }
    offset = port_get32(request->payload + 4);
    length = port_get32(request->payload + 8);
    if (request->type == MESSAGE_READ && port_is_torn(device->engine)) {
        device_reply(device, request, REPLY_MODEL_TORN, NULL, 0);
    } else if (offset > size || length > size - offset || length == 0) {
        device_reply(device, request, REPLY_OUT_OF_RANGE, NULL, 0);
    } else if (request->type == MESSAGE_CRC && port_parameters_verify(device->engine) != PORT_OK) {
        device_reply(device, request, REPLY_PAGE_DAMAGED, NULL, 0);
    } else if (request->type == MESSAGE_CRC) {
        port_put32(crc, port_crc32(0, data + offset, length));
        device_reply(device, request, REPLY_OK, crc, sizeof crc);
    } else if (length > DEVICE_PAYLOAD_MAX) {
        device_reply(device, request, REPLY_OUT_OF_RANGE, NULL, 0);
    } else {
        device_reply(device, request, REPLY_OK, data + offset, length);
    }
}

void device_query(struct device *device, const struct device_request *request)
{
    switch (request->type) {
    case MESSAGE_HELLO:
        hello(device, request);
        break;
    case MESSAGE_STATUS:
        status(device, request);
        break;
    case MESSAGE_ECHO:
        device_reply(device, request, REPLY_OK, request->payload, request->size);
        break;
    case MESSAGE_PAGES:
        pages(device, request);
        break;
    case MESSAGE_READ:
    case MESSAGE_CRC:
        region(device, request);
        break;
    default:
        device_reply(device, request, REPLY_UNKNOWN_TYPE, NULL, 0);
        break;
    }
}
