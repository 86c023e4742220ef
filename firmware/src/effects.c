/* LOAD, OPTIONS, PUSH, TRAIN, EVAL, INFER, SAVE, RESTORE, ABORT, RESET: each runs exactly once; replies are cached. */
#include <string.h>

#include "bytes.h"
#include "device_parts.h"
#include "port.h"
#include "snapshot.h"

static uint8_t from_engine(port_status status)
{
    switch (status) {
    case PORT_OK:
        return REPLY_OK;
    case PORT_ERROR_ARGUMENT:
    case PORT_ERROR_RANGE:
        return REPLY_OUT_OF_RANGE;
    case PORT_ERROR_UNSUPPORTED:
        return REPLY_UNSUPPORTED;
    case PORT_ERROR_MEDIUM:
        return REPLY_MEDIUM_FAILED;
    case PORT_ERROR_DAMAGED:
        return REPLY_PAGE_DAMAGED;
    case PORT_ERROR_TORN:
        return REPLY_MODEL_TORN;
    default:
        return REPLY_ENGINE_FAILED;
    }
}

static uint8_t from_snapshot(enum snapshot_result result)
{
    switch (result) {
    case SNAPSHOT_OK:
        return REPLY_OK;
    case SNAPSHOT_NONE:
        return REPLY_NO_SNAPSHOT;
    case SNAPSHOT_NO_STORAGE:
        return REPLY_NO_STORAGE;
    default:
        return REPLY_STORAGE_FAILED;
    }
}

static uint8_t *reply_start(struct device *device)
{
    return device->cache.payload;
}

static void reply_end(struct device *device, const uint8_t *end)
{
    device->cache.size = (uint16_t)(end - device->cache.payload);
}

/* LOAD: offset u32, parameter bytes. */
static uint8_t load(struct device *device, const struct device_request *request)
{
    uint32_t size = port_parameter_bytes(device->engine->model), offset, length;

    if (request->size <= 4) {
        return REPLY_BAD_LENGTH;
    }
    offset = port_get32(request->payload);
    length = request->size - 4;
    if (offset > size || length > size - offset) {
        return REPLY_OUT_OF_RANGE;
    }
    memcpy(port_parameters(device->engine) + offset, request->payload + 4, length);
    return REPLY_OK;
}

/* Current options and state: the reply of OPTIONS, SAVE and RESTORE.
 *
 * learning rate f32, rule u8, scaling u8, 0 u16, generator u32, steps u32, generation of the snapshot u32.
 */
static uint8_t *put_options(struct device *device, uint8_t *at, uint32_t generation)
{
    const port_engine *engine = device->engine;
    port_state state = port_state_get(engine);

    at = port_put_float(at, engine->options.learning_rate);
    *at++ = engine->options.rule;
    *at++ = engine->options.scaling;
    at = port_put16(at, 0);
    at = port_put32(at, state.generator);
    at = port_put32(at, state.steps);
    return port_put32(at, generation);
}

/* OPTIONS: flags u32, learning rate f32, rule u8, scaling u8, 0 u16, generator u32, steps u32. */
static uint8_t options(struct device *device, const struct device_request *request)
{
    const uint8_t *at = request->payload;
    port_options wanted;
    port_state state;
    uint32_t flags;

    if (request->size != OPTIONS_SIZE) {
        return REPLY_BAD_LENGTH;
    }
    flags = port_get32(at);
    if ((flags & ~(OPTIONS_SET_RULE | OPTIONS_SET_STATE)) != 0) {
        return REPLY_OUT_OF_RANGE;
    }
    if ((flags & OPTIONS_SET_RULE) != 0) {
        wanted.learning_rate = port_get_float(at + 4);
        wanted.rule = at[8];
        wanted.scaling = at[9];
        port_status status = port_options_set(device->engine, &wanted);
        if (status != PORT_OK) {
            return from_engine(status);
        }
    }
    if ((flags & OPTIONS_SET_STATE) != 0) {
        state.generator = port_get32(at + 12);
        state.steps = port_get32(at + 16);
        port_state_set(device->engine, state);
    }
    reply_end(device, put_options(device, reply_start(device), 0));
    return REPLY_OK;
}

