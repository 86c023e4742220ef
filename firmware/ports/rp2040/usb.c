/* The RP2040's USB controller as a serial port: full speed, CDC ACM, one bulk endpoint each way.
 *
 * Source: RP2040 Datasheet 4.1 (registers 4.1.4, dual-port memory 4.1.2.5); USB 2.0 chapter 9; CDC 1.2 and PSTN 1.2. A port
 * of 115,200 baud in name only. Vendor and product are those of the Pico SDK's serial port, which systems know. */
#include "usb.h"

#include "cortexm.h"
#include "port.h"

#define MEMORY 0x50100000u
#define ENDPOINT_CONTROL(number, out) REGISTER(MEMORY + 8u * (number) + 4u * (out))
#define BUFFER_CONTROL(number, out) REGISTER(MEMORY + 0x80u + 8u * (number) + 4u * (out))
#define ENABLED (1u << 31 | 1u << 29) /* and an interrupt for each packet */
#define TYPE_BULK (2u << 26)
#define TYPE_INTERRUPT (3u << 26)
#define AVAILABLE (1u << 10)
#define STALL (1u << 11)
#define ODD (1u << 13) /* DATA1 */
#define FULL (1u << 15)
#define LENGTH 0x3FFu

#define CONTROLLER 0x50110000u
#define CLEAR_BITS 0x3000u
#define ADDRESS REGISTER(CONTROLLER)
#define MAIN_CONTROL REGISTER(CONTROLLER + 0x40u)
#define SIE_CONTROL REGISTER(CONTROLLER + 0x4Cu)
#define SIE_STATUS_CLEAR REGISTER(CONTROLLER + 0x50u + CLEAR_BITS)
#define BUFFERS_DONE REGISTER(CONTROLLER + 0x58u)
#define BUFFERS_DONE_CLEAR REGISTER(CONTROLLER + 0x58u + CLEAR_BITS)
#define STALL_ARM REGISTER(CONTROLLER + 0x68u)
#define MULTIPLEXER REGISTER(CONTROLLER + 0x74u)
#define POWER REGISTER(CONTROLLER + 0x78u)
#define INTERRUPTS_ON REGISTER(CONTROLLER + 0x90u)
#define INTERRUPTS REGISTER(CONTROLLER + 0x98u)
#define CONTROL_PULL_UP (1u << 16)
#define CONTROL_INTERRUPT (1u << 29) /* for each packet of endpoint 0 */
#define STATUS_SETUP (1u << 17)
#define STATUS_RESET (1u << 19)
#define MULTIPLEXER_ON (1u | 1u << 3)
#define POWER_ALWAYS (1u << 2 | 1u << 3) /* the bus's power needs no pin */
#define INTERRUPT_BUFFERS (1u << 4)
#define INTERRUPT_RESET (1u << 12)
#define INTERRUPT_SETUP (1u << 16)
#define DONE(number, out) (1u << (2u * (number) + (out)))

enum { CONTROL = 0, NOTICES = 1, DATA = 2 }; /* endpoints */
enum { IN = 0, OUT = 1 };
enum { BUFFER_CONTROL_AT = 0x100, BUFFER_NOTICES = 0x180, BUFFER_IN = 0x1C0, BUFFER_OUT = 0x200 };
enum { PACKET = 64, SENT_PACKET = 63 }; /* a packet below 64 bytes ends a transfer, so the host passes it on at once */
#define PATIENCE 2000000u /* loop passes, some tenths of a second */

enum { GET_STATUS = 0, CLEAR_FEATURE = 1, SET_ADDRESS = 5, GET_DESCRIPTOR = 6, SET_CONFIGURATION = 9 };
enum { OF_ENDPOINT = 0x02, CLASS_REQUEST = 0x21, SET_LINE_CODING = 0x20, GET_LINE_CODING = 0x21, TO_HOST = 0x80 };

static const uint8_t DEVICE[] = {18, 1, 0x10, 0x01, 2, 0, 0, PACKET, 0x8A, 0x2E, 0x0A, 0x00, 0, 1, 1, 2, 3, 1};

