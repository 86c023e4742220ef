/* Interpreter of the compiled tables, and the interface of port_engine.h. */
#include <string.h>

#include "../kernels/kernels.h"
#include "pager.h"

#define HAS_GROUPED (PORT_HAS(PORT_OP_GROUPED) || PORT_HAS(PORT_OP_TRANSPOSED)) /* one kernel for both */

uint32_t port_arena_bytes(const port_model *model) { return model->arena_bytes; }
uint32_t port_parameter_bytes(const port_model *model) { return model->parameter_bytes; }
uint32_t port_input_bytes(const port_model *model) { return model->input_bytes; }
uint32_t port_class_count(const port_model *model) { return model->class_count; }
uint32_t port_label_count(const port_model *model) { return model->loss == PORT_LOSS_MSE ? 1u : model->class_count; }
uint32_t port_sample_bytes(const port_model *model) {
    return model->input_bytes + (model->loss == PORT_LOSS_MSE ? 4u * model->class_count : 0u);
}
uint32_t port_step_count(const port_model *model) { return port_model_trains(model) ? model->step_count : 0; }
const uint8_t *port_model_hash(const port_model *model) { return model->hash; }
const char *port_model_name(const port_model *model) { return model->name; }
int port_model_trains(const port_model *model) { return model->step_count > model->forward_count; }
int port_model_has_q88(const port_model *model) { return model->has_q88; }
int port_model_pages_parameters(const port_model *model) { return model->parameter_page_count > 0; }
uint32_t port_medium_bytes(const port_model *model) { return model->medium_bytes; }

static int aligned(const void *pointer) { return ((uintptr_t)pointer & (PORT_ALIGNMENT - 1)) == 0; }

port_status port_engine_init(port_engine *engine, const port_model *model, void *arena, size_t arena_bytes,
                             void *parameters, size_t parameter_bytes) {
    if (!engine || !model || !arena || (!parameters && model->parameter_bytes)) return PORT_ERROR_ARGUMENT;
    if (model->abi != PORT_ENGINE_ABI) return PORT_ERROR_MODEL;
    if (arena_bytes < model->arena_bytes || parameter_bytes < model->parameter_bytes) return PORT_ERROR_MEMORY;
    if (!aligned(arena) || !aligned(parameters)) return PORT_ERROR_MEMORY;
    engine->model = model;
    engine->arena = arena;
    engine->parameters = parameters;
    engine->options = (port_options){0.01f, PORT_RULE_STOCHASTIC, 1};
    engine->state = (port_state){1u, 0u};
    engine->yield = 0;
    engine->yield_context = 0;
    engine->torn = 0;
    memset(&engine->pager, 0, sizeof engine->pager);
    return PORT_OK;
}

void port_yield_set(port_engine *engine, port_yield yield, void *context) {
    engine->yield = yield;
    engine->yield_context = context;
}

port_status port_parameters_reset(port_engine *engine) {
    if (engine->model->parameter_bytes) memcpy(port_parameters(engine), engine->model->parameters, engine->model->parameter_bytes);
    port_state_set(engine, (port_state){1u, 0u});
    return port_parameters_verify(engine);
}

const uint8_t *port_parameters_view(const port_engine *engine) {
    return engine->parameters + (engine->pager.bank ? engine->model->parameter_bytes : 0u);
}

uint8_t *port_parameters(port_engine *engine) {
    engine->pager.sealed = engine->pager.carried = 0;
    return (uint8_t *)(uintptr_t)port_parameters_view(engine);
}

void port_state_set(port_engine *engine, port_state state) {
    engine->state = state;
    engine->torn = 0;
}

int port_is_torn(const port_engine *engine) { return engine->torn; }
port_state port_state_get(const port_engine *engine) { return engine->state; }

port_status port_options_set(port_engine *engine, const port_options *options) {
    if (!options || options->rule > PORT_RULE_Q88 || options->scaling > 1) return PORT_ERROR_ARGUMENT;
    if (!(options->learning_rate >= 0.0f && options->learning_rate <= 1.0e30f)) return PORT_ERROR_ARGUMENT;
    if (options->rule == PORT_RULE_Q88 && !engine->model->has_q88) return PORT_ERROR_UNSUPPORTED;
    engine->options = *options;
    return PORT_OK;
}

