/* Tables of one compiled model, as planner/port_planner/mcu/emit.py writes them. Everything here is const and lives in flash.
 *
 * Tensors are [height][width][channel]; a sensor stream (1-D convolution) is an image of height 1. Activations are int8
 * with a zero point, gradients are fp32 in the real (not the quantised) domain. All offsets count bytes from the start
 * of the arena, except the parameter offsets, which count from the start of the parameters.
 */
#ifndef PORT_MODEL_H
#define PORT_MODEL_H

#include "port_engine.h"

#define PORT_NONE 0x80000000u /* no such offset */

enum port_op_kind {
    PORT_OP_CONV = 1,         /* weights [out_c][kernel_h][kernel_w][in_c]; pointwise and fully connected are 1x1 */
    PORT_OP_DEPTHWISE = 2,    /* weights [kernel_h][kernel_w][channel] */
    PORT_OP_ADD = 3,          /* residual: in + other */
    PORT_OP_AVERAGE_POOL = 4, /* window kernel_h x kernel_w, divisor = the whole window, zero point and scale unchanged */
    PORT_OP_MAX_POOL = 5,
    PORT_OP_CLASSIFIER = 6,   /* fully connected on in_h * in_w * in_c inputs, float logits; always the last one */
    PORT_OP_GROUPED = 7,      /* convolution with groups, dilation, several outputs a channel; weights [out_c][kernel_h][kernel_w][in_c / groups] */
    PORT_OP_TABLE = 8,        /* a function of one value, as a table: table[in + 128] */
    PORT_OP_CONCAT = 9,       /* in, then other, along the one axis in which in and out differ */
    PORT_OP_UPSAMPLE = 10,    /* each pixel kernel_h x kernel_w times */
    PORT_OP_MULTIPLY = 11,    /* in * other, of equal extents */
    PORT_OP_SCALE = 12,       /* in * other, which has one value a channel */
    PORT_OP_TRANSPOSED = 13,  /* transposed convolution, laid out as PORT_OP_GROUPED */
    PORT_OP_GRU = 14,         /* states of a gated recurrent unit after each of out_h * out_w steps; in: the gates' inputs, 3 out_c a step;
                                 weights [3 out_c][out_c], biases and scales of the state before; other_scale: the state's */
};

/* Reference that a sample is compared with: a label, or a target for each output. */
enum port_loss_kind {
    PORT_LOSS_CROSS_ENTROPY = 0, /* of the softmax of the outputs */
    PORT_LOSS_MSE = 1,           /* mean of the squared differences of the outputs from the targets */
};

typedef struct port_op {
    uint8_t kind;
    uint8_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left;
    int8_t in_zero, other_zero, out_zero;
    int8_t out_min, out_max; /* clamp of the output: ReLU, ReLU6 or saturation */
    uint8_t add_shift;
    uint16_t in_h, in_w, in_c;
    uint16_t out_h, out_w, out_c;
    uint16_t trained_rows;   /* output channels [0, trained_rows) have their weights in the parameters (depthwise, GRU: 0 or all) */
    uint32_t weight_offset;  /* of the trained rows, in the parameters */
    uint32_t bias_offset;    /* int32[out_c] in the parameters, PORT_NONE: frozen */
    uint32_t q88_offset;     /* offset in the parameters of the trained rows' low bytes; PORT_NONE: none */
    const int8_t *weight;    /* frozen rows [trained_rows, out_c) */
    const int32_t *bias;     /* frozen, or null */
    /* real multiplier in_scale * weight_scale[o] / out_scale = multiplier[o] / 2^shift[o], 33 <= shift <= 62 */
    const int32_t *multiplier;
    const uint8_t *shift;
    const float *weight_scale; /* [out_c]; [3 out_c] of PORT_OP_GRU */
    float in_scale, other_scale;
    int32_t add_in, add_other; /* residual add: (in - in_zero) * add_in + (other - other_zero) * add_other, >> add_shift;
                                  concat: each by itself; product: (in - in_zero) * (other - other_zero) * add_in / 2^add_shift */
    uint16_t groups;           /* of PORT_OP_GROUPED and PORT_OP_TRANSPOSED */
    uint8_t dilation_h, dilation_w;
    const int8_t *table;       /* int8[256], PORT_OP_TABLE */
    const float *slope;        /* derivative of the function, float[256]; null: no gradient passes */
} port_op;

