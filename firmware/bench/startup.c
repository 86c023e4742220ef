/* Vector table and reset of the bench program, alike for every Cortex-M. */
#include <stdint.h>

extern uint32_t bench_stack_top[], bench_data_load[], bench_data_start[], bench_data_end[], bench_bss_start[], bench_bss_end[];
int main(void);

void reset(void);

static void stop(void) {
    for (;;) {
    }
}

void __attribute__((noreturn)) reset(void) {
#if defined(__ARM_FP)
    *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20; /* CPACR: full access to the FPU */
    __asm__ volatile("dsb\n isb");
#endif
    const uint32_t *from = bench_data_load;
    for (uint32_t *word = bench_data_start; word < bench_data_end; word++) *word = *from++;
    for (uint32_t *word = bench_bss_start; word < bench_bss_end; word++) *word = 0;
    uint32_t *here = (uint32_t *)__builtin_frame_address(0) - 16;
    for (uint32_t *word = bench_bss_end; word < here; word++) *word = 0xA5A5A5A5u;
    main();
    stop();
    __builtin_unreachable();
}

typedef void (*vector)(void);

__attribute__((section(".vectors"), used)) static const vector vectors[16] = {
    (vector)bench_stack_top, reset, stop, stop, stop, stop, stop, 0, 0, 0, 0, stop, stop, 0, stop, stop,
};
