/* Any function of one value, tabulated by the compiler for the 256 codes of its input. */
#include "kernels.h"

void port_table_forward(const port_bound *bound) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    for (uint32_t i = 0; i < count; i++) bound->out[i] = op->table[bound->in[i] + 128];
}

void port_table_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    uint32_t count = (uint32_t)op->out_h * op->out_w * op->out_c;
    for (uint32_t i = 0; i < count; i++) {
        float dx = gradient[i] * op->slope[bound->in[i] + 128];
        target[i] = accumulate ? target[i] + dx : dx;
    }
}
