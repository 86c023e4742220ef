/* Dynamic partial updates: which channels of a layer a step trains (Deutel et al., arXiv 2407.10734, in tile order).
 *
 * Output channels form groups of PORT_GROUP, the rows of a tile. The norm of a group in a step is the sum of the
 * magnitudes of its output gradients. The groups with the largest norms are trained; among equals, the lower ones. The
 * order of sums is fixed, so bits are equal everywhere.
 */
#include "kernels.h"

static float magnitude(const port_bound *bound, const float *gradient, int32_t first, int32_t last) {
    const port_op *op = bound->op;
    float sum = 0.0f;
    for (int32_t p = bound->first * op->out_w; p < bound->last * op->out_w; p++)
        for (int32_t o = first; o < last; o++) {
            float g = gradient[p * op->out_c + o];
            sum += g < 0.0f ? -g : g;
        }
    return sum;
}

void port_choose_channels(const port_bound *bound, const float *gradient, uint16_t share, float *groups) {
    int32_t rows = bound->op->trained_rows, count = (rows + PORT_GROUP - 1) / PORT_GROUP;
    for (int32_t g = 0; g < count; g++)
        groups[g] = magnitude(bound, gradient, g * PORT_GROUP, (g + 1) * PORT_GROUP < rows ? (g + 1) * PORT_GROUP : rows);
    for (int32_t left = (count * share + 255) / 256; left > 0; left--) {
        int32_t most = -1;
        for (int32_t g = 0; g < count; g++)
            if (groups[g] > (most < 0 ? 0.0f : groups[most])) most = g;
        if (most < 0) return; /* the rest has no gradient */
        groups[most] = PORT_CHOSEN;
    }
}
