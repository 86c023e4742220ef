/* Vector table, reset, faults, stack painting and SysTick of every Cortex-M port. */
#include "cortexm.h"
#include "port.h"

#define SYSTICK_CONTROL REGISTER(0xE000E010u)
#define SYSTICK_RELOAD REGISTER(0xE000E014u)
#define SYSTICK_VALUE REGISTER(0xE000E018u)
#define SYSTICK_ENABLE 7u /* core clock, interrupt, on */
#define SYSTICK_SPAN 0x1000000u
#define PENDING_CONTROL REGISTER(0xE000ED04u)
#define SYSTICK_PENDING (1u << 26)
#define RESET_CONTROL REGISTER(0xE000ED0Cu)
#define RESET_KEY 0x05FA0004u
#define VECTOR_OFFSET REGISTER(0xE000ED08u)
#define COPROCESSORS REGISTER(0xE000ED88u)

#define PAINT 0xA5A5A5A5u
#define PAINT_MARGIN 16u /* words: leaves the frame of the painter itself alone */

extern uint32_t _data_load[], _data_start[], _data_end[], _bss_start[], _bss_end[], _stack_limit[], _stack_top[];
extern uint32_t _ram_start[];
int main(void);
void port_start(void);

/* The cause of the last reset. It survives a reset, because the reset handler does not clear it. */
static uint32_t last_words[2] __attribute__((section(".noinit")));
#define LAST_WORDS_MAGIC 0x52454153u

static uint32_t boot_reason;
static volatile uint32_t systick_wraps;

static void go_down(uint32_t reason)
{
    last_words[0] = LAST_WORDS_MAGIC;
    last_words[1] = reason;
    __asm__ volatile("dsb" ::: "memory");
    RESET_CONTROL = RESET_KEY;
    for (;;) {
    }
}

void port_reset(void)
{
    go_down(RESET_REQUEST);
}

static void fault(void)
{
    go_down(RESET_FAULT); /* the host sees a new nonce and the reason in STATUS, and resumes from its snapshot */
}

/* On these boards, only a watchdog that is about to reset the chip raises it. */
static void non_maskable(void)
{
    go_down(RESET_WATCHDOG);
}

static void systick(void)
{
    systick_wraps++;
}

void cortexm_ticks_start(void)
{
    SYSTICK_RELOAD = SYSTICK_SPAN - 1u;
    SYSTICK_VALUE = 0;
    SYSTICK_CONTROL = SYSTICK_ENABLE;
}

uint64_t cortexm_ticks(void)
{
    uint32_t wraps, value;

    do { /* read again after a wrap between the two reads, which would be off by a whole period */
        wraps = systick_wraps;
        value = SYSTICK_VALUE;
    } while (wraps != systick_wraps || (PENDING_CONTROL & SYSTICK_PENDING) != 0);
    return (uint64_t)wraps * SYSTICK_SPAN + (SYSTICK_SPAN - 1u - value);
}

#define VECTORS (16u + PORT_INTERRUPTS)

typedef void (*vector)(void);

static const vector TABLE[VECTORS] __attribute__((section(".vectors"), used)) = {
    [0] = (vector)(uintptr_t)_stack_top,
    [1] = port_start,
    [2] = non_maskable,
    [3 ... 14] = fault,
    [15] = systick,
    [16 ... VECTORS - 1] = port_uart_interrupt, /* the only one that a port enables */
};

static uint32_t find_reason(void)
{
    /* our own record first: some chips still report an earlier watchdog reset after later resets of the core alone */
    uint32_t reason = last_words[0] == LAST_WORDS_MAGIC ? last_words[1] : port_chip_reset_reason();

    last_words[0] = 0;
    return reason;
}

uint32_t port_reset_reason(void)
{
    return boot_reason;
}

static void paint_stack(void)
{
    uint32_t *here;

    __asm__ volatile("mov %0, sp" : "=r"(here));
    for (uint32_t *word = _stack_limit; word < here - PAINT_MARGIN; word++) {
        *(volatile uint32_t *)word = PAINT;
    }
}

void port_start(void)
{
    const uint32_t *from = _data_load;

    VECTOR_OFFSET = (uint32_t)(uintptr_t)TABLE; /* after a boot loader; a Cortex-M0 has no such register, ignores it */
#ifdef __ARM_FP
    COPROCESSORS |= 0xFu << 20; /* the FPU, before the compiler uses it */
    __asm__ volatile("dsb\n\tisb" ::: "memory");
#endif
    for (uint32_t *to = _data_start; to < _data_end; to++) {
        *to = *from++;
    }
    for (uint32_t *to = _bss_start; to < _bss_end; to++) {
        *to = 0;
    }
    paint_stack();
    boot_reason = find_reason();
    main();
    port_reset();
}

uint32_t port_stack_used(void)
{
    const uint32_t *word = _stack_limit;

    while (word < _stack_top && *word == PAINT) {
        word++;
    }
    return (uint32_t)((const uint8_t *)_stack_top - (const uint8_t *)word);
}

uint32_t port_stack_bytes(void)
{
    return (uint32_t)((const uint8_t *)_stack_top - (const uint8_t *)_stack_limit);
}

uint32_t port_static_bytes(void)
{
    return (uint32_t)((const uint8_t *)_stack_limit - (const uint8_t *)_ram_start);
}
