#include "port_exact.h"

#include "port_replay.h"

#include <string.h>

#include "bytes.h"
#include "crc32.h"

/* Record: checksum u32, sequence u32, label u16, 0 u16, 0 u32, then input and targets, zeros up to a whole unit. The
 * checksum covers the model's hash and everything after itself. */
#define HEADER_BYTES 16u
#define CHUNK_BYTES 64u /* a multiple of PORT_REPLAY_UNIT */

static const port_replay_memory *memory;
static uint32_t slots_per_sector, slots; /* places for a record */
static uint32_t next_slot, next_sequence;
static uint32_t kept; /* slots before next_slot that hold records; a few may be damaged */

static uint32_t place_of(uint32_t slot)
{
    return slot / slots_per_sector * memory->sector_bytes + slot % slots_per_sector * PORT_REPLAY_RECORD_BYTES;
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint32_t hash_checksum(void)
{
    return port_crc32(0, port_model_hash(&port_generated_model), PORT_MODEL_HASH_BYTES);
}

/* Return whether a slot holds a record of this model; fill in its header. */
static int is_record(uint32_t slot, uint8_t *header)
{
    uint8_t chunk[CHUNK_BYTES];
    uint32_t place = place_of(slot), checksum;

    if (memory->read(memory->context, place, header, HEADER_BYTES) != 0) {
        return 0;
    }
    checksum = port_crc32(hash_checksum(), header + 4, HEADER_BYTES - 4);
    for (uint32_t at = HEADER_BYTES; at < PORT_REPLAY_RECORD_BYTES; at += CHUNK_BYTES) {
        uint32_t bytes = smaller(CHUNK_BYTES, PORT_REPLAY_RECORD_BYTES - at);
        if (memory->read(memory->context, place + at, chunk, bytes) != 0) {
            return 0;
        }
        checksum = port_crc32(checksum, chunk, bytes);
    }
    return checksum == port_get32(header);
}

/* Return whether nothing was written to a slot since its sector was erased. */
static int is_blank(uint32_t slot)
{
    uint8_t chunk[PORT_REPLAY_UNIT];

    for (uint32_t at = 0; at < PORT_REPLAY_RECORD_BYTES; at += sizeof chunk) {
        if (memory->read(memory->context, place_of(slot) + at, chunk, sizeof chunk) != 0) {
            return 0;
        }
        for (uint32_t i = 0; i < sizeof chunk; i++) {
            if (chunk[i] != 0xFF) {
                return 0;
            }
        }
    }
    return 1;
}

port_status port_replay_begin(const port_replay_memory *given)
{
    uint8_t header[HEADER_BYTES];
    uint32_t oldest = 0, newest = 0, first = 0, found = 0;

    memory = given;
    slots_per_sector = memory->sector_bytes / PORT_REPLAY_RECORD_BYTES;
    slots = memory->sectors * slots_per_sector;
    next_slot = next_sequence = kept = 0;
    if (slots_per_sector == 0 || memory->sectors < 2) {
        slots = 0;
        return PORT_ERROR_MEMORY;
    }
    if (memory->read(memory->context, 0, header, HEADER_BYTES) != 0) {
        return PORT_ERROR_MEDIUM;
    }
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (!is_record(slot, header)) {
            continue;
        }
        uint32_t sequence = port_get32(header + 4);
        if (found == 0 || sequence < first) {
            first = sequence;
            oldest = slot;
        }
        if (found == 0 || sequence >= next_sequence) {
            next_sequence = sequence + 1;
            newest = slot;
        }
        found++;
    }
    if (found != 0) {
        next_slot = (newest + 1) % slots;
        kept = (newest + slots - oldest) % slots + 1;
    }
    return PORT_OK;
}

uint32_t port_replay_count(void) { return kept; }

/* Move next_slot to one that can be written: a blank one, or the first of a sector, which is erased. */
static port_status make_room(void)
{
    while (memory->erase != NULL && next_slot % slots_per_sector != 0 && !is_blank(next_slot)) { /* power was lost */
        next_slot = (next_slot + 1) % slots;
        kept += kept != 0;
    }
    if (next_slot % slots_per_sector == 0) {
        kept = smaller(kept, slots - slots_per_sector); /* the sector's old records */
        if (memory->erase != NULL && memory->erase(memory->context, next_slot / slots_per_sector) != 0) {
            return PORT_ERROR_MEDIUM;
        }
    }
    return PORT_OK;
}

static int are_finite(const float *values, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!(values[i] - values[i] == 0.0f)) {
            return 0;
        }
    }
    return 1;
}

