/* Samples that are kept in flash and trained again, so that a board that learns new data does not forget the old.
 *
 * A ring of records, each with its checksum. When the ring is full, the oldest sector is erased: of n sectors, at most
 * one is missing. Each sector is erased once per round of the ring. A power cut at any moment loses only the record
 * that was being written. Samples of another model are ignored. Call port_library_begin first, from the same thread.
 */
#ifndef PORT_REPLAY_H
#define PORT_REPLAY_H

#include "port_library.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PORT_REPLAY_UNIT 16u /* records begin and end at multiples of it: the largest write unit of common flash */
#ifdef PORT_MODEL_TARGET_COUNT
#define PORT_REPLAY_SAMPLE_BYTES (PORT_MODEL_INPUT_BYTES + 4u * PORT_MODEL_TARGET_COUNT)
#else
#define PORT_REPLAY_SAMPLE_BYTES PORT_MODEL_INPUT_BYTES
#endif
#define PORT_REPLAY_RECORD_BYTES ((16u + PORT_REPLAY_SAMPLE_BYTES + PORT_REPLAY_UNIT - 1u) / PORT_REPLAY_UNIT * PORT_REPLAY_UNIT)

/* `sectors` times `sector_bytes` of flash, at least two; a record must fit a sector. Each function returns 0 on success.
 * Offsets count from the start of the first sector. `write` receives whole units, each once between two erases. `erase` may
 * be null for memory that needs none. */
typedef struct port_replay_memory {
    uint32_t sectors, sector_bytes;
    int (*erase)(void *context, uint32_t sector);
    int (*write)(void *context, uint32_t offset, const void *data, uint32_t bytes);
    int (*read)(void *context, uint32_t offset, void *data, uint32_t bytes);
    void *context;
} port_replay_memory;

/* Find the samples that `memory` holds; it must outlive the calls below. PORT_ERROR_MEMORY if a record does not fit a sector
 * or there is only one, PORT_ERROR_MEDIUM if it cannot be read. */
port_status port_replay_begin(const port_replay_memory *memory);

/* Return the number of samples kept; an upper bound, because a few records may be damaged. */
uint32_t port_replay_count(void);

/* Keep a sample with its label or, for a model with targets, label 0 and its targets (null otherwise). */
port_status port_replay_keep(const int8_t *sample, uint16_t label, const float *targets);

/* Train on `count` kept samples, drawn at random; none if none is kept. `result` (may be null): of the last one. Until the next
 * sample is kept, every call draws the same ones. */
port_status port_replay_train(uint32_t count, port_result *result);

#ifdef __cplusplus
}
#endif
#endif