#define CONFIGURATION_BYTES 67
static const uint8_t CONFIGURATION[CONFIGURATION_BYTES] = {
    9, 2, CONFIGURATION_BYTES, 0, 2, 1, 0, 0x80, 125, /* two interfaces, 250 mA from the bus */
    9, 4, 0, 0, 1, 2, 2, 0, 0,                        /* the port's control: CDC, ACM */
    5, 0x24, 0, 0x20, 0x01,                           /* CDC 1.2 */
    5, 0x24, 1, 0, 1,                                 /* no calls; data on interface 1 */
    4, 0x24, 2, 2,                                    /* line coding and line state */
    5, 0x24, 6, 0, 1,                                 /* the union of both interfaces */
    7, 5, 0x80 | NOTICES, 3, 8, 0, 16,
    9, 4, 1, 0, 2, 10, 0, 0, 0,                       /* the port's data */
    7, 5, 0x80 | DATA, 2, PACKET, 0, 0,
    7, 5, DATA, 2, PACKET, 0, 0,
};
static const uint8_t LANGUAGES[] = {4, 3, 0x09, 0x04};
static const uint8_t MAKER[] = {22, 3, 'P', 0, 'O', 0, 'R', 0, 'T', 0, ' ', 0, 'a', 0, 'g', 0, 'e', 0, 'n', 0, 't', 0};
static const uint8_t PRODUCT[] = {10, 3, 'P', 0, 'i', 0, 'c', 0, 'o', 0};
static const uint8_t LINE_CODING[] = {0x00, 0xC2, 0x01, 0x00, 0, 0, 8}; /* 115,200 8N1 */
static const uint8_t STATUS[] = {0, 0};

static volatile struct {
    const uint8_t *answer; /* what remains to be sent */
    uint32_t answer_left;
    uint32_t control_odd, in_odd, out_odd;
    uint8_t new_address, reads, takes_data, configured;
} state;
static uint8_t serial_number[2 + 4 * 8] = {0, 3}; /* two digits of two bytes for each byte */
static uint32_t filled; /* bytes in the packet that is being filled */
static uint8_t host_is_gone;

/* Hand a buffer to the controller, which samples the other bits some cycles of its slower clock after AVAILABLE
 * (4.1.2.5.1). */
static void arm(uint32_t number, uint32_t out, uint32_t control)
{
    BUFFER_CONTROL(number, out) = control;
    __asm__ volatile("nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop");
    BUFFER_CONTROL(number, out) = control | AVAILABLE;
}

static void write_memory(uint32_t at, const uint8_t *bytes, uint32_t size)
{
    for (uint32_t i = 0; i < size; i++) {
        ((volatile uint8_t *)MEMORY)[at + i] = bytes[i];
    }
}

/* Send the next packet of a control answer; with nothing left, an empty one. */
static void send_control(void)
{
    uint32_t size = state.answer_left < PACKET ? state.answer_left : PACKET;

    write_memory(BUFFER_CONTROL_AT, state.answer, size);
    state.answer += size;
    state.answer_left -= size;
    arm(CONTROL, IN, size | FULL | (state.control_odd ? ODD : 0));
    state.control_odd ^= 1u;
}

static void answer(const uint8_t *bytes, uint32_t size, uint32_t asked)
{
    state.answer = bytes;
    state.answer_left = size < asked ? size : asked;
    send_control();
}

static void refuse(void)
{
    STALL_ARM = 3;
    BUFFER_CONTROL(CONTROL, IN) = STALL;
    BUFFER_CONTROL(CONTROL, OUT) = STALL;
}

static void take_data(void)
{
    arm(DATA, OUT, PACKET | (state.out_odd ? ODD : 0));
    state.out_odd ^= 1u;
}

static void configure(void)
{
    ENDPOINT_CONTROL(NOTICES, IN) = ENABLED | TYPE_INTERRUPT | BUFFER_NOTICES;
    ENDPOINT_CONTROL(DATA, IN) = ENABLED | TYPE_BULK | BUFFER_IN;
    ENDPOINT_CONTROL(DATA, OUT) = ENABLED | TYPE_BULK | BUFFER_OUT;
    BUFFER_CONTROL(DATA, IN) = 0;
    state.in_odd = state.out_odd = 0;
    state.configured = 1;
    filled = 0;
    take_data();
}

/* After a halt both ends count packets from DATA0 again. */
static void restart_toggle(uint32_t endpoint)
{
    if (endpoint == (TO_HOST | DATA)) {
        state.in_odd = 0;
    } else if (endpoint == DATA) {
        state.out_odd = 0;
        take_data();
    }
}

static void describe(uint32_t kind, uint32_t index, uint32_t asked)
{
    if (kind == 1) {
        answer(DEVICE, sizeof DEVICE, asked);
    } else if (kind == 2) {
        answer(CONFIGURATION, sizeof CONFIGURATION, asked);
    } else if (kind == 3 && index == 0) {
        answer(LANGUAGES, sizeof LANGUAGES, asked);
    } else if (kind == 3 && index == 1) {
        answer(MAKER, sizeof MAKER, asked);
    } else if (kind == 3 && index == 2) {
        answer(PRODUCT, sizeof PRODUCT, asked);
    } else if (kind == 3 && index == 3) {
        answer(serial_number, serial_number[0], asked);
    } else {
        refuse();
    }
}