port_status port_input_write(port_engine *engine, uint32_t offset, const int8_t *data, uint32_t length) {
    const port_model *model = engine->model;
    uint32_t sample_bytes = port_sample_bytes(model);
    if (offset > sample_bytes || length > sample_bytes - offset) return PORT_ERROR_RANGE;
    if (!data && length) return PORT_ERROR_ARGUMENT;
    uint32_t inputs = offset < model->input_bytes ? model->input_bytes - offset : 0u;
    if (inputs > length) inputs = length;
    if (inputs) memcpy(engine->arena + model->input_offset + offset, data, inputs);
    if (length > inputs)
        memcpy(engine->arena + model->target_offset + (offset + inputs - model->input_bytes), data + inputs, length - inputs);
    return PORT_OK;
}

int8_t *port_input(port_engine *engine) { return (int8_t *)(engine->arena + engine->model->input_offset); }

const float *port_logits(const port_engine *engine) {
    return (const float *)(const void *)(engine->arena + engine->model->logits_offset);
}

/* Null for PORT_NONE. Computed with integers: line 0 of a band may lie before the arena, and only lines in the arena are
 * touched. */
static void *place(const port_engine *engine, uint32_t offset) {
    return offset == PORT_NONE ? 0 : (void *)((uintptr_t)engine->arena + (uintptr_t)(intptr_t)(int32_t)offset);
}

static port_bound bind(const port_engine *engine, const port_step *step) {
    port_bound bound;
    const port_op *op = &engine->model->ops[step->op];
    uint8_t *parameters = step->parameters == PORT_NONE ? engine->parameters : place(engine, step->parameters);
    bound.op = op;
    bound.in = place(engine, step->in);
    bound.other = place(engine, step->other);
    bound.out = place(engine, step->out);
    bound.scratch = place(engine, step->scratch);
    bound.first = step->first, bound.last = step->last;
    bound.resumed = step->flags & PORT_STEP_RESUMES ? place(engine, step->scratch) : 0;
    bound.suspended = step->flags & PORT_STEP_SUSPENDS ? place(engine, step->scratch) : 0;
    bound.frozen = op->weight;
    bound.trained = op->trained_rows ? (int8_t *)(parameters + op->weight_offset) : 0;
    bound.trained_bias = op->bias_offset == PORT_NONE ? 0 : (int32_t *)(void *)(parameters + op->bias_offset);
    bound.bias = bound.trained_bias ? bound.trained_bias : op->bias;
    bound.low_bytes = op->q88_offset == PORT_NONE ? 0 : parameters + op->q88_offset;
    return bound;
}

static void run_op(const port_bound *bound) {
    switch (bound->op->kind) {
#if PORT_SIMD
    case PORT_OP_CONV: bound->scratch ? port_conv_forward_simd(bound) : port_conv_forward(bound); break;
    case PORT_OP_DEPTHWISE: port_depthwise_forward_simd(bound); break;
#else
    case PORT_OP_CONV: port_conv_forward(bound); break;
    case PORT_OP_DEPTHWISE: port_depthwise_forward(bound); break;
#endif
    case PORT_OP_ADD: port_add_forward(bound); break;
    case PORT_OP_AVERAGE_POOL: port_average_pool_forward(bound); break;
    case PORT_OP_MAX_POOL: port_max_pool_forward(bound); break;
    case PORT_OP_GROUPED:
    case PORT_OP_TRANSPOSED: if (HAS_GROUPED) port_grouped_forward(bound); break;
    case PORT_OP_TABLE: if (PORT_HAS(PORT_OP_TABLE)) port_table_forward(bound); break;
    case PORT_OP_CONCAT: if (PORT_HAS(PORT_OP_CONCAT)) port_concat_forward(bound); break;
    case PORT_OP_UPSAMPLE: if (PORT_HAS(PORT_OP_UPSAMPLE)) port_upsample_forward(bound); break;
    case PORT_OP_MULTIPLY:
    case PORT_OP_SCALE: if (PORT_HAS(PORT_OP_MULTIPLY) || PORT_HAS(PORT_OP_SCALE)) port_product_forward(bound); break;
    case PORT_OP_GRU: if (PORT_HAS(PORT_OP_GRU)) port_gru_forward(bound); break;
    default: port_classifier_forward(bound); break;
    }
}

