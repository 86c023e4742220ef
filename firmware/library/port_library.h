/* One compiled model inside your own program: train, infer, and save what was learnt. C99 and C++.
 *
 * Call port_library_begin once. A sample is int8, PORT_MODEL_INPUT_BYTES long, as port_library_quantize converts it
 * from real values. The memory is static: PORT_MODEL_ARENA_BYTES and PORT_MODEL_PARAMETER_BYTES of model.h. Call it
 * from one thread at a time.
 */
#ifndef PORT_LIBRARY_H
#define PORT_LIBRARY_H

#include "model.h"
#include "port_engine.h"
#include "port_sample.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PORT_LIBRARY_SLOTS 2u
#define PORT_LIBRARY_SLOT_BYTES (72u + PORT_MODEL_PARAMETER_BYTES)

/* Two slots of non-volatile memory: flash, EEPROM, a file. Each function returns 0 on success. `erase` may be null. A
 * save writes the older slot and its header last: power lost at any moment leaves the other slot valid. */
typedef struct port_library_storage {
    int (*erase)(void *context, uint32_t slot);
    int (*write)(void *context, uint32_t slot, uint32_t offset, const void *data, uint32_t bytes);
    int (*read)(void *context, uint32_t slot, uint32_t offset, void *data, uint32_t bytes);
    void *context;
} port_library_storage;

/* Bind the model to its memory, and load the newest valid slot of `storage` (null: none) or else the weights of the
 * image. PORT_ERROR_UNSUPPORTED if the compiler fused multiplications and additions: use -ffp-contract=off. */
port_status port_library_begin(const port_library_storage *storage);

/* Set learning rate, rounding rule and scaling of subsequent training. */
port_status port_library_options(const port_options *options);

/* Convert real values, channel by channel ([channels][height][width], PORT_SAMPLE_VALUES of them), to int8. Return how many
 * lie outside of the calibrated range and are clipped, or -1 if one is NaN or infinite: such a sample is not to be learned. */
int32_t port_library_quantize(const float *values, int8_t *sample);

/* Train on one sample; `result` (may be null) receives the loss and the prediction before the update. */
port_status port_library_train(const int8_t *sample, uint16_t label, port_result *result);

/* Train a model with targets: PORT_MODEL_TARGET_COUNT of them. PORT_ERROR_RANGE if one is not finite, PORT_ERROR_UNSUPPORTED
 * for a model that learns classes. The outputs of port_library_logits are then its answers. */
port_status port_library_train_to(const int8_t *sample, const float *targets, port_result *result);

/* Return the class of a sample (0 with targets), or -1 if the engine rejects it; port_library_logits holds the scores until the next call. */
int port_library_infer(const int8_t *sample);
const float *port_library_logits(void);

/* Return the engine, for the calls of port_engine.h. */
port_engine *port_library_engine(void);

/* Save parameters, options and state. PORT_ERROR_MEDIUM without a storage, or if it fails. */
port_status port_library_save(void);

/* Reset to the weights of the image; saved slots stay. */
port_status port_library_forget(void);

#ifdef __cplusplus
}
#endif
#endif
