/* Runs one compiled model bare on an emulated Cortex-M: samples come from, and parameters go to, files of the host through
 * semihosting. For tests and benchmarks only; the firmware proper has no semihosting.
 *
 * samples.bin: request, then per sample uint16 label, PORT_MODEL_INPUT_BYTES of int8, and the targets if it has them.
 * result.bin: reply, then the parameter bytes.
 * Each phase is bracketed by `mov r9, r9`, which the counting plugin (count.c) looks for.
 */
#include <stdint.h>

#include "model.h"
#ifdef PORT_MODEL_MEDIUM
#include "../media/psram.h"

#ifndef BENCH_MEDIUM
#define BENCH_MEDIUM 0x21000000u /* the PSRAM of the AN385 and AN386 boards; the AN500's is at 0x60000000 */
#endif
#endif

typedef struct request {
    uint32_t count;  /* samples */
    uint32_t trains; /* 0: infer, 1: train, 2: train and mark every table row: a span is a row then, not a sample */
    float learning_rate;
    uint32_t rule, scaling, generator;
} request;

typedef struct reply {
    uint32_t status, generator, steps, correct, stack_bytes;
    float loss_sum;
    uint32_t page_bytes_read, page_bytes_written;
} reply;

extern uint32_t bench_bss_end[], bench_stack_top[];

static uint8_t arena[PORT_MODEL_ARENA_BYTES] __attribute__((aligned(PORT_ALIGNMENT)));
#ifdef PORT_MODEL_PAGES_PARAMETERS
#define parameters ((uint8_t *)BENCH_MEDIUM)
#define PARAMETER_BYTES PORT_MODEL_MEDIUM_BYTES
#else
static uint8_t parameters[PORT_MODEL_PARAMETER_BYTES + 1] __attribute__((aligned(PORT_ALIGNMENT)));
#define PARAMETER_BYTES sizeof parameters
#endif

#if defined(__riscv)
#define MARK() ((void)0) /* the counting plugin knows only Arm's marker */
#else
#define MARK() __asm__ volatile("mov r9, r9" ::: "memory")
#endif
#define PAINT 0xA5A5A5A5u

enum { SYS_OPEN = 1, SYS_CLOSE = 2, SYS_WRITE = 5, SYS_READ = 6, SYS_EXIT = 0x18 };
enum { OPEN_READ = 1, OPEN_WRITE = 5 };

#if defined(__riscv)
static uint32_t __attribute__((noinline)) semihost(uint32_t call, const void *argument) {
    register uint32_t a0 __asm__("a0") = call;
    register const void *a1 __asm__("a1") = argument;
    __asm__ volatile(".option push\n .option norvc\n .balign 16\n slli x0, x0, 0x1f\n ebreak\n srai x0, x0, 7\n .option pop"
                     : "+r"(a0) : "r"(a1) : "memory");
    return a0;
}
#else
static uint32_t semihost(uint32_t call, const void *argument) {
    register uint32_t r0 __asm__("r0") = call;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}
#endif

static uint32_t open_file(const char *name, uint32_t mode, uint32_t length) {
    uint32_t arguments[3] = {(uint32_t)name, mode, length};
    return semihost(SYS_OPEN, arguments);
}

/* Returns the bytes not transferred. */
static uint32_t transfer(uint32_t call, uint32_t file, const void *data, uint32_t length) {
    uint32_t arguments[3] = {file, (uint32_t)data, length};
    return semihost(call, arguments);
}

static void leave(uint32_t good) { semihost(SYS_EXIT, (const void *)(good ? 0x20026u : 0x20023u)); }

static uint32_t stack_bytes(void) {
    uint32_t *word = bench_bss_end;
    while (word < bench_stack_top && *word == PAINT) word++;
    return (uint32_t)((uint8_t *)bench_stack_top - (uint8_t *)word);
}

static port_status run(port_engine *engine, uint32_t file, const request *asked, reply *answer) {
    uint16_t label;
    port_result result = {0, 0, 0};
    for (uint32_t i = 0; i < asked->count; i++) {
        if (transfer(SYS_READ, file, &label, sizeof label)) return PORT_ERROR_RANGE;
        /* straight into the input tensor: a second buffer would not fit a 16 KiB part */
        if (transfer(SYS_READ, file, port_input(engine), PORT_MODEL_INPUT_BYTES)) return PORT_ERROR_RANGE;
#ifdef PORT_MODEL_TARGET_COUNT
        static float targets[PORT_MODEL_TARGET_COUNT];
        if (transfer(SYS_READ, file, targets, sizeof targets)) return PORT_ERROR_RANGE;
        port_input_write(engine, PORT_MODEL_INPUT_BYTES, (const int8_t *)(const void *)targets, sizeof targets);
#endif
        MARK();
        port_status status = asked->trains ? port_train(engine, label, &result) : port_eval(engine, label, &result);
        MARK();
        if (status != PORT_OK) return status;
        answer->correct += result.correct;
        answer->loss_sum += result.loss;
    }
    return PORT_OK;
}

static void mark_row(void *context, uint32_t step) {
    (void)context, (void)step;
    MARK();
    MARK();
}

static port_status prepare(port_engine *engine, const request *asked) {
    port_status status = port_engine_init(engine, &port_generated_model, arena, sizeof arena, parameters, PARAMETER_BYTES);
#ifdef PORT_MODEL_MEDIUM
    static psram part = {.memory = (uint8_t *)BENCH_MEDIUM};
    static port_medium medium;
    medium = psram_medium(&part, PORT_MODEL_MEDIUM_BYTES);
    if (status == PORT_OK) status = port_medium_set(engine, &medium);
#endif
    port_options options = {asked->learning_rate, (uint8_t)asked->rule, (uint8_t)asked->scaling};
    if (status == PORT_OK) status = port_parameters_reset(engine);
    if (status == PORT_OK) status = port_options_set(engine, &options);
    port_state_set(engine, (port_state){asked->generator, 0});
    if (asked->trains == 2) port_yield_set(engine, mark_row, 0);
    return status;
}

int main(void) {
    port_engine engine;
    request asked;
    reply answer = {0};
    uint32_t file = open_file("samples.bin", OPEN_READ, 11);
    if (transfer(SYS_READ, file, &asked, sizeof asked)) leave(0);
    answer.status = prepare(&engine, &asked);
    if (answer.status == PORT_OK) answer.status = run(&engine, file, &asked, &answer);
    answer.generator = port_state_get(&engine).generator;
    answer.steps = port_state_get(&engine).steps;
    answer.stack_bytes = stack_bytes();
    answer.page_bytes_read = (uint32_t)port_page_counters_get(&engine).read_bytes;
    answer.page_bytes_written = (uint32_t)port_page_counters_get(&engine).written_bytes;
    file = open_file("result.bin", OPEN_WRITE, 10);
    transfer(SYS_WRITE, file, &answer, sizeof answer);
    transfer(SYS_WRITE, file, port_parameters_view(&engine), PORT_MODEL_PARAMETER_BYTES);
    semihost(SYS_CLOSE, &file);
    leave(1);
    return 0;
}