enum port_step_kind {
    PORT_STEP_FORWARD = 0, /* the op itself; in the backward part again, where its output was dropped after the forward part */
    PORT_STEP_LOSS = 1,    /* outputs -> d(loss)/d(outputs), in place */
    PORT_STEP_MASK = 2,    /* zero `gradient` where the op's stored output sits on its clamp */
    PORT_STEP_INPUT = 3,   /* gradient of the op's output -> gradient of its input */
    PORT_STEP_WEIGHT = 4,  /* gradient and update of the trained rows, one weight after the other, in place */
    PORT_STEP_BIAS = 5,    /* gradient and update of the bias */
    PORT_STEP_COPY = 6,    /* the skip branch of a residual add: copy or accumulate */
    PORT_STEP_PAGE_OUT = 7,  /* start writing the data at `in` to page `op` */
    PORT_STEP_PAGE_IN = 8,   /* start to read page `op` to `out` */
    PORT_STEP_PAGE_WAIT = 9, /* until the transfers of page `op` are done; what was read is checked */
};

#define PORT_STEP_ACCUMULATE 1u /* flag: add to the target instead of overwriting it */
#define PORT_STEP_RESUMES 2u    /* flag of WEIGHT and BIAS: the sums start from those in `scratch`, not from 0 */
#define PORT_STEP_SUSPENDS 4u   /* flag of WEIGHT and BIAS: the sums go to `scratch`; another row finishes and updates */
#define PORT_STEP_CHOOSES 16u   /* flag of WEIGHT: only groups of channels with large gradients; `other`: room for a float per group */
#define PORT_STEP_TRAINING 8u   /* flag of rows before the loss that inference leaves out */
#define PORT_STEP_SECOND 64u    /* flag of INPUT: the gradient of the op's other input */
#define PORT_STEP_CARRIED 32u   /* flag of PAGE_IN: no read right after a training sample, which left them there */

/* One row of the table. A tensor that was dropped and comes back may have another address, so every row names the
 * places of its own operands; those that a kind does not use are PORT_NONE.
 *
 * A row processes lines [first, last): of the op's output (FORWARD, MASK, WEIGHT, BIAS) or of its input (INPUT). COPY,
 * LOSS, residual adds and poolings always process all lines. If only bands of a tensor exist, its place is where line 0
 * would lie. That may be before the arena, so places are signed.
 */
typedef struct port_step {
    uint8_t kind, flags;
    uint16_t op;
    uint16_t first, last;
    uint32_t in, other, out; /* the op's stored activations */
    uint32_t scratch;        /* int16 columns of the SIMD kernels (FORWARD; PORT_NONE: use the scalar kernel), fp32 sums */
    uint32_t gradient;       /* of the op's output */
    uint32_t target;         /* gradient of the op's input (INPUT, COPY; of PORT_OP_GRU also WEIGHT and BIAS, which read it) */
    uint32_t parameters;     /* where byte 0 of the parameters would lie, if the op's are paged in; PORT_NONE: where they live */
} port_step;

/* A place on the medium. Pages [0, parameter_page_count) are those of the parameters, at their offset in both copies. */
typedef struct port_page {
    uint32_t offset, bytes;
} port_page;

struct port_model {
    uint32_t abi; /* PORT_ENGINE_ABI of the generator */
    uint8_t hash[PORT_MODEL_HASH_BYTES];
    const char *name;
    uint32_t arena_bytes, parameter_bytes, input_offset, input_bytes, logits_offset;
    uint16_t class_count, op_count;
    uint16_t forward_count, step_count; /* rows of inference; rows of a training sample, as many if inference only */
    uint8_t has_q88;
    const port_op *ops;
    const port_step *steps;
    uint32_t medium_bytes;     /* bytes of all pages, including both copies of the parameters */
    uint32_t checksums_offset; /* in the arena: u32 per page, and a second one for each page of parameters */
    uint16_t page_count, parameter_page_count;
    uint16_t chosen_share; /* of the groups of channels that a row with PORT_STEP_CHOOSES trains, in 1/256 */
    const port_page *pages;
    const uint8_t *parameters; /* initial image, parameter_bytes long, little endian */
    uint8_t loss;              /* port_loss_kind */
    uint32_t target_offset;    /* in the arena: a float per output, with PORT_LOSS_MSE */
};

#endif
