#include "sd.h"

#include <string.h>

#define GO_IDLE 0u
#define SEND_IF_COND 8u
#define SEND_CSD 9u
#define SEND_STATUS 13u
#define READ_BLOCK 17u
#define WRITE_BLOCK 24u
#define OP_COND 41u /* after APP */
#define APP 55u
#define READ_OCR 58u
#define CRC_ON_OFF 59u

#define ANSWER_READY 0x00u
#define ANSWER_IDLE 0x01u
#define ANSWER_NONE 0xFFu
#define TOKEN 0xFEu
#define ACCEPTED 0x05u
#define OCR_HIGH_CAPACITY 0x40u
#define VOLTAGE_AND_PATTERN 0x1AAu
#define HIGH_CAPACITY_ASKED 0x40000000u
#define ANSWER_TRIES 8u       /* bytes within which an answer comes */
#define OPEN_US 1000000u      /* a card wakes within a second */
#define PATIENCE_US 500000u   /* at most 100 ms for a read and 250 ms for a write, from the specification */
#define WAKE_CLOCKS_BYTES 10u /* 74 clocks with the card not selected */

static uint8_t exchange_byte(const sd *card, uint8_t out) {
    uint8_t in;
    spi_exchange(card->spi, &out, &in, 1);
    return in;
}

static uint8_t crc7(const uint8_t *data, uint32_t bytes) {
    uint8_t crc = 0;
    for (; bytes > 0; bytes--) {
        crc ^= *data++;
        for (int i = 0; i < 8; i++) crc = (uint8_t)(crc << 1 ^ (crc & 0x80 ? 0x12 : 0));
    }
    return crc | 1u;
}

/* CCITT, a byte at a time without a table. */
static uint16_t crc16(uint16_t crc, const uint8_t *data, uint32_t bytes) {
    for (; bytes > 0; bytes--) {
        crc = (uint16_t)(crc >> 8 | crc << 8);
        crc ^= *data++;
        crc ^= (uint8_t)crc >> 4;
        crc = (uint16_t)(crc ^ crc << 12);
        crc = (uint16_t)(crc ^ (crc & 0xFFu) << 5);
    }
    return crc;
}

/* Select the card and return its first answer; ANSWER_NONE if there is none. The card stays selected. */
static uint8_t command(const sd *card, uint8_t number, uint32_t argument) {
    uint8_t out[6] = {0x40u | number, (uint8_t)(argument >> 24), (uint8_t)(argument >> 16), (uint8_t)(argument >> 8), (uint8_t)argument, 0};
    out[5] = crc7(out, 5);
    card->spi->select(card->spi->context, 1);
    exchange_byte(card, 0xFFu);
    spi_exchange(card->spi, out, 0, sizeof out);
    uint8_t answer = ANSWER_NONE;
    for (uint32_t i = 0; i < ANSWER_TRIES && answer & 0x80u; i++) answer = exchange_byte(card, 0xFFu);
    return answer;
}

static void release(const sd *card) {
    card->spi->select(card->spi->context, 0);
    exchange_byte(card, 0xFFu); /* the card releases the line a byte later */
}

static uint8_t simple(const sd *card, uint8_t number, uint32_t argument) {
    uint8_t answer = command(card, number, argument);
    release(card);
    return answer;
}

static port_transfer fail(sd *card) {
    release(card);
    card->state = SD_IDLE;
    return PORT_TRANSFER_FAILED;
}

static uint32_t block_part(const sd *card) { return card->left < SD_BLOCK_BYTES ? card->left : SD_BLOCK_BYTES; }

/* Begin the next block, or end the transfer. */
static port_transfer next(sd *card) {
    if (card->left == 0) {
        card->state = SD_IDLE;
        return PORT_TRANSFER_DONE;
    }
    uint32_t address = card->by_bytes ? card->block * SD_BLOCK_BYTES : card->block;
    if (command(card, card->writes ? WRITE_BLOCK : READ_BLOCK, address) != ANSWER_READY) return fail(card);
    card->since = card->spi->microseconds();
    card->state = SD_AWAITING;
    if (card->writes) {
        uint8_t head[2] = {0xFFu, TOKEN};
        spi_exchange(card->spi, head, 0, sizeof head);
        card->sent = block_part(card);
        card->spi->start(card->spi->context, card->from, 0, card->sent);
        card->state = SD_SENDING;
    }
    return PORT_TRANSFER_BUSY;
}

static port_transfer await(sd *card) {
    uint8_t token = exchange_byte(card, 0xFFu);
    if (token == TOKEN) {
        card->sent = block_part(card);
        card->spi->start(card->spi->context, 0, card->to, card->sent);
        card->state = SD_RECEIVING;
        return PORT_TRANSFER_BUSY;
    }
    int late = card->spi->microseconds() - card->since > PATIENCE_US;
    return token != 0xFFu || late ? fail(card) : PORT_TRANSFER_BUSY;
}

/* Receive the rest of a block that the transfer does not need, and its CRC. */
static port_transfer received(sd *card) {
    uint16_t crc = crc16(0, card->to, card->sent);
    for (uint32_t i = card->sent; i < SD_BLOCK_BYTES; i++) {
        uint8_t byte = exchange_byte(card, 0xFFu);
        crc = crc16(crc, &byte, 1);
    }
    uint16_t high = exchange_byte(card, 0xFFu), low = exchange_byte(card, 0xFFu);
    if ((high << 8 | low) != crc) return fail(card);
    release(card);
    card->to += card->sent;
    card->left -= card->sent;
    card->block++;
    return next(card);
}

