/* Reset of the bench program on a RISC-V core without an operating system. */
#include <stdint.h>

extern uint32_t bench_stack_top[], bench_bss_start[], bench_bss_end[];
int main(void);

void __attribute__((noreturn, used)) start(void) {
    for (uint32_t *word = bench_bss_start; word < bench_bss_end; word++) *word = 0;
    uint32_t *here = (uint32_t *)__builtin_frame_address(0) - 16;
    for (uint32_t *word = bench_bss_end; word < here; word++) *word = 0xA5A5A5A5u;
    main();
    for (;;) {
    }
}

__attribute__((naked, used, section(".reset"))) void reset(void) {
    __asm__ volatile("la sp, bench_stack_top\n j start");
}
