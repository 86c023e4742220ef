/* Two-slot snapshot of the training state in non-volatile memory.
 *
 * A save erases and writes the older slot and commits it with its header, written last. Power lost at any moment
 * leaves the other slot whole; each slot proves itself by CRC, model hash and size. */
#ifndef PORT_SNAPSHOT_H
#define PORT_SNAPSHOT_H

#include <stdint.h>

#include "port_engine.h"

enum snapshot_result { SNAPSHOT_OK, SNAPSHOT_NONE, SNAPSHOT_NO_STORAGE, SNAPSHOT_FAILED };

struct snapshot_info {
    uint32_t slot;
    uint32_t generation; /* counts saves of this model on this device; 0: none yet */
};

/* Find the newest valid snapshot of this engine's model. */
enum snapshot_result snapshot_find(port_engine *engine, struct snapshot_info *info);
/* Save parameters, options and state. */
enum snapshot_result snapshot_save(port_engine *engine, struct snapshot_info *info);
/* Load the newest valid snapshot; the engine is untouched unless the result is SNAPSHOT_OK. */
enum snapshot_result snapshot_restore(port_engine *engine, struct snapshot_info *info);

#endif
