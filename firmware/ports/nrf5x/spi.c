/* nRF52840: SPI with EasyDMA for a page medium, a serial NOR flash or an SD card. nRF52840 Product Specification v1.7: SPIM 6.25,
 * GPIO 6.9. SPIM2, which goes up to 8 MHz; EasyDMA reaches RAM only, where pages and all commands lie. */
#include "model.h"

#ifdef PORT_MODEL_MEDIUM
#include "cortexm.h"
#include "nor.h"
#include "port.h"
#include "sd.h"

#define SPIM 0x40023000u
#define SPIM_START REGISTER(SPIM + 0x010u)
#define SPIM_END REGISTER(SPIM + 0x118u)
#define SPIM_ENABLE REGISTER(SPIM + 0x500u)
#define SPIM_PIN_SCK REGISTER(SPIM + 0x508u)
#define SPIM_PIN_MOSI REGISTER(SPIM + 0x50Cu)
#define SPIM_PIN_MISO REGISTER(SPIM + 0x510u)
#define SPIM_FREQUENCY REGISTER(SPIM + 0x524u)
#define SPIM_IN REGISTER(SPIM + 0x534u)
#define SPIM_IN_COUNT REGISTER(SPIM + 0x538u)
#define SPIM_OUT REGISTER(SPIM + 0x544u)
#define SPIM_OUT_COUNT REGISTER(SPIM + 0x548u)
#define SPIM_FILL REGISTER(SPIM + 0x5C0u)
#define ENABLE_SPIM 7u
#define FREQUENCY_8_MHZ 0x80000000u
#define COUNT_MAX 0xFFFFu

#define GPIO_OUT_SET REGISTER(0x50000508u)
#define GPIO_OUT_CLEAR REGISTER(0x5000050Cu)
#define GPIO_CONFIG(pin) REGISTER(0x50000700u + 4u * (pin))
#define CONFIG_OUTPUT 3u /* input buffer off */
#define CONFIG_INPUT_PULLED_UP 0xCu /* an absent chip reads as ones */

static struct exchange {
    const uint8_t *out;
    uint8_t *in;
    uint32_t left, count; /* bytes after the current transfer; bytes in it */
} exchange;

static void start_part(void)
{
    exchange.count = exchange.left < COUNT_MAX ? exchange.left : COUNT_MAX;
    exchange.left -= exchange.count;
    SPIM_OUT = (uint32_t)(uintptr_t)exchange.out;
    SPIM_OUT_COUNT = exchange.out ? exchange.count : 0;
    SPIM_IN = (uint32_t)(uintptr_t)exchange.in;
    SPIM_IN_COUNT = exchange.in ? exchange.count : 0;
    SPIM_END = 0;
    SPIM_START = 1;
}

static void start(void *context, const uint8_t *out, uint8_t *in, uint32_t bytes)
{
    static uint8_t nowhere[16]; /* for clocks without data: the chip requires a count on one side */

    (void)context;
    exchange.out = out;
    exchange.in = in == NULL && out == NULL ? nowhere : in;
    exchange.left = bytes;
    start_part();
}

static int busy(void *context)
{
    (void)context;
    if (SPIM_END == 0) {
        return 1;
    }
    if (exchange.left == 0) {
        return 0;
    }
    exchange.out += exchange.out ? exchange.count : 0;
    exchange.in += exchange.in ? exchange.count : 0;
    start_part();
    return 1;
}

static void select_chip(void *context, int on)
{
    (void)context;
    if (on) {
        GPIO_OUT_CLEAR = 1u << PORT_PIN_SELECT;
    } else {
        GPIO_OUT_SET = 1u << PORT_PIN_SELECT;
    }
}

static void output_high(uint32_t pin)
{
    GPIO_OUT_SET = 1u << pin;
    GPIO_CONFIG(pin) = CONFIG_OUTPUT;
}

static void open_bus(void)
{
    output_high(PORT_PIN_SELECT);
    output_high(PORT_PIN_HIGH_1); /* write protection and hold of a quad flash; elsewhere the select pin again */
    output_high(PORT_PIN_HIGH_2);
    GPIO_CONFIG(PORT_PIN_SCK) = CONFIG_OUTPUT;
    GPIO_CONFIG(PORT_PIN_MOSI) = CONFIG_OUTPUT;
    GPIO_CONFIG(PORT_PIN_MISO) = CONFIG_INPUT_PULLED_UP;
    SPIM_PIN_SCK = PORT_PIN_SCK;
    SPIM_PIN_MOSI = PORT_PIN_MOSI;
    SPIM_PIN_MISO = PORT_PIN_MISO;
    SPIM_FREQUENCY = FREQUENCY_8_MHZ;
    SPIM_FILL = 0xFFu;
    SPIM_ENABLE = ENABLE_SPIM;
}

const port_medium *port_page_medium(void)
{
    static const port_spi bus = {start, busy, select_chip, port_ticks, NULL}; /* ticks are microseconds here */
    static port_medium medium;
#ifdef PORT_MODEL_MEDIUM_NOR
    static nor chip;

    open_bus();
    return nor_open(&chip, &bus, &medium) == PORT_OK ? &medium : NULL;
#else
    static sd chip;

    open_bus();
    return sd_open(&chip, &bus, &medium) == PORT_OK ? &medium : NULL;
#endif
}
#endif