static uint8_t byte_at(const int8_t *sample, const float *targets, uint32_t at)
{
    if (at < PORT_MODEL_INPUT_BYTES) {
        return (uint8_t)sample[at];
    }
    return at < PORT_REPLAY_SAMPLE_BYTES ? ((const uint8_t *)(const void *)targets)[at - PORT_MODEL_INPUT_BYTES] : 0;
}

/* Fill a chunk with the bytes [at, at + bytes) after the header. */
static void fill(uint8_t *chunk, uint32_t at, uint32_t bytes, const int8_t *sample, const float *targets)
{
    for (uint32_t i = 0; i < bytes; i++) {
        chunk[i] = byte_at(sample, targets, at + i);
    }
}

/* Write everything after the header, and continue the checksum over it. */
static port_status write_sample(uint32_t place, const int8_t *sample, const float *targets, uint32_t *checksum)
{
    uint8_t chunk[CHUNK_BYTES];

    for (uint32_t at = HEADER_BYTES; at < PORT_REPLAY_RECORD_BYTES; at += CHUNK_BYTES) {
        uint32_t bytes = smaller(CHUNK_BYTES, PORT_REPLAY_RECORD_BYTES - at);
        fill(chunk, at - HEADER_BYTES, bytes, sample, targets);
        *checksum = port_crc32(*checksum, chunk, bytes);
        if (memory->write(memory->context, place + at, chunk, bytes) != 0) {
            return PORT_ERROR_MEDIUM;
        }
    }
    return PORT_OK;
}

port_status port_replay_keep(const int8_t *sample, uint16_t label, const float *targets)
{
    uint8_t header[HEADER_BYTES] = {0};
    uint32_t checksum;
    port_status status;

    if (slots == 0) {
        return PORT_ERROR_MEDIUM;
    }
    if (label >= port_label_count(&port_generated_model)) {
        return PORT_ERROR_RANGE;
    }
    if ((targets == NULL) != (PORT_REPLAY_SAMPLE_BYTES == PORT_MODEL_INPUT_BYTES)) {
        return PORT_ERROR_ARGUMENT;
    }
    if (!are_finite(targets, (PORT_REPLAY_SAMPLE_BYTES - PORT_MODEL_INPUT_BYTES) / 4)) {
        return PORT_ERROR_RANGE;
    }
    status = make_room();
    if (status != PORT_OK) {
        return status;
    }
    port_put32(header + 4, next_sequence);
    port_put16(header + 8, label);
    checksum = port_crc32(hash_checksum(), header + 4, HEADER_BYTES - 4);
    status = write_sample(place_of(next_slot), sample, targets, &checksum);
    port_put32(header, checksum);
    if (status == PORT_OK && memory->write(memory->context, place_of(next_slot), header, HEADER_BYTES) != 0) {
        status = PORT_ERROR_MEDIUM;
    }
    next_slot = (next_slot + 1) % slots; /* after a failure too: the slot is no longer blank */
    kept++;
    next_sequence += status == PORT_OK;
    return status;
}

/* Train on the record of a slot, which must be whole. */
static port_status train_slot(uint32_t slot, uint16_t label, port_result *result)
{
    uint8_t chunk[CHUNK_BYTES];
    port_engine *engine = port_library_engine();

    for (uint32_t at = 0; at < PORT_REPLAY_SAMPLE_BYTES; at += CHUNK_BYTES) {
        uint32_t bytes = smaller(CHUNK_BYTES, PORT_REPLAY_SAMPLE_BYTES - at);
        if (memory->read(memory->context, place_of(slot) + HEADER_BYTES + at, chunk, bytes) != 0) {
            return PORT_ERROR_MEDIUM;
        }
        port_status status = port_input_write(engine, at, (const int8_t *)chunk, bytes);
        if (status != PORT_OK) {
            return status;
        }
    }
    return port_train(engine, label, result);
}

/* Return well mixed bits for the number of a draw (murmur3's finalizer). */
static uint32_t mixed(uint32_t value)
{
    value = (value ^ value >> 16) * 0x85EBCA6Bu;
    value = (value ^ value >> 13) * 0xC2B2AE35u;
    return value ^ value >> 16;
}

port_status port_replay_train(uint32_t count, port_result *result)
{
    uint8_t header[HEADER_BYTES];
    port_result unused;

    for (uint32_t draw = 0; draw < count && kept != 0; draw++) {
        uint32_t back = mixed(mixed(next_sequence) + draw) % kept, tried = 0, slot;
        do { /* a damaged record is replaced by the one before */
            slot = (next_slot + slots - 1 - (back + tried) % kept) % slots;
        } while (!is_record(slot, header) && ++tried < kept);
        if (tried == kept) {
            break;
        }
        port_status status = train_slot(slot, port_get16(header + 8), result != NULL ? result : &unused);
        if (status != PORT_OK) {
            return status;
        }
    }
    return PORT_OK;
}
