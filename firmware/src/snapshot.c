#include "snapshot.h"

#include <string.h>

#include "bytes.h"
#include "crc32.h"
#include "port.h"

/* Slot: header, then the parameter bytes, rounded up to whole words. All fields little endian.
 *   0 magic   4 version   8 generation   12 parameter bytes   16 learning rate   20 rule u8, scaling u8, 0 u16
 *  24 generator   28 steps   32 model hash   64 CRC of the parameters   68 CRC of bytes 0..67 */
#define MAGIC 0x53545250u /* "PRTS" */
#define VERSION 1u
#define AT_HASH 32u
#define AT_PARAMETER_CRC 64u
#define AT_HEADER_CRC 68u
#define SLOT_HEADER_SIZE 72u

static uint32_t parameter_bytes(const port_engine *engine)
{
    return port_parameter_bytes(engine->model);
}

static int slot_is_valid(const port_engine *engine, const uint8_t *slot)
{
    uint32_t size = parameter_bytes(engine);

    return port_get32(slot) == MAGIC && port_get32(slot + 4) == VERSION && port_get32(slot + 12) == size
        && port_get32(slot + AT_HEADER_CRC) == port_crc32(0, slot, AT_HEADER_CRC)
        && memcmp(slot + AT_HASH, port_model_hash(engine->model), PORT_MODEL_HASH_BYTES) == 0
        && port_get32(slot + AT_PARAMETER_CRC) == port_crc32(0, slot + SLOT_HEADER_SIZE, size);
}

enum snapshot_result snapshot_find(port_engine *engine, struct snapshot_info *info)
{
    enum snapshot_result result = SNAPSHOT_NONE;

    info->slot = 0;
    info->generation = 0;
    if (port_slot_bytes() < SLOT_HEADER_SIZE + parameter_bytes(engine)) {
        return SNAPSHOT_NO_STORAGE;
    }
    for (uint32_t slot = 0; slot < PORT_SLOTS; slot++) {
        const uint8_t *at = port_slot(slot);
        if (slot_is_valid(engine, at) && port_get32(at + 8) > info->generation) {
            info->slot = slot;
            info->generation = port_get32(at + 8);
            result = SNAPSHOT_OK;
        }
    }
    return result;
}

static void write_header(port_engine *engine, uint32_t generation, uint8_t *at)
{
    port_state state = port_state_get(engine);

    port_put32(at, MAGIC);
    port_put32(at + 4, VERSION);
    port_put32(at + 8, generation);
    port_put32(at + 12, parameter_bytes(engine));
    port_put_float(at + 16, engine->options.learning_rate);
    at[20] = engine->options.rule;
    at[21] = engine->options.scaling;
    port_put16(at + 22, 0);
    port_put32(at + 24, state.generator);
    port_put32(at + 28, state.steps);
    memcpy(at + AT_HASH, port_model_hash(engine->model), PORT_MODEL_HASH_BYTES);
    port_put32(at + AT_PARAMETER_CRC, port_crc32(0, port_parameters_view(engine), parameter_bytes(engine)));
    port_put32(at + AT_HEADER_CRC, port_crc32(0, at, AT_HEADER_CRC));
}

static int write_parameters(port_engine *engine, uint32_t slot)
{
    uint32_t size = parameter_bytes(engine), whole = size & ~3u;
    uint8_t tail[4] = {0};
    const uint8_t *data = port_parameters_view(engine);

    if (port_slot_write(slot, SLOT_HEADER_SIZE, data, whole) != 0) {
        return 1;
    }
    if (whole == size) {
        return 0;
    }
    memcpy(tail, data + whole, size - whole);
    return port_slot_write(slot, SLOT_HEADER_SIZE + whole, tail, sizeof tail);
}

enum snapshot_result snapshot_save(port_engine *engine, struct snapshot_info *info)
{
    uint8_t header[SLOT_HEADER_SIZE];
    enum snapshot_result found = snapshot_find(engine, info);

    if (found == SNAPSHOT_NO_STORAGE) {
        return found;
    }
    if (found == SNAPSHOT_OK) {
        info->slot = 1u - info->slot; /* never the newest one */
    }
    info->generation++;
    write_header(engine, info->generation, header);
    if (port_slot_erase(info->slot) != 0 || write_parameters(engine, info->slot) != 0
        || port_slot_write(info->slot, 0, header, sizeof header) != 0) {
        return SNAPSHOT_FAILED;
    }
    return slot_is_valid(engine, port_slot(info->slot)) ? SNAPSHOT_OK : SNAPSHOT_FAILED;
}

enum snapshot_result snapshot_restore(port_engine *engine, struct snapshot_info *info)
{
    port_options options;
    port_state state;
    const uint8_t *slot;
    enum snapshot_result found = snapshot_find(engine, info);

    if (found != SNAPSHOT_OK) {
        return found;
    }
    slot = port_slot(info->slot);
    options.learning_rate = port_get_float(slot + 16);
    options.rule = slot[20];
    options.scaling = slot[21];
    if (port_options_set(engine, &options) != PORT_OK) {
        return SNAPSHOT_FAILED;
    }
    memcpy(port_parameters(engine), slot + SLOT_HEADER_SIZE, parameter_bytes(engine));
    state.generator = port_get32(slot + 24);
    state.steps = port_get32(slot + 28);
    port_state_set(engine, state);
    return SNAPSHOT_OK;
}
