/* The firmware as a Linux process: its UART is a pseudo terminal, its flash a file.
 *
 * A port like the others, for tests and for machines without QEMU. Prints "pty: /dev/pts/N" when it is ready.
 * Environment: PORT_STORAGE names the file of the two snapshot slots (none: no storage), PORT_PAGES that of the page medium
 * (removing it pulls the medium; none: memory of the process). RAM is ordinary memory, so the stack cannot be measured here. */
#define _GNU_SOURCE
#include "port.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "model.h"
#include "psram.h"
#include "receive_ring.h"

#ifndef PORT_SLOT_BYTES
#define PORT_SLOT_BYTES 65536u
#endif
#define PTY_VARIABLE "PORT_PTY_FD" /* carries the open terminal over a reset */
#define WRITE_PATIENCE_MS 1000     /* a terminal nobody reads is full after 4 KiB; then bytes fall off the wire */

const struct port_board PORT_BOARD = {"posix", PORT_RAM_BYTES, PORT_FLASH_BYTES, 1000000000u};

static struct receive_ring ring;
static int terminal = -1;
static uint8_t *slots;
static uint32_t reason;
static pid_t parent;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static int open_terminal(void)
{
    struct termios raw;
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK), slave;

    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        die("pty");
    }
    slave = open(ptsname(master), O_RDWR | O_NOCTTY); /* kept open: reads must not fail while no host is there */
    if (slave < 0 || tcgetattr(slave, &raw) != 0) {
        die("pty");
    }
    cfmakeraw(&raw);
    tcsetattr(slave, TCSANOW, &raw);
    printf("pty: %s\n", ptsname(master));
    fflush(stdout);
    return master;
}

static void map_storage(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT, 0600);

    if (file < 0 || ftruncate(file, (off_t)(PORT_SLOTS * PORT_SLOT_BYTES)) != 0) {
        die(path);
    }
    slots = mmap(NULL, PORT_SLOTS * PORT_SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (slots == MAP_FAILED) {
        die(path);
    }
    close(file);
}

#ifdef PORT_MODEL_MEDIUM
static psram pages;
static port_medium page_medium;
static const char *page_path;

static int page_file_is_there(void)
{
    return page_path == NULL || access(page_path, F_OK) == 0;
}

const port_medium *port_page_medium(void)
{
    int file = -1, flags = MAP_PRIVATE | MAP_ANONYMOUS;

    page_path = getenv("PORT_PAGES");
    if (page_path != NULL) {
        flags = MAP_SHARED;
        file = open(page_path, O_RDWR | O_CREAT, 0600);
        if (file < 0 || ftruncate(file, PORT_MODEL_MEDIUM_BYTES) != 0) {
            die(page_path);
        }
    }
    pages.memory = mmap(NULL, PORT_MODEL_MEDIUM_BYTES, PROT_READ | PROT_WRITE, flags, file, 0);
    if (pages.memory == MAP_FAILED) {
        die("pages");
    }
    pages.is_there = page_file_is_there;
    page_medium = psram_medium(&pages, PORT_MODEL_MEDIUM_BYTES);
    page_medium.name = PORT_MODEL_MEDIUM; /* a file stands in for any of them */
    return &page_medium;
}
#endif

void port_init(void)
{
    const char *inherited = getenv(PTY_VARIABLE), *storage = getenv("PORT_STORAGE");

    parent = getppid();
    terminal = inherited ? atoi(inherited) : open_terminal();
    reason = inherited ? RESET_REQUEST : RESET_POWER;
    if (storage) {
        map_storage(storage);
    }
}

static void pump(void)
{
    uint8_t bytes[256];
    uint32_t room = RECEIVE_RING_BYTES - (ring.head - ring.tail);
    ssize_t got = 0;

    if (room > 0) { /* a full ring leaves the rest in the terminal, as QEMU's UARTs do */
        got = read(terminal, bytes, room < sizeof bytes ? room : sizeof bytes);
    }
    for (ssize_t i = 0; i < got; i++) {
        receive_ring_put(&ring, bytes[i]);
    }
}

int port_uart_get(void)
{
    int byte = receive_ring_get(&ring);

    if (byte < 0) {
        pump();
        byte = receive_ring_get(&ring);
    }
    return byte;
}

static uint8_t out[512];
static uint32_t out_used;

static void flush(void)
{
    uint32_t sent = 0;
    struct pollfd wait = {.fd = terminal, .events = POLLOUT};

    while (sent < out_used) {
        ssize_t wrote = write(terminal, out + sent, out_used - sent);
        if (wrote > 0) {
            sent += (uint32_t)wrote;
        } else if (errno != EINTR && poll(&wait, 1, WRITE_PATIENCE_MS) <= 0) {
            break;
        }
    }
    out_used = 0;
}

void port_uart_put(uint8_t byte)
{
    out[out_used++] = byte;
    if (byte == 0 || out_used == sizeof out) {
        flush();
    }
}

uint32_t port_uart_overruns(void)
{
    return ring.overruns;
}

int port_uart_attention(void)
{
    pump();
    return receive_ring_attention(&ring);
}

void port_idle(void)
{
    struct pollfd wait = {.fd = terminal, .events = POLLIN};
    if (poll(&wait, 1, 1000) == 0 && getppid() != parent) {
        exit(0); /* a simulated device does not outlive whoever started it */
    }
}

void port_watchdog_feed(void)
{
}

void port_reset(void)
{
    char number[16];
    char *const arguments[] = {(char *)"port-firmware", NULL};

    snprintf(number, sizeof number, "%d", terminal);
    setenv(PTY_VARIABLE, number, 1);
    execv("/proc/self/exe", arguments);
    die("reset");
}

uint32_t port_reset_reason(void)
{
    return reason;
}

uint64_t port_ticks(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void port_serial(uint8_t serial[8])
{
    memset(serial, 0, 8);
}

uint32_t port_entropy(void)
{
    uint32_t value = 0;
    return getrandom(&value, sizeof value, 0) == sizeof value ? value : 0;
}

uint32_t port_stack_used(void)
{
    return PORT_UNKNOWN;
}

uint32_t port_stack_bytes(void)
{
    return PORT_UNKNOWN;
}

uint32_t port_static_bytes(void)
{
    return PORT_UNKNOWN;
}

uint32_t port_slot_bytes(void)
{
    return slots ? PORT_SLOT_BYTES : 0;
}

const uint8_t *port_slot(uint32_t slot)
{
    return slots + slot * PORT_SLOT_BYTES;
}

int port_slot_erase(uint32_t slot)
{
    memset(slots + slot * PORT_SLOT_BYTES, 0xFF, PORT_SLOT_BYTES);
    return 0;
}

int port_slot_write(uint32_t slot, uint32_t offset, const void *data, uint32_t size)
{
    if (offset > PORT_SLOT_BYTES || size > PORT_SLOT_BYTES - offset) {
        return 1;
    }
    memcpy(slots + slot * PORT_SLOT_BYTES + offset, data, size);
    return 0;
}
