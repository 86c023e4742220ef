/* Kernels of the engine: what one table step does to the arena and to the parameters.
 *
 * Every kernel has a scalar C99 reference. Where PORT_SIMD is 1 the *_simd.c files replace the hot loops; both give the
 * same bits, because integer sums are exact and every fp32 sum keeps the order written at its reference.
 */
#ifndef PORT_KERNELS_H
#define PORT_KERNELS_H

#include "port_model.h"

/* Cortex-M4, M7 and M33 with the DSP extension; PORT_SIMD_EMULATE builds the same loops on any host for the tests. */
#ifndef PORT_SIMD
#if defined(__ARM_FEATURE_DSP) || defined(PORT_SIMD_EMULATE)
#define PORT_SIMD 1
#else
#define PORT_SIMD 0
#endif
#endif

/* Kinds of ops in a build, a bit each: kernels of other kinds are left out, to save flash. model.h defines it for a
 * model. */
#ifndef PORT_KINDS
#define PORT_KINDS 0xFFFFFFFFu
#endif
#define PORT_HAS(kind) ((PORT_KINDS) >> (kind) & 1u)

/* Without an FPU a float product costs about 60 instructions: there it pays to skip zero gradients. */
#if defined(__arm__) && !defined(__ARM_FP)
#define PORT_SKIP_ZERO_GRADIENTS 1
#else
#define PORT_SKIP_ZERO_GRADIENTS 0
#endif

/* One op of the table with its addresses. `trained` holds rows [0, trained_rows), `frozen` the rest. */
typedef struct port_bound {
    const port_op *op;
    const int8_t *in;
    const int8_t *other;
    int8_t *out;      /* of the classifier: its float logits */
    int16_t *scratch; /* null: the scalar kernel; of a recurrent unit: its state, fp32 */
    int8_t *trained;
    const int8_t *frozen;
    const int32_t *bias;
    int32_t *trained_bias; /* null: frozen */
    uint8_t *low_bytes;    /* Q8.8, null: none */
    int32_t first, last;   /* lines to process (port_step) */
    const float *resumed;  /* sums to start from, one per trained weight or bias; null: 0 */
    float *suspended;      /* destination of sums; null: the update */
} port_bound;

/* How the update is rounded, with the generator it advances: by one draw per parameter, whatever its step, so that the
 * draws of two samples line up. `flip` is exclusive-ored with every draw (port_train). */
typedef struct port_update {
    float rate;
    uint8_t rule;
    uint8_t scaling;
    uint32_t generator;
    uint32_t flip;
} port_update;

/* Forward: int8 in, int8 out (classifier: float logits). */
void port_conv_forward(const port_bound *bound);
void port_depthwise_forward(const port_bound *bound);
void port_add_forward(const port_bound *bound);
void port_average_pool_forward(const port_bound *bound);
void port_max_pool_forward(const port_bound *bound);
void port_classifier_forward(const port_bound *bound);
void port_grouped_forward(const port_bound *bound);
void port_table_forward(const port_bound *bound);
void port_concat_forward(const port_bound *bound);
void port_upsample_forward(const port_bound *bound);
void port_product_forward(const port_bound *bound);
void port_gru_forward(const port_bound *bound);

#if PORT_SIMD
void port_conv_forward_simd(const port_bound *bound);
void port_depthwise_forward_simd(const port_bound *bound);
#endif

/* Softmax cross entropy of `count` logits, in place: logits become d(loss)/d(logits). The loss is in nats. */
float port_loss_gradient(float *logits, uint16_t count, uint16_t label);
float port_loss(const float *logits, uint16_t count, uint16_t label);
/* Mean squared error of `count` outputs; the gradient replaces them. */
float port_squared_error_gradient(float *outputs, const float *targets, uint16_t count);
float port_squared_error(const float *outputs, const float *targets, uint16_t count);
/* exp of x <= 0. */
float port_exp_negative(float x);

/* Backward, fp32 in the real domain. `gradient` belongs to the op's output [out_h][out_w][out_c], `target` to its input. */
void port_mask_gradient(const port_bound *bound, float *gradient);
void port_conv_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_depthwise_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_average_pool_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_max_pool_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_copy_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_grouped_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_table_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_concat_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate, int second);
void port_upsample_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate);
void port_product_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate, int second);

/* Gradient of the parameters and their update, one value after the other, without a gradient buffer. `groups` null: of
 * all trained channels; otherwise of the groups of PORT_GROUP marked PORT_CHOSEN there (chosen.c). Random numbers are
 * drawn for all of them. */
void port_conv_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update);
void port_depthwise_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update);
void port_grouped_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update);
void port_bias_update(const port_bound *bound, const float *gradient, port_update *update);

/* Of a recurrent unit, in this order: the first leaves in `gradient` and `target` what the others read. */
void port_gru_input_gradient(const port_bound *bound, float *gradient, float *target);
void port_gru_weight_update(const port_bound *bound, const float *gradient, const float *target, port_update *update);
void port_gru_bias_update(const port_bound *bound, const float *gradient, const float *target, port_update *update);

#define PORT_GROUP 4
#define PORT_CHOSEN (-1.0f)
/* Choose the given share, in 1/256, of the groups of trained channels: those with the largest gradients. */
void port_choose_channels(const port_bound *bound, const float *gradient, uint16_t share, float *groups);

#endif