static void run_input_gradient(const port_bound *bound, float *gradient, float *target, int accumulate, int second) {
    switch (bound->op->kind) {
    case PORT_OP_DEPTHWISE: port_depthwise_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_AVERAGE_POOL: port_average_pool_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_MAX_POOL: port_max_pool_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_GROUPED:
    case PORT_OP_TRANSPOSED: if (HAS_GROUPED) port_grouped_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_TABLE: if (PORT_HAS(PORT_OP_TABLE)) port_table_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_CONCAT: if (PORT_HAS(PORT_OP_CONCAT)) port_concat_input_gradient(bound, gradient, target, accumulate, second); break;
    case PORT_OP_UPSAMPLE: if (PORT_HAS(PORT_OP_UPSAMPLE)) port_upsample_input_gradient(bound, gradient, target, accumulate); break;
    case PORT_OP_MULTIPLY:
    case PORT_OP_SCALE: if (PORT_HAS(PORT_OP_MULTIPLY) || PORT_HAS(PORT_OP_SCALE)) port_product_input_gradient(bound, gradient, target, accumulate, second); break;
    case PORT_OP_GRU: if (PORT_HAS(PORT_OP_GRU)) port_gru_input_gradient(bound, gradient, target); break;
    default: port_conv_input_gradient(bound, gradient, target, accumulate); break;
    }
}

static void run_weight_update(const port_engine *engine, const port_step *step, const port_bound *bound, const float *gradient, const float *target, port_update *update) {
    float *groups = step->flags & PORT_STEP_CHOOSES ? place(engine, step->other) : 0;
    uint8_t rule = update->rule;
    if (rule == PORT_RULE_Q88 && !bound->low_bytes) update->rule = PORT_RULE_STOCHASTIC;
    if (groups) port_choose_channels(bound, gradient, engine->model->chosen_share, groups);
    if (bound->op->kind == PORT_OP_DEPTHWISE)
        port_depthwise_weight_update(bound, gradient, groups, update);
    else if (HAS_GROUPED && (bound->op->kind == PORT_OP_GROUPED || bound->op->kind == PORT_OP_TRANSPOSED))
        port_grouped_weight_update(bound, gradient, groups, update);
    else if (PORT_HAS(PORT_OP_GRU) && bound->op->kind == PORT_OP_GRU)
        port_gru_weight_update(bound, gradient, target, update);
    else
        port_conv_weight_update(bound, gradient, groups, update);
    update->rule = rule;
}

static void run_bias_update(const port_bound *bound, const float *gradient, const float *target, port_update *update) {
    if (PORT_HAS(PORT_OP_GRU) && bound->op->kind == PORT_OP_GRU)
        port_gru_bias_update(bound, gradient, target, update);
    else
        port_bias_update(bound, gradient, update);
}

/* Every step kind except LOSS; FORWARD does not touch `update`. */
static void run_step(const port_engine *engine, const port_step *step, port_update *update) {
    port_bound bound = bind(engine, step);
    float *gradient = place(engine, step->gradient), *target = place(engine, step->target);
    int accumulate = step->flags & PORT_STEP_ACCUMULATE;
    switch (step->kind) {
    case PORT_STEP_FORWARD: run_op(&bound); break;
    case PORT_STEP_MASK: port_mask_gradient(&bound, gradient); break;
    case PORT_STEP_INPUT: run_input_gradient(&bound, gradient, target, accumulate, step->flags & PORT_STEP_SECOND); break;
    case PORT_STEP_WEIGHT: run_weight_update(engine, step, &bound, gradient, target, update); break;
    case PORT_STEP_BIAS: run_bias_update(&bound, gradient, target, update); break;
    default: port_copy_gradient(&bound, gradient, target, accumulate); break;
    }
}

static void announce(const port_engine *engine, uint32_t step) {
    if (engine->yield) engine->yield(engine->yield_context, step);
}

/* Execute one row, then poll the pending transfer. */
static port_status run_row(port_engine *engine, uint16_t index, port_update *update) {
    const port_step *step = &engine->model->steps[index];
    if (step->kind >= PORT_STEP_PAGE_OUT) return port_pager_row(engine, index);
    run_step(engine, step, update);
    return engine->pager.queued ? port_pager_poll(engine) : PORT_OK;
}

