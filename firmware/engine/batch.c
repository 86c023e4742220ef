/* Many samples in one call, for hosts and benchmarks. */
#include "port_engine.h"

port_status port_train_many(port_engine *engine, const int8_t *inputs, const uint16_t *labels, const uint32_t *order,
                            uint32_t count, float *loss_sum, uint32_t *correct) {
    uint32_t bytes = port_sample_bytes(engine->model);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = order ? order[i] : i;
        port_result result;
        port_status status = port_input_write(engine, 0, inputs + (size_t)at * bytes, bytes);
        if (status == PORT_OK) status = port_train(engine, labels[at], &result);
        if (status != PORT_OK) return status;
        *loss_sum += result.loss;
        *correct += result.correct;
    }
    return PORT_OK;
}

port_status port_eval_many(port_engine *engine, const int8_t *inputs, const uint16_t *labels, uint32_t count,
                           float *loss_sum, uint32_t *correct) {
    uint32_t bytes = port_sample_bytes(engine->model);
    for (uint32_t i = 0; i < count; i++) {
        port_result result;
        port_status status = port_input_write(engine, 0, inputs + (size_t)i * bytes, bytes);
        if (status == PORT_OK) status = port_eval(engine, labels[i], &result);
        if (status != PORT_OK) return status;
        *loss_sum += result.loss;
        *correct += result.correct;
    }
    return PORT_OK;
}
