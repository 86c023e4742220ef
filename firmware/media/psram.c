#include "psram.h"

#include <string.h>

static uint32_t bytes_due(const psram *part) {
    if (part->bytes_per_s == 0) return part->total;
    uint64_t due = (part->ticks() - part->started) * part->bytes_per_s / part->ticks_hz;
    return due < part->total ? (uint32_t)due : part->total;
}

static port_transfer poll(void *context) {
    psram *part = context;
    if (part->is_there && !part->is_there()) return PORT_TRANSFER_FAILED;
    uint32_t due = bytes_due(part);
    memcpy(part->to + part->done, part->from + part->done, due - part->done);
    part->done = due;
    return due == part->total ? PORT_TRANSFER_DONE : PORT_TRANSFER_BUSY;
}

static port_transfer start(psram *part, uint8_t *to, const uint8_t *from, uint32_t bytes) {
    part->to = to, part->from = from;
    part->done = 0, part->total = bytes;
    part->started = part->bytes_per_s ? part->ticks() : 0;
    return poll(part);
}

static port_transfer write(void *context, uint32_t offset, const void *data, uint32_t bytes) {
    psram *part = context;
    return start(part, part->memory + offset, data, bytes);
}

static port_transfer read(void *context, uint32_t offset, void *data, uint32_t bytes) {
    psram *part = context;
    return start(part, data, part->memory + offset, bytes);
}

port_medium psram_medium(psram *part, uint32_t bytes) {
    return (port_medium){"psram", bytes, 4u, part->memory, write, read, poll, part};
}