static port_transfer sent(sd *card) {
    uint16_t crc = crc16(0, card->from, card->sent);
    const uint8_t fill = 0xFFu;
    for (uint32_t i = card->sent; i < SD_BLOCK_BYTES; i++) {
        exchange_byte(card, fill);
        crc = crc16(crc, &fill, 1);
    }
    uint8_t tail[2] = {(uint8_t)(crc >> 8), (uint8_t)crc};
    spi_exchange(card->spi, tail, 0, sizeof tail);
    if ((exchange_byte(card, 0xFFu) & 0x1Fu) != ACCEPTED) return fail(card);
    card->since = card->spi->microseconds();
    card->state = SD_PROGRAMMING;
    return PORT_TRANSFER_BUSY;
}

/* A busy card holds the line low. Once it does not, it is asked whether it wrote the data; a removed card does not
 * answer. */
static port_transfer programmed(sd *card) {
    if (exchange_byte(card, 0xFFu) != 0xFFu)
        return card->spi->microseconds() - card->since > PATIENCE_US ? fail(card) : PORT_TRANSFER_BUSY;
    release(card);
    uint8_t answer = command(card, SEND_STATUS, 0), second = exchange_byte(card, 0xFFu);
    if (answer != ANSWER_READY || second != 0) return fail(card);
    release(card);
    card->from += card->sent;
    card->left -= card->sent;
    card->block++;
    return next(card);
}

static port_transfer poll(void *context) {
    sd *card = context;
    switch (card->state) {
    case SD_AWAITING: return await(card);
    case SD_RECEIVING: return card->spi->busy(card->spi->context) ? PORT_TRANSFER_BUSY : received(card);
    case SD_SENDING: return card->spi->busy(card->spi->context) ? PORT_TRANSFER_BUSY : sent(card);
    case SD_PROGRAMMING: return programmed(card);
    default: return PORT_TRANSFER_DONE;
    }
}

static port_transfer begin(sd *card, uint32_t offset, uint32_t bytes) {
    card->block = offset / SD_BLOCK_BYTES;
    card->left = bytes;
    return next(card);
}

static port_transfer write(void *context, uint32_t offset, const void *data, uint32_t bytes) {
    sd *card = context;
    card->from = data;
    card->writes = 1;
    return begin(card, offset, bytes);
}

static port_transfer read(void *context, uint32_t offset, void *data, uint32_t bytes) {
    sd *card = context;
    card->to = data;
    card->writes = 0;
    return begin(card, offset, bytes);
}

/* Return the size of the card in bytes from its CSD register: version 1 counts blocks times a factor, version 2
 * units of 512 KiB. */
static uint32_t size_of(sd *card) {
    uint8_t csd[16], token = 0xFFu;
    if (command(card, SEND_CSD, 0) != ANSWER_READY) return 0;
    for (uint32_t i = 0; i < SD_BLOCK_BYTES && token != TOKEN; i++) token = exchange_byte(card, 0xFFu);
    spi_exchange(card->spi, 0, csd, sizeof csd);
    exchange_byte(card, 0xFFu);
    exchange_byte(card, 0xFFu);
    release(card);
    if (token != TOKEN) return 0;
    if (csd[0] >> 6) {
        uint32_t count = ((csd[7] & 0x3Fu) << 16 | csd[8] << 8 | csd[9]) + 1u;
        return count >= 8191u ? UINT32_MAX : count * 512u * 1024u;
    }
    uint32_t size = (csd[6] & 3u) << 10 | csd[7] << 2 | csd[8] >> 6, factor = (csd[9] & 3u) << 1 | csd[10] >> 7;
    return (size + 1u) << (factor + 2u + (csd[5] & 15u));
}

static int wake(sd *card) {
    uint8_t answer[4];
    spi_exchange(card->spi, 0, 0, WAKE_CLOCKS_BYTES);
    if (simple(card, GO_IDLE, 0) != ANSWER_IDLE) return 0;
    uint8_t first = command(card, SEND_IF_COND, VOLTAGE_AND_PATTERN);
    spi_exchange(card->spi, 0, answer, sizeof answer);
    release(card);
    if (first != ANSWER_IDLE || answer[3] != (VOLTAGE_AND_PATTERN & 0xFFu)) return 0;
    if (simple(card, CRC_ON_OFF, 1) != ANSWER_IDLE) return 0;
    uint64_t since = card->spi->microseconds();
    do {
        if (card->spi->microseconds() - since > OPEN_US) return 0;
        simple(card, APP, 0);
    } while (simple(card, OP_COND, HIGH_CAPACITY_ASKED) != ANSWER_READY);
    if (command(card, READ_OCR, 0) != ANSWER_READY) return 0;
    spi_exchange(card->spi, 0, answer, sizeof answer);
    release(card);
    card->by_bytes = !(answer[0] & OCR_HIGH_CAPACITY);
    return 1;
}

port_status sd_open(sd *card, const port_spi *spi, port_medium *medium) {
    memset(card, 0, sizeof *card);
    card->spi = spi;
    uint32_t bytes = wake(card) ? size_of(card) : 0;
    if (bytes == 0) return PORT_ERROR_MEDIUM;
    *medium = (port_medium){"sd", bytes, SD_BLOCK_BYTES, 0, write, read, poll, card};
    return PORT_OK;
}
