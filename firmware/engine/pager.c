/* Pages that the table moves to the board's medium and back, each checked when it returns. */
#include "pager.h"

static inline uint32_t mix(uint32_t hash, uint32_t word) { return ((hash << 13 | hash >> 19) ^ word) * 0x9E3779B1u; }

/* Every step is a bijection of `hash` and of the word: a difference within one word always shows, any other with
 * probability 1 - 2^-32. It takes one instruction per byte, a table-driven CRC eleven. Sizes are multiples of four. */
static uint32_t checksum(const void *data, uint32_t bytes) {
    const uint32_t *word = data, *end = word + bytes / 4u;
    uint32_t hash = bytes;
    for (; end - word >= 4; word += 4) hash = mix(mix(mix(mix(hash, word[0]), word[1]), word[2]), word[3]);
    while (word < end) hash = mix(hash, *word++);
    return hash;
}

/* The row of the i-th transfer that is not done. */
static const port_step *queued_row(const port_engine *engine, uint8_t i) {
    const port_pager *pager = &engine->pager;
    return &engine->model->steps[pager->queue[(pager->first + i) % PORT_PAGER_QUEUE]];
}

static uint32_t *checksums(const port_engine *engine) {
    return (uint32_t *)(void *)(engine->arena + engine->model->checksums_offset);
}

/* A page's location on the medium, and the location of its checksum. */
typedef struct page_place {
    uint32_t offset, bytes;
    uint32_t *checksum;
} page_place;

static page_place page_at(const port_engine *engine, uint16_t page, uint8_t bank) {
    const port_model *model = engine->model;
    uint32_t offset = model->pages[page].offset, *sum = checksums(engine) + page;
    if (page < model->parameter_page_count) {
        offset += bank ? model->parameter_bytes : 0u;
        sum += bank ? model->page_count : 0u;
    }
    return (page_place){offset, model->pages[page].bytes, sum};
}

/* Parameters are read from the valid copy and written to the other one. */
static page_place page_of(const port_engine *engine, const port_step *step) {
    uint8_t bank = engine->pager.bank;
    return page_at(engine, step->op, step->kind == PORT_STEP_PAGE_OUT ? !bank : bank);
}

static port_status give_up(port_engine *engine, port_status status) {
    engine->pager.queued = 0;
    if (status == PORT_ERROR_MEDIUM) engine->pager.counters.failed++;
    if (status == PORT_ERROR_DAMAGED) engine->pager.counters.damaged++;
    return status;
}

port_status port_medium_set(port_engine *engine, const port_medium *medium) {
    const port_model *model = engine->model;
    if (!medium || medium->bytes < model->medium_bytes) return PORT_ERROR_MEDIUM;
    if (port_model_pages_parameters(model) && medium->mapped != engine->parameters) return PORT_ERROR_MEDIUM;
    engine->pager.medium = medium;
    engine->pager.carried = 0;
    return PORT_OK;
}

port_page_counters port_page_counters_get(const port_engine *engine) { return engine->pager.counters; }

port_status port_pager_begin(port_engine *engine) {
    port_pager *pager = &engine->pager;
    if (!pager->medium) return give_up(engine, PORT_ERROR_MEDIUM);
    pager->queued = 0;
    return pager->sealed ? PORT_OK : port_parameters_verify(engine);
}

port_status port_parameters_verify(port_engine *engine) {
    port_pager *pager = &engine->pager;
    for (uint16_t page = 0; page < engine->model->parameter_page_count; page++) {
        page_place at = page_at(engine, page, pager->bank);
        uint32_t found = checksum(engine->parameters + at.offset, at.bytes);
        if (!pager->sealed) *at.checksum = found;
        if (found != *at.checksum) return give_up(engine, PORT_ERROR_DAMAGED);
    }
    pager->sealed = 1;
    return PORT_OK;
}

void port_pager_commit(port_engine *engine) {
    engine->pager.bank = !engine->pager.bank;
    engine->pager.carried = 1;
}

/* Start the oldest transfer of the queue. */
static port_transfer start(port_engine *engine) {
    const port_step *step = queued_row(engine, 0);
    const port_medium *medium = engine->pager.medium;
    page_place at = page_of(engine, step);
    if (step->kind == PORT_STEP_PAGE_IN) return medium->read(medium->context, at.offset, engine->arena + step->out, at.bytes);
    *at.checksum = checksum(engine->arena + step->in, at.bytes);
    return medium->write(medium->context, at.offset, engine->arena + step->in, at.bytes);
}

/* Remove the oldest transfer from the queue, and check the data it read. */
static port_status finish(port_engine *engine) {
    port_pager *pager = &engine->pager;
    const port_step *step = queued_row(engine, 0);
    page_place at = page_of(engine, step);
    uint32_t block = pager->medium->block_bytes;
    pager->first = (pager->first + 1u) % PORT_PAGER_QUEUE;
    pager->queued--;
    if (step->kind == PORT_STEP_PAGE_OUT) {
        pager->counters.written_bytes += (at.bytes + block - 1u) / block * block;
        return PORT_OK;
    }
    pager->counters.read_bytes += at.bytes;
    return checksum(engine->arena + step->out, at.bytes) == *at.checksum ? PORT_OK : PORT_ERROR_DAMAGED;
}

/* Remove completed transfers from the queue, and start the next one. */
static port_status advance(port_engine *engine, port_transfer transfer) {
    while (transfer == PORT_TRANSFER_DONE) {
        port_status status = finish(engine);
        if (status != PORT_OK) return give_up(engine, status);
        if (!engine->pager.queued) return PORT_OK;
        transfer = start(engine);
    }
    return transfer == PORT_TRANSFER_BUSY ? PORT_OK : give_up(engine, PORT_ERROR_MEDIUM);
}

port_status port_pager_poll(port_engine *engine) {
    const port_medium *medium = engine->pager.medium;
    return advance(engine, medium->poll(medium->context));
}

static int is_queued(const port_engine *engine, uint16_t page) {
    for (uint8_t i = 0; i < engine->pager.queued; i++)
        if (queued_row(engine, i)->op == page) return 1;
    return 0;
}

port_status port_pager_row(port_engine *engine, uint16_t index) {
    port_pager *pager = &engine->pager;
    const port_step *step = &engine->model->steps[index];
    port_status status = PORT_OK;
    if (step->kind == PORT_STEP_PAGE_WAIT) {
        while (status == PORT_OK && is_queued(engine, step->op)) status = port_pager_poll(engine);
        return status;
    }
    while (status == PORT_OK && pager->queued == PORT_PAGER_QUEUE) status = port_pager_poll(engine);
    if (status != PORT_OK) return status;
    pager->queue[(pager->first + pager->queued++) % PORT_PAGER_QUEUE] = index;
    return pager->queued == 1 ? advance(engine, start(engine)) : PORT_OK;
}
