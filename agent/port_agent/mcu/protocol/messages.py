"""The common parts of all requests and replies: a type, a header, a status. Layouts: firmware/PROTOCOL.md.

The requests themselves are `queries` and `effects`. Every integer is little endian. A request knows the type of its
reply; `read_reply` checks the length and raises MessageError with the number that does not fit.
"""

import enum
import struct
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from port_agent.mcu.board.board_errors import MessageError

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<HBBI")
REPLY_BIT = 0x80
_SHOWN = 64
"""Number of bytes of a wrong reply that an error shows."""

R_co = TypeVar("R_co", covariant=True)


class MessageType(enum.IntEnum):
    """Message types: effects from 0x10 on (exactly once, in sequence), and queries below, which may run twice."""

    HELLO = 0x01
    STATUS = 0x02
    ECHO = 0x03
    READ = 0x04
    CRC = 0x05
    PAGES = 0x06
    LOAD = 0x10
    OPTIONS = 0x11
    PUSH = 0x12
    TRAIN = 0x20
    EVAL = 0x21
    INFER = 0x22
    SAVE = 0x30
    RESTORE = 0x31
    ABORT = 0x3E
    RESET = 0x3F

    @property
    def is_effect(self) -> bool:
        """Whether this request changes the device."""
        return self >= MessageType.LOAD


class ReplyStatus(enum.IntEnum):
    """The status in a reply, its fourth byte."""

    OK = 0
    UNKNOWN_TYPE = 1
    BAD_VERSION = 2
    WRONG_NONCE = 3
    BAD_SEQUENCE = 4
    BAD_LENGTH = 5
    OUT_OF_RANGE = 6
    NO_INPUT = 7
    NO_SNAPSHOT = 8
    NO_STORAGE = 9
    STORAGE_FAILED = 10
    UNSUPPORTED = 11
    ENGINE_FAILED = 12
    MEDIUM_FAILED = 13
    PAGE_DAMAGED = 14
    MODEL_TORN = 15


class Request(Protocol[R_co]):
    """One request: its type, its bytes, and how to read its reply."""

    @property
    def type(self) -> MessageType:
        """Return the message type."""

    def payload(self) -> bytes:
        """Return the bytes after the header."""

    def read_reply(self, payload: bytes) -> R_co:
        """Return the reply in `payload`; raise MessageError if it does not fit."""


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """The first eight bytes of a reply."""

    sequence: int
    type: MessageType
    status: ReplyStatus
    nonce: int


def encode_request(sequence: int, nonce: int, request: Request[object]) -> bytes:
    """Return the frame content of a request."""
    return HEADER.pack(sequence, request.type, PROTOCOL_VERSION, nonce) + request.payload()


def decode_reply(content: bytes) -> tuple[ReplyHeader, bytes]:
    """Return header and payload of a reply; raise MessageError if the bytes are not a reply."""
    if len(content) < HEADER.size:
        raise MessageError(f"reply of {len(content)} bytes, shorter than its header of {HEADER.size}")
    sequence, kind, status, nonce = HEADER.unpack_from(content)
    if not kind & REPLY_BIT:
        raise MessageError(f"type 0x{kind:02x} is a request, not a reply")
    try:
        header = ReplyHeader(sequence, MessageType(kind & ~REPLY_BIT), ReplyStatus(status), nonce)
    except ValueError as error:
        raise MessageError(f"reply with header {content[: HEADER.size].hex()}: {error}") from error
    return header, content[HEADER.size :]


def unpack_reply(layout: struct.Struct, payload: bytes, name: str) -> tuple[Any, ...]:
    """Return the fields of a reply; raise MessageError if its length is wrong."""
    if len(payload) != layout.size:
        raise MessageError(f"{name} reply of {len(payload)} bytes, expected {layout.size}: {payload[:_SHOWN].hex()}")
    return layout.unpack(payload)


def expect_empty(payload: bytes, name: str) -> None:
    """Raise MessageError if a reply is not empty."""
    if payload:
        raise MessageError(f"{name} reply of {len(payload)} bytes, expected none: {payload[:_SHOWN].hex()}")