static void handle_setup(void)
{
    const volatile uint8_t *setup = (const volatile uint8_t *)MEMORY;
    uint32_t type = setup[0], request = setup[1], asked = setup[6] | (uint32_t)setup[7] << 8;

    state.control_odd = 1;
    state.reads = (type & TO_HOST) != 0;
    if (type == CLASS_REQUEST && request == SET_LINE_CODING) {
        state.takes_data = 1;
        arm(CONTROL, OUT, PACKET | ODD);
    } else if (type == (TO_HOST | CLASS_REQUEST) && request == GET_LINE_CODING) {
        answer(LINE_CODING, sizeof LINE_CODING, asked);
    } else if (type == TO_HOST && request == GET_DESCRIPTOR) {
        describe(setup[3], setup[2], asked);
    } else if ((type & 0xE0u) == TO_HOST && request == GET_STATUS) {
        answer(STATUS, sizeof STATUS, asked);
    } else if (type & TO_HOST) {
        refuse();
    } else {
        if (request == SET_ADDRESS && type == 0) {
            state.new_address = setup[2]; /* from the next transfer on */
        } else if (request == SET_CONFIGURATION && type == 0) {
            configure();
        } else if (request == CLEAR_FEATURE && type == OF_ENDPOINT) {
            restart_toggle(setup[4]);
        }
        answer(0, 0, 0);
    }
}

static void control_sent(void)
{
    if (state.new_address != 0) {
        ADDRESS = state.new_address;
        state.new_address = 0;
    } else if (state.answer_left > 0) {
        send_control();
    } else if (state.reads) {
        arm(CONTROL, OUT, ODD); /* the host's empty packet */
    }
}

static int receive(void)
{
    const volatile uint8_t *bytes = (const volatile uint8_t *)(MEMORY + BUFFER_OUT);
    uint32_t size = BUFFER_CONTROL(DATA, OUT) & LENGTH;

    for (uint32_t i = 0; i < size; i++) {
        cortexm_received(bytes[i]);
    }
    take_data();
    return size > 0;
}

static int buffers_done(void)
{
    uint32_t done = BUFFERS_DONE;

    BUFFERS_DONE_CLEAR = done;
    if (done & DONE(CONTROL, IN)) {
        control_sent();
    }
    if ((done & DONE(CONTROL, OUT)) && state.takes_data) {
        state.takes_data = 0;
        answer(0, 0, 0);
    }
    return done & DONE(DATA, OUT) ? receive() : 0;
}

static void bus_reset(void)
{
    ADDRESS = 0;
    state.answer_left = 0;
    state.new_address = state.takes_data = state.configured = 0;
    SIE_STATUS_CLEAR = STATUS_RESET;
}

int usb_interrupt(void)
{
    uint32_t what = INTERRUPTS;

    if (what & INTERRUPT_RESET) {
        bus_reset();
    }
    if (what & INTERRUPT_SETUP) {
        SIE_STATUS_CLEAR = STATUS_SETUP;
        handle_setup();
    }
    return what & INTERRUPT_BUFFERS ? buffers_done() : 0;
}

void usb_start(const uint8_t *serial, uint32_t size)
{
    for (uint32_t i = 0; i < size; i++) {
        serial_number[2 + 4 * i] = (uint8_t)"0123456789ABCDEF"[serial[i] >> 4];
        serial_number[4 + 4 * i] = (uint8_t)"0123456789ABCDEF"[serial[i] & 15u];
    }
    serial_number[0] = (uint8_t)(2u + 4u * size);
    for (uint32_t at = 0; at < 0x100u; at += 4u) {
        REGISTER(MEMORY + at) = 0;
    }
    MULTIPLEXER = MULTIPLEXER_ON;
    POWER = POWER_ALWAYS;
    MAIN_CONTROL = 1;
    SIE_CONTROL = CONTROL_INTERRUPT;
    INTERRUPTS_ON = INTERRUPT_BUFFERS | INTERRUPT_RESET | INTERRUPT_SETUP;
    cortexm_enable_interrupt(USB_INTERRUPT);
    SIE_CONTROL = CONTROL_INTERRUPT | CONTROL_PULL_UP;
}

/* Wait until the host has taken the last packet; after a time-out, do not wait for it again. */
static int is_taken(void)
{
    uint32_t patience = host_is_gone ? 1u : PATIENCE;

    while ((BUFFER_CONTROL(DATA, IN) & AVAILABLE) && patience > 0) {
        patience--;
    }
    host_is_gone = patience == 0 || !state.configured;
    return !host_is_gone;
}

void usb_put(uint8_t byte)
{
    if (!is_taken()) {
        filled = 0;
        return;
    }
    ((volatile uint8_t *)MEMORY)[BUFFER_IN + filled++] = byte;
    if (byte == 0 || filled == SENT_PACKET) {
        arm(DATA, IN, filled | FULL | (state.in_odd ? ODD : 0));
        state.in_odd ^= 1u;
        filled = 0;
        (void)is_taken(); /* a reset may follow the last byte of a frame */
    }
}