/* PUSH: offset u32, input bytes. Pieces come in order; offset 0 starts again. */
static uint8_t push(struct device *device, const struct device_request *request)
{
    uint32_t offset, length;
    port_status status;

    if (request->size <= 4) {
        return REPLY_BAD_LENGTH;
    }
    offset = port_get32(request->payload);
    length = request->size - 4;
    if (offset != 0 && offset != device->pushed) {
        return REPLY_OUT_OF_RANGE;
    }
    status = port_input_write(device->engine, offset, (const int8_t *)request->payload + 4, length);
    if (status == PORT_OK) {
        device->pushed = offset + length;
    }
    return from_engine(status);
}

/* Payload of TRAIN, EVAL and INFER: count u16, flags u16, labels u16 each (not for INFER), samples. */
struct samples {
    uint32_t count;
    const uint8_t *labels; /* null: INFER */
    const uint8_t *data;   /* null: the pushed input */
    uint32_t bytes;        /* of each */
};

static uint8_t read_samples(struct device *device, const struct device_request *request, int labelled,
                            struct samples *samples)
{
    const port_model *model = device->engine->model;
    uint32_t bytes = labelled ? port_sample_bytes(model) : port_input_bytes(model), flags, labels;

    if (request->size < SAMPLES_HEADER_SIZE) {
        return REPLY_BAD_LENGTH;
    }
    samples->count = port_get16(request->payload);
    flags = port_get16(request->payload + 2);
    labels = labelled ? 2u * samples->count : 0u;
    samples->labels = labelled ? request->payload + SAMPLES_HEADER_SIZE : NULL;
    samples->data = request->payload + SAMPLES_HEADER_SIZE + labels;
    if (samples->count == 0 || (flags & ~SAMPLE_PUSHED) != 0) {
        return REPLY_OUT_OF_RANGE;
    }
    if ((flags & SAMPLE_PUSHED) != 0) {
        samples->data = NULL;
        if (samples->count != 1 || request->size != SAMPLES_HEADER_SIZE + labels) {
            return REPLY_BAD_LENGTH;
        }
        return device->pushed == bytes ? REPLY_OK : REPLY_NO_INPUT;
    }
    samples->bytes = bytes;
    if (samples->count > DEVICE_PAYLOAD_MAX / bytes
        || request->size != SAMPLES_HEADER_SIZE + labels + samples->count * bytes) {
        return REPLY_BAD_LENGTH;
    }
    return REPLY_OK;
}

static uint8_t check_labels(struct device *device, const struct samples *samples)
{
    for (uint32_t i = 0; i < samples->count; i++) {
        if (port_get16(samples->labels + 2 * i) >= port_label_count(device->engine->model)) {
            return REPLY_OUT_OF_RANGE;
        }
    }
    return REPLY_OK;
}

static port_status run_sample(struct device *device, uint8_t type, const struct samples *samples, uint32_t index,
                              port_result *result)
{
    port_engine *engine = device->engine;
    port_status status = PORT_OK;

    if (samples->data != NULL) {
        status = port_input_write(engine, 0, (const int8_t *)samples->data + index * samples->bytes, samples->bytes);
    }
    if (status != PORT_OK) {
        return status;
    }
    if (type == MESSAGE_INFER) {
        device->counters.evaluated++;
        return port_infer(engine, result);
    }
    if (type == MESSAGE_EVAL) {
        device->counters.evaluated++;
        return port_eval(engine, port_get16(samples->labels + 2 * index), result);
    }
    device->counters.trained++;
    return port_train(engine, port_get16(samples->labels + 2 * index), result);
}

/* Replies of TRAIN and EVAL: samples done u16, correct u16, loss sum f32, generator u32, steps u32.
 *
 * Fewer samples done than sent: the host asked for attention; it may continue from there.
 */
