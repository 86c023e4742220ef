#include "port_exact.h"

#include "port_library.h"

#include <string.h>

#include "bytes.h"
#include "crc32.h"

/* A slot has the layout of firmware/src/snapshot.c, so that a board reads what the library saved, and vice versa. */
#define MAGIC 0x53545250u /* "PRTS" */
#define VERSION 1u
#define AT_HASH 32u
#define AT_PARAMETER_CRC 64u
#define AT_HEADER_CRC 68u
#define HEADER_SIZE 72u
#define CODE_LIMIT 300.0f /* far outside int8 */

/* An inference-only model has no parameters, and C does not allow empty arrays. */
#define PARAMETER_BYTES (PORT_MODEL_PARAMETER_BYTES > 0 ? PORT_MODEL_PARAMETER_BYTES : 1)

static uint8_t arena[PORT_MODEL_ARENA_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
static uint8_t parameters[PARAMETER_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
static port_engine engine;
static const port_library_storage *kept;

/* If the compiler fuses (rounds once), the sum is 2^-24; if it rounds twice, as C demands, it is 0. */
static int is_contracted(void)
{
    volatile float factor = 1.0f + 1.0f / 4096.0f, addend = -(1.0f + 1.0f / 2048.0f);

    return factor * factor + addend != 0.0f;
}

static int read_header(uint32_t slot, uint8_t *header)
{
    return kept->read(kept->context, slot, 0, header, HEADER_SIZE) == 0 && port_get32(header) == MAGIC
        && port_get32(header + 4) == VERSION && port_get32(header + 12) == PORT_MODEL_PARAMETER_BYTES
        && port_get32(header + AT_HEADER_CRC) == port_crc32(0, header, AT_HEADER_CRC)
        && memcmp(header + AT_HASH, port_model_hash(engine.model), PORT_MODEL_HASH_BYTES) == 0;
}

/* Return the generation of a slot; 0 if the slot is not whole. */
static uint32_t generation_of(uint32_t slot)
{
    uint8_t header[HEADER_SIZE];

    return read_header(slot, header) ? port_get32(header + 8) : 0;
}

static int load(uint32_t slot)
{
    uint8_t header[HEADER_SIZE];
    port_options options;
    port_state state;

    if (!read_header(slot, header)
        || kept->read(kept->context, slot, HEADER_SIZE, port_parameters(&engine), PORT_MODEL_PARAMETER_BYTES) != 0
        || port_get32(header + AT_PARAMETER_CRC) != port_crc32(0, port_parameters_view(&engine), PORT_MODEL_PARAMETER_BYTES)) {
        return 0;
    }
    options.learning_rate = port_get_float(header + 16);
    options.rule = header[20];
    options.scaling = header[21];
    state.generator = port_get32(header + 24);
    state.steps = port_get32(header + 28);
    port_state_set(&engine, state);
    return port_options_set(&engine, &options) == PORT_OK;
}

static uint32_t newest_slot(void)
{
    return generation_of(1) > generation_of(0) ? 1u : 0u;
}

port_status port_library_begin(const port_library_storage *storage)
{
    port_status status;

    kept = storage;
    if (is_contracted()) {
        return PORT_ERROR_UNSUPPORTED;
    }
    status = port_engine_init(&engine, &port_generated_model, arena, sizeof arena, parameters, sizeof parameters);
    if (status != PORT_OK) {
        return status;
    }
    if (kept != NULL && (load(newest_slot()) || load(1u - newest_slot()))) {
        return PORT_OK;
    }
    return port_parameters_reset(&engine);
}

port_status port_library_options(const port_options *options)
{
    return port_options_set(&engine, options);
}

static int8_t quantized(float value)
{
    float scaled = value / PORT_SAMPLE_SCALE + 0.5f;
    int32_t code;

    if (!(scaled > -CODE_LIMIT)) { /* also true for NaN */
        scaled = -CODE_LIMIT;
    }
    if (scaled > CODE_LIMIT) {
        scaled = CODE_LIMIT;
    }
    code = (int32_t)scaled;
    code = ((float)code > scaled ? code - 1 : code) + PORT_SAMPLE_ZERO;
    return (int8_t)(code < -128 ? -128 : code > 127 ? 127 : code);
}

int32_t port_library_quantize(const float *values, int8_t *sample)
{
    const float low = PORT_SAMPLE_SCALE * (float)(-129 - PORT_SAMPLE_ZERO);
    const float high = PORT_SAMPLE_SCALE * (float)(128 - PORT_SAMPLE_ZERO);
    int32_t clipped = 0;
    int finite = 1;

    for (uint32_t place = 0; place < PORT_SAMPLE_PLACES; place++) {
        for (uint32_t channel = 0; channel < PORT_SAMPLE_CHANNELS; channel++) {
            float value = values[channel * PORT_SAMPLE_PLACES + place];

            finite = finite && value - value == 0.0f;
            clipped += value < low || value > high;
            *sample++ = quantized(value);
        }
    }
    return finite ? clipped : -1;
}

port_status port_library_train(const int8_t *sample, uint16_t label, port_result *result)
{
    port_result unused;
    port_status status = port_input_write(&engine, 0, sample, PORT_MODEL_INPUT_BYTES);

    return status == PORT_OK ? port_train(&engine, label, result != NULL ? result : &unused) : status;
}

port_status port_library_train_to(const int8_t *sample, const float *targets, port_result *result)
{
    uint32_t bytes = port_sample_bytes(engine.model) - PORT_MODEL_INPUT_BYTES;
    port_status status;

    if (bytes == 0) {
        return PORT_ERROR_UNSUPPORTED;
    }
    status = port_input_write(&engine, PORT_MODEL_INPUT_BYTES, (const int8_t *)(const void *)targets, bytes);
    return status == PORT_OK ? port_library_train(sample, 0, result) : status;
}

int port_library_infer(const int8_t *sample)
{
    port_result result;

    if (port_input_write(&engine, 0, sample, PORT_MODEL_INPUT_BYTES) != PORT_OK || port_infer(&engine, &result) != PORT_OK) {
        return -1;
    }
    return result.predicted;
}

const float *port_library_logits(void)
{
    return port_logits(&engine);
}

port_engine *port_library_engine(void)
{
    return &engine;
}

port_status port_library_save(void)
{
    uint8_t header[HEADER_SIZE];
    port_state state = port_state_get(&engine);
    uint32_t generation, slot;

    if (kept == NULL) {
        return PORT_ERROR_MEDIUM;
    }
    slot = newest_slot();
    generation = generation_of(slot);
    slot = generation != 0 ? 1u - slot : slot; /* never the newest one */
    port_put32(header, MAGIC);
    port_put32(header + 4, VERSION);
    port_put32(header + 8, generation + 1);
    port_put32(header + 12, PORT_MODEL_PARAMETER_BYTES);
    port_put_float(header + 16, engine.options.learning_rate);
    header[20] = engine.options.rule;
    header[21] = engine.options.scaling;
    port_put16(header + 22, 0);
    port_put32(header + 24, state.generator);
    port_put32(header + 28, state.steps);
    memcpy(header + AT_HASH, port_model_hash(engine.model), PORT_MODEL_HASH_BYTES);
    port_put32(header + AT_PARAMETER_CRC, port_crc32(0, port_parameters_view(&engine), PORT_MODEL_PARAMETER_BYTES));
    port_put32(header + AT_HEADER_CRC, port_crc32(0, header, AT_HEADER_CRC));
    if ((kept->erase != NULL && kept->erase(kept->context, slot) != 0)
        || kept->write(kept->context, slot, HEADER_SIZE, port_parameters_view(&engine), PORT_MODEL_PARAMETER_BYTES) != 0
        || kept->write(kept->context, slot, 0, header, HEADER_SIZE) != 0) {
        return PORT_ERROR_MEDIUM;
    }
    return generation_of(slot) == generation + 1 ? PORT_OK : PORT_ERROR_MEDIUM;
}

port_status port_library_forget(void)
{
    return port_parameters_reset(&engine);
}
