/* Numbers and layouts of the protocol; PROTOCOL.md is the reference, agent/port_agent/mcu/protocol/{messages,queries,effects}.py the other end. */
#ifndef PORT_MESSAGES_H
#define PORT_MESSAGES_H

#define PROTOCOL_VERSION 1u
#define PROTOCOL_OLDEST 1u

/* Request: sequence u16, type u8, version u8, nonce u32. Reply: sequence u16, type | 0x80, status u8, nonce u32.
 * Eight bytes, so that payloads stay word aligned. */
#define HEADER_SIZE 8u
#define REPLY_BIT 0x80u

/* Queries change nothing and may run twice. Effects run exactly once: in sequence, answered again from the cache. */
enum message_type {
    MESSAGE_HELLO = 0x01,
    MESSAGE_STATUS = 0x02,
    MESSAGE_ECHO = 0x03,
    MESSAGE_READ = 0x04,
    MESSAGE_CRC = 0x05,
    MESSAGE_PAGES = 0x06,
    MESSAGE_FIRST_EFFECT = 0x10,
    MESSAGE_LOAD = 0x10,
    MESSAGE_OPTIONS = 0x11,
    MESSAGE_PUSH = 0x12,
    MESSAGE_TRAIN = 0x20,
    MESSAGE_EVAL = 0x21,
    MESSAGE_INFER = 0x22,
    MESSAGE_SAVE = 0x30,
    MESSAGE_RESTORE = 0x31,
    MESSAGE_ABORT = 0x3E,
    MESSAGE_RESET = 0x3F,
};

enum reply_status {
    REPLY_OK = 0,
    REPLY_UNKNOWN_TYPE = 1,
    REPLY_BAD_VERSION = 2,
    REPLY_WRONG_NONCE = 3,   /* the device was reset since HELLO: the host's view of its state is invalid */
    REPLY_BAD_SEQUENCE = 4,  /* payload: the expected sequence number, u16 */
    REPLY_BAD_LENGTH = 5,
    REPLY_OUT_OF_RANGE = 6,  /* offset, length, label or option outside the model */
    REPLY_NO_INPUT = 7,      /* PUSHED is set, but the input is incomplete */
    REPLY_NO_SNAPSHOT = 8,
    REPLY_NO_STORAGE = 9,    /* no non-volatile memory, or the model does not fit a slot */
    REPLY_STORAGE_FAILED = 10,
    REPLY_UNSUPPORTED = 11,  /* training an inference-only model, Q8.8 without its storage */
    REPLY_ENGINE_FAILED = 12,
    REPLY_MEDIUM_FAILED = 13, /* the page medium does not respond, or reports an error */
    REPLY_PAGE_DAMAGED = 14,  /* a page came back with another checksum */
    REPLY_MODEL_TORN = 15,    /* a training step was interrupted: restore parameters and state first */
};

enum read_region { REGION_PARAMETERS = 0, REGION_LOGITS = 1 };
enum restore_source { RESTORE_SNAPSHOT = 0, RESTORE_INITIAL = 1 };

#define SAMPLE_PUSHED 1u      /* flag of TRAIN, EVAL, INFER: the one sample is the pushed input */
#define OPTIONS_SET_RULE 1u   /* flag of OPTIONS: set learning rate, rule and scaling */
#define OPTIONS_SET_STATE 2u  /* flag of OPTIONS: set generator and steps */

#define HELLO_TRAINS 1u
#define HELLO_HAS_Q88 2u
#define HELLO_HAS_STORAGE 4u
#define HELLO_HAS_SNAPSHOT 8u
#define HELLO_HAS_TARGETS 16u

#define HELLO_REQUEST_SIZE 4u
#define HELLO_REPLY_SIZE 144u
#define HELLO_HASH_SIZE 32u
#define HELLO_BOARD_SIZE 24u
#define HELLO_MODEL_SIZE 32u
#define HELLO_SERIAL_SIZE 8u
#define STATUS_REPLY_SIZE 64u
#define PAGES_REPLY_SIZE 48u
#define PAGES_NAME_SIZE 8u
#define OPTIONS_SIZE 20u
#define SAMPLES_HEADER_SIZE 4u

/* This many zero bytes in a row stop a running TRAIN or EVAL after the current sample. Frames contain no zeros and are
 * followed by one, and retries begin with one: a run of eight has no other meaning. */
#define ATTENTION_ZEROS 8u

/* Largest reply of an effect; INFER is limited to what fits. */
#define CACHED_REPLY_MAX 64u
#define INFER_SAMPLES_MAX ((CACHED_REPLY_MAX - 2u) / 2u)

#endif
