/* Shared by device.c and the two files with the messages: queries.c and effects.c. */
#ifndef PORT_DEVICE_PARTS_H
#define PORT_DEVICE_PARTS_H

#include "device.h"

/* Answer with `size` bytes at `payload`. */
void device_reply(struct device *device, const struct device_request *request, uint8_t status, const uint8_t *payload,
                  uint32_t size);

/* Run a query and answer it. */
void device_query(struct device *device, const struct device_request *request);

/* Run an effect and fill the cached reply: payload and size; the status is the return value. */
uint8_t device_effect(struct device *device, const struct device_request *request);

#endif