static uint8_t learn(struct device *device, const struct device_request *request)
{
    struct samples samples;
    port_state state;
    port_result result;
    uint16_t done = 0, correct = 0;
    float loss = 0.0f;
    uint8_t *at, status = read_samples(device, request, 1, &samples);

    if (status == REPLY_OK) {
        status = check_labels(device, &samples);
    }
    if (status == REPLY_OK && request->type == MESSAGE_TRAIN && !port_model_trains(device->engine->model)) {
        status = REPLY_UNSUPPORTED;
    }
    if (status != REPLY_OK) {
        return status;
    }
    device->pushed = 0;
    (void)port_uart_attention(); /* discard an old signal: it must not stop this run */
    while (done < samples.count && status == REPLY_OK) {
        status = from_engine(run_sample(device, request->type, &samples, done, &result));
        if (status == REPLY_OK) {
            done++;
            correct = (uint16_t)(correct + result.correct);
            loss += result.loss;
        }
        if (port_uart_attention()) {
            break;
        }
    }
    state = port_state_get(device->engine);
    at = port_put16(reply_start(device), done);
    at = port_put16(at, correct);
    at = port_put_float(at, loss);
    at = port_put32(at, state.generator);
    reply_end(device, port_put32(at, state.steps));
    return status;
}

/* Reply of INFER: samples done u16, classes u16 each. */
static uint8_t infer(struct device *device, const struct device_request *request)
{
    struct samples samples;
    port_result result;
    uint8_t *at = reply_start(device) + 2, status = read_samples(device, request, 0, &samples);

    if (status == REPLY_OK && samples.count > INFER_SAMPLES_MAX) {
        status = REPLY_OUT_OF_RANGE;
    }
    if (status != REPLY_OK) {
        return status;
    }
    device->pushed = 0;
    for (uint32_t i = 0; i < samples.count; i++) {
        status = from_engine(run_sample(device, request->type, &samples, i, &result));
        if (status != REPLY_OK) {
            return status;
        }
        at = port_put16(at, result.predicted);
    }
    port_put16(reply_start(device), (uint16_t)samples.count);
    reply_end(device, at);
    return REPLY_OK;
}

static uint8_t save(struct device *device, const struct device_request *request)
{
    struct snapshot_info info;
    uint8_t status;

    if (request->size != 0) {
        return REPLY_BAD_LENGTH;
    }
    if (port_is_torn(device->engine)) {
        return REPLY_MODEL_TORN;
    }
    status = from_engine(port_parameters_verify(device->engine));
    if (status != REPLY_OK) {
        return status;
    }
    status = from_snapshot(snapshot_save(device->engine, &info));
    if (status == REPLY_OK) {
        device->counters.saves++;
        reply_end(device, put_options(device, reply_start(device), info.generation));
    }
    return status;
}

/* RESTORE: source u8. The initial parameters keep the options; a snapshot replaces them. */
static uint8_t restore(struct device *device, const struct device_request *request)
{
    struct snapshot_info info = {0, 0};
    uint8_t status;

    if (request->size != 1) {
        return REPLY_BAD_LENGTH;
    }
    if (request->payload[0] == RESTORE_SNAPSHOT) {
        status = from_snapshot(snapshot_restore(device->engine, &info));
    } else if (request->payload[0] == RESTORE_INITIAL) {
        status = from_engine(port_parameters_reset(device->engine));
    } else {
        status = REPLY_OUT_OF_RANGE;
    }
    if (status == REPLY_OK) {
        reply_end(device, put_options(device, reply_start(device), info.generation));
    }
    return status;
}

uint8_t device_effect(struct device *device, const struct device_request *request)
{
    switch (request->type) {
    case MESSAGE_LOAD:
        return load(device, request);
    case MESSAGE_OPTIONS:
        return options(device, request);
    case MESSAGE_PUSH:
        return push(device, request);
    case MESSAGE_TRAIN:
    case MESSAGE_EVAL:
        return learn(device, request);
    case MESSAGE_INFER:
        return infer(device, request);
    case MESSAGE_SAVE:
        return save(device, request);
    case MESSAGE_RESTORE:
        return restore(device, request);
    case MESSAGE_ABORT:
        device->pushed = 0;
        return request->size == 0 ? REPLY_OK : REPLY_BAD_LENGTH;
    case MESSAGE_RESET:
        return request->size == 0 ? REPLY_OK : REPLY_BAD_LENGTH;
    default:
        return REPLY_UNKNOWN_TYPE;
    }
}
