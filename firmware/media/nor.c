#include "nor.h"

#define WRITE_ENABLE 0x06u
#define READ_STATUS 0x05u
#define READ 0x03u
#define PROGRAM 0x02u
#define ERASE_SECTOR 0x20u
#define READ_ID 0x9Fu
#define STATUS_BUSY 1u
#define STATUS_WRITE_ENABLED 2u
#define ABSENT 0xFFu         /* what an unconnected line reads as */
#define PATIENCE_US 1000000u /* at most 400 ms for a sector, 3 ms for a page */
#define SIZE_CODE_MIN 16u    /* 2^code bytes: 64 KiB to 16 MiB are addressed with three bytes */
#define SIZE_CODE_MAX 24u

static uint8_t status_of(const nor *chip) {
    uint8_t out[2] = {READ_STATUS, 0}, in[2];
    chip->spi->select(chip->spi->context, 1);
    spi_exchange(chip->spi, out, in, sizeof out);
    chip->spi->select(chip->spi->context, 0);
    return in[1];
}

/* Send a command with an address and leave the chip selected. */
static void command(const nor *chip, uint8_t code, uint32_t address) {
    uint8_t out[4] = {code, (uint8_t)(address >> 16), (uint8_t)(address >> 8), (uint8_t)address};
    chip->spi->select(chip->spi->context, 1);
    spi_exchange(chip->spi, out, 0, sizeof out);
}

/* A missing or write-protected chip does not keep the latch. */
static int enable_writes(const nor *chip) {
    uint8_t code = WRITE_ENABLE;
    chip->spi->select(chip->spi->context, 1);
    spi_exchange(chip->spi, &code, 0, 1);
    chip->spi->select(chip->spi->context, 0);
    uint8_t status = status_of(chip);
    return status != ABSENT && (status & STATUS_WRITE_ENABLED) != 0;
}

static port_transfer fail(nor *chip) {
    chip->spi->select(chip->spi->context, 0);
    chip->state = NOR_IDLE;
    return PORT_TRANSFER_FAILED;
}

static port_transfer next(nor *chip) {
    if (chip->at == chip->end) {
        chip->state = NOR_IDLE;
        return PORT_TRANSFER_DONE;
    }
    if (!enable_writes(chip)) return fail(chip);
    chip->since = chip->spi->microseconds();
    if (chip->at == chip->erased) {
        command(chip, ERASE_SECTOR, chip->at);
        chip->spi->select(chip->spi->context, 0);
        chip->erased += NOR_SECTOR_BYTES;
        chip->state = NOR_ERASING;
        return PORT_TRANSFER_BUSY;
    }
    uint32_t left = chip->end - chip->at;
    chip->sent = left < NOR_PAGE_BYTES ? left : NOR_PAGE_BYTES;
    command(chip, PROGRAM, chip->at);
    chip->spi->start(chip->spi->context, chip->data, 0, chip->sent);
    chip->state = NOR_SENDING;
    return PORT_TRANSFER_BUSY;
}

static port_transfer poll(void *context) {
    nor *chip = context;
    if (chip->state == NOR_IDLE) return PORT_TRANSFER_DONE;
    if (chip->state == NOR_READING || chip->state == NOR_SENDING) {
        if (chip->spi->busy(chip->spi->context)) return PORT_TRANSFER_BUSY;
        chip->spi->select(chip->spi->context, 0);
        if (chip->state == NOR_READING) {
            chip->state = NOR_IDLE;
            return status_of(chip) == ABSENT ? PORT_TRANSFER_FAILED : PORT_TRANSFER_DONE;
        }
        chip->at += chip->sent;
        chip->data += chip->sent;
        chip->state = NOR_PROGRAMMING;
        return PORT_TRANSFER_BUSY;
    }
    uint8_t status = status_of(chip);
    if (status == ABSENT || chip->spi->microseconds() - chip->since > PATIENCE_US) return fail(chip);
    return status & STATUS_BUSY ? PORT_TRANSFER_BUSY : next(chip);
}

static port_transfer write(void *context, uint32_t offset, const void *data, uint32_t bytes) {
    nor *chip = context;
    chip->data = data;
    chip->at = chip->erased = offset;
    chip->end = offset + bytes;
    return next(chip);
}

static port_transfer read(void *context, uint32_t offset, void *data, uint32_t bytes) {
    nor *chip = context;
    if (status_of(chip) == ABSENT) return PORT_TRANSFER_FAILED;
    command(chip, READ, offset);
    chip->spi->start(chip->spi->context, 0, data, bytes);
    chip->state = NOR_READING;
    return PORT_TRANSFER_BUSY;
}

port_status nor_open(nor *chip, const port_spi *spi, port_medium *medium) {
    uint8_t out[4] = {READ_ID, 0, 0, 0}, in[4];
    *chip = (nor){.spi = spi, .state = NOR_IDLE};
    spi->select(spi->context, 1);
    spi_exchange(spi, out, in, sizeof out);
    spi->select(spi->context, 0);
    if (in[1] == 0 || in[1] == ABSENT || in[3] < SIZE_CODE_MIN || in[3] > SIZE_CODE_MAX) return PORT_ERROR_MEDIUM;
    *medium = (port_medium){"nor", 1u << in[3], NOR_SECTOR_BYTES, 0, write, read, poll, chip};
    return PORT_OK;
}