static uint16_t best_class(const port_engine *engine) {
    const float *logits = port_logits(engine);
    uint16_t best = 0;
    for (uint16_t i = 1; i < engine->model->class_count; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static const float *targets_of(const port_engine *engine) {
    return (const float *)(const void *)(engine->arena + engine->model->target_offset);
}

/* Return whether a sample can be learned from: a label of the model, and finite targets. */
static int is_judged(const port_engine *engine, uint16_t label) {
    const port_model *model = engine->model;
    if (label >= port_label_count(model)) return 0;
    if (model->loss != PORT_LOSS_MSE) return 1;
    const float *targets = targets_of(engine);
    for (uint16_t i = 0; i < model->class_count; i++)
        if (!(targets[i] - targets[i] == 0.0f)) return 0;
    return 1;
}

static float loss_gradient(const port_engine *engine, float *outputs, uint16_t label) {
    const port_model *model = engine->model;
    if (model->loss == PORT_LOSS_MSE) return port_squared_error_gradient(outputs, targets_of(engine), model->class_count);
    return port_loss_gradient(outputs, model->class_count, label);
}

static port_status forward(port_engine *engine, int training, port_result *result) {
    const port_model *model = engine->model;
    if (!result) return PORT_ERROR_ARGUMENT;
    if (engine->torn) return PORT_ERROR_TORN;
    uint8_t left_out = training ? 0 : PORT_STEP_TRAINING;
    if (engine->pager.carried) left_out |= PORT_STEP_CARRIED;
    engine->pager.carried = 0;
    port_status status = model->page_count ? port_pager_begin(engine) : PORT_OK;
    for (uint16_t i = 0; i < model->forward_count && status == PORT_OK; i++) {
        if (model->steps[i].flags & left_out) continue;
        status = run_row(engine, i, 0);
        announce(engine, i);
    }
    if (status != PORT_OK) return status;
    *result = (port_result){0.0f, model->loss == PORT_LOSS_MSE ? 0u : best_class(engine), 0};
    return PORT_OK;
}

port_status port_infer(port_engine *engine, port_result *result) { return forward(engine, 0, result); }

port_status port_eval(port_engine *engine, uint16_t label, port_result *result) {
    const port_model *model = engine->model;
    if (!is_judged(engine, label)) return PORT_ERROR_RANGE;
    port_status status = port_infer(engine, result);
    if (status != PORT_OK) return status;
    if (model->loss == PORT_LOSS_MSE) {
        result->loss = port_squared_error(port_logits(engine), targets_of(engine), model->class_count);
        return PORT_OK;
    }
    result->loss = port_loss(port_logits(engine), model->class_count, label);
    result->correct = result->predicted == label;
    return PORT_OK;
}

/* Samples come in pairs: the second draws the first one's numbers again, u as 1 - u (antithetic variates, Hammersley and
 * Morton 1956). If the two steps of a weight have opposite signs, their roundings cancel as the steps do. So a pair adds
 * only the rounding noise of one update with the sum of both gradients, without memory for that sum. */
port_status port_train(port_engine *engine, uint16_t label, port_result *result) {
    const port_model *model = engine->model;
    if (!port_model_trains(model)) return PORT_ERROR_UNSUPPORTED;
    if (!is_judged(engine, label)) return PORT_ERROR_RANGE;
    port_status status = forward(engine, 1, result);
    if (status != PORT_OK) return status;
    uint32_t flip = engine->state.steps & 1u ? UINT32_MAX : 0u;
    port_update update = {engine->options.learning_rate, engine->options.rule, engine->options.scaling, engine->state.generator, flip};
    uint8_t updated = 0;
    for (uint16_t i = model->forward_count; i < model->step_count && status == PORT_OK; i++) {
        const port_step *step = &model->steps[i];
        if (step->kind == PORT_STEP_LOSS)
            result->loss = loss_gradient(engine, (float *)(void *)(engine->arena + step->gradient), label);
        else
            status = run_row(engine, i, &update);
        updated |= step->kind == PORT_STEP_WEIGHT || step->kind == PORT_STEP_BIAS;
        announce(engine, i);
    }
    if (status != PORT_OK) {
        engine->torn = updated && !port_model_pages_parameters(model); /* on the medium, the old copy is valid */
        return status;
    }
    if (port_model_pages_parameters(model)) port_pager_commit(engine);
    result->correct = model->loss != PORT_LOSS_MSE && result->predicted == label;
    if (flip) engine->state.generator = update.generator;
    engine->state.steps++;
    return PORT_OK;
}
