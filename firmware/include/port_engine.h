/* PORT engine: int8 inference and in-place training of one compiled model.
 *
 * The engine is an interpreter of const tables that planner/port_planner/mcu generates (port_model.h). It allocates nothing and keeps
 * no mutable file-scope state: the caller owns the engine struct, the arena (activations and gradients) and the
 * parameters (the trainable weights and biases). The same sources give the same bits on x86-64, Cortex-M4F, M7F, M3 and
 * M0; build them with -ffp-contract=off and without -ffast-math.
 *
 * Call order: port_engine_init, port_parameters_reset (or write a snapshot into the parameters), port_options_set, then per
 * sample port_input_write and one of port_infer, port_eval, port_train. Inference and training may overwrite the input,
 * so every sample is written again.
 *
 * Generated beside the model (model.h): PORT_MODEL_ARENA_BYTES, PORT_MODEL_PARAMETER_BYTES, PORT_MODEL_INPUT_BYTES,
 * PORT_MODEL_CLASS_COUNT, PORT_MODEL_NAME and `extern const port_model port_generated_model;`.
 */
#ifndef PORT_ENGINE_H
#define PORT_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PORT_ENGINE_ABI 6u        /* changes when tables of an older port_model.h mean something else; compared by port_engine_init */
#define PORT_MODEL_HASH_BYTES 32u /* SHA-256 of the model's tables and weights, made by the compiler */
#define PORT_ALIGNMENT 8u         /* of the arena and of the parameters */

typedef struct port_model port_model; /* tables: port_model.h */

typedef enum port_status {
    PORT_OK = 0,
    PORT_ERROR_ARGUMENT = 1,    /* null pointer, rule or learning rate outside its range */
    PORT_ERROR_MEMORY = 2,      /* a buffer is too small or not aligned to PORT_ALIGNMENT */
    PORT_ERROR_MODEL = 3,       /* tables of another ABI: generate the model again */
    PORT_ERROR_RANGE = 4,       /* offset, length or label outside the model, or a target that is not finite */
    PORT_ERROR_UNSUPPORTED = 5, /* training an inference-only model, or Q8.8 without its storage */
    PORT_ERROR_MEDIUM = 6,      /* the medium of the pages failed, is missing, or is too small */
    PORT_ERROR_DAMAGED = 7,     /* a page came back with another checksum */
    PORT_ERROR_TORN = 8,        /* a training step was interrupted: parameters and state must be restored first */
} port_status;

/* How `weight -= step` is rounded to int8. Numbers are wire format. */
typedef enum port_rule {
    PORT_RULE_STOCHASTIC = 0, /* floor(value + u), u uniform in [0, 1): unbiased, no extra RAM; the default */
    PORT_RULE_NEAREST = 1,    /* half away from zero: loses every step below half a quantum */
    PORT_RULE_TRUNCATE = 2,   /* C conversion, as TinyEngine does: decays weights towards zero */
    PORT_RULE_Q88 = 3,        /* nearest on a 16-bit value, one extra byte per trainable weight; STOCHASTIC where a layer has none */
} port_rule;

typedef struct port_options {
    float learning_rate; /* finite, >= 0 */
    uint8_t rule;        /* port_rule */
    uint8_t scaling;     /* 1: quantisation-aware scaling, step = rate * gradient / scale; 0: rate * gradient * scale */
} port_options;

/* Everything a checkpoint needs besides the parameter bytes and the options. */
typedef struct port_state {
    uint32_t generator; /* of the stochastic rounding; moves on after every second sample (port_train) */
    uint32_t steps;     /* training samples since the parameters were reset */
} port_state;

typedef struct port_result {
    float loss;        /* cross entropy in nats, or the mean squared error; 0 from port_infer */
    uint16_t predicted; /* class; 0 with targets */
    uint8_t correct;   /* 1 if predicted == label; 0 from port_infer and with targets */
} port_result;

/* Called after every table step (a layer, or one gradient or update), so that a watchdog can be fed; must not touch
 * the engine. `step` counts from 0 within one port_infer, port_eval or port_train. */
typedef void (*port_yield)(void *context, uint32_t step);

/* External memory for the model's pages. One transfer at a time: `write` and `read` start it, and return at once if
 * the chip has DMA; `poll` continues it and reports its state. A driver without DMA does work in all three. Offsets
 * are multiples of block_bytes. */
typedef enum port_transfer { PORT_TRANSFER_DONE = 0, PORT_TRANSFER_BUSY = 1, PORT_TRANSFER_FAILED = 2 } port_transfer;

typedef struct port_medium {
    const char *name;     /* psram, nor, sd */
    uint32_t bytes;
    uint32_t block_bytes; /* smallest unit of a write; wear is counted in these */
    uint8_t *mapped;      /* address of a memory-mapped medium; null: not mapped */
    port_transfer (*write)(void *context, uint32_t offset, const void *data, uint32_t bytes);
    port_transfer (*read)(void *context, uint32_t offset, void *data, uint32_t bytes);
    port_transfer (*poll)(void *context);
    void *context;
} port_medium;

/* Since the engine was bound. */
typedef struct port_page_counters {
    uint64_t read_bytes, written_bytes; /* written: whole blocks, as the medium wears */
    uint32_t failed, damaged;           /* transfers; pages whose checksum differed */
} port_page_counters;

#define PORT_PAGER_QUEUE 4u /* most transfers that are requested and not complete; one more waits for the oldest */

typedef struct port_pager { /* engine/pager.c */
    const port_medium *medium;           /* null: none */
    uint16_t queue[PORT_PAGER_QUEUE];    /* ring of rows of the table; the one at `first` is pending */
    uint8_t first, queued;
    uint8_t bank;                        /* which of the two copies of the parameters on the medium is whole */
    uint8_t sealed;                      /* the checksums of that copy are known */
    uint8_t carried;                     /* whether rows of PORT_STEP_CARRIED find their data in the arena already */
    port_page_counters counters;
} port_pager;

typedef struct port_engine { /* caller-owned; treat as opaque */
    const port_model *model;
    uint8_t *arena;
    uint8_t *parameters;
    port_options options;
    port_state state;
    port_yield yield;
    void *yield_context;
    uint8_t torn; /* PORT_ERROR_TORN until parameters or state are set */
    port_pager pager;
} port_engine;

/* Sizes, before any memory is given. */
uint32_t port_arena_bytes(const port_model *model);     /* training included, if the model trains */
uint32_t port_parameter_bytes(const port_model *model); /* trainable biases, weights and Q8.8 low bytes */
uint32_t port_input_bytes(const port_model *model);     /* one sample, int8, [height][width][channel] */
uint32_t port_class_count(const port_model *model);     /* outputs */
uint32_t port_label_count(const port_model *model);     /* classes; 1 for a model with targets, whose label is 0 */
uint32_t port_sample_bytes(const port_model *model);    /* a training sample: input, and a float per target */
uint32_t port_step_count(const port_model *model);      /* table steps of one training sample, 0 if inference only */
const uint8_t *port_model_hash(const port_model *model); /* PORT_MODEL_HASH_BYTES bytes */
const char *port_model_name(const port_model *model);
int port_model_trains(const port_model *model);
int port_model_has_q88(const port_model *model);
int port_model_pages_parameters(const port_model *model); /* the parameters live on a mapped medium, in two copies */
uint32_t port_medium_bytes(const port_model *model);      /* pages and both copies; 0: the model does not page */

/* Bind an engine to a model and to memory. Paged parameters lie at the start of the medium, in two copies. Options
 * become { 0.01, STOCHASTIC, 1 }, generator 1, steps 0; the parameters are not touched. */
port_status port_engine_init(port_engine *engine, const port_model *model, void *arena, size_t arena_bytes,
                             void *parameters, size_t parameter_bytes);
void port_yield_set(port_engine *engine, port_yield yield, void *context);
/* Set the page medium; it must outlive the engine. PORT_ERROR_MEDIUM if it is too small or not mapped as required. */
port_status port_medium_set(port_engine *engine, const port_medium *medium);
port_page_counters port_page_counters_get(const port_engine *engine);

/* Copy the initial parameters out of the flash image; generator and steps as after init. */
port_status port_parameters_reset(port_engine *engine);
/* The mutable region itself: parameter bytes [0, port_parameter_bytes), for LOAD and snapshots; valid until the next port_train. */
uint8_t *port_parameters(port_engine *engine);
const uint8_t *port_parameters_view(const port_engine *engine); /* the same, read-only */
int port_is_torn(const port_engine *engine);
/* Compare parameters on the medium with their checksums, or store new checksums if they were just written. */
port_status port_parameters_verify(port_engine *engine);

port_status port_options_set(port_engine *engine, const port_options *options);
void port_state_set(port_engine *engine, port_state state); /* any value is legal */
port_state port_state_get(const port_engine *engine);

/* Copy part of a sample into the input tensor and the targets after it: [offset, offset + length) of
 * port_sample_bytes. */
port_status port_input_write(port_engine *engine, uint32_t offset, const int8_t *data, uint32_t length);

/* The input tensor itself, port_input_bytes long, for drivers that can fill it in place. */
int8_t *port_input(port_engine *engine);

/* Logits or, with targets, outputs of the last infer or eval (class_count floats in the arena), valid until the next input is written. */
const float *port_logits(const port_engine *engine);

port_status port_infer(port_engine *engine, port_result *result);
port_status port_eval(port_engine *engine, uint16_t label, port_result *result);
port_status port_train(port_engine *engine, uint16_t label, port_result *result);

/* Host-side convenience: `count` samples laid out one after the other, taken in `order` (null: 0, 1, ...).
 * Adds up loss and correct predictions. */
port_status port_train_many(port_engine *engine, const int8_t *inputs, const uint16_t *labels, const uint32_t *order,
                            uint32_t count, float *loss_sum, uint32_t *correct);
port_status port_eval_many(port_engine *engine, const int8_t *inputs, const uint16_t *labels, uint32_t count,
                           float *loss_sum, uint32_t *correct);

#ifdef __cplusplus
}
#endif
#endif
