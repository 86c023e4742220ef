"""Requests and replies as values, and their bytes. Layouts: firmware/PROTOCOL.md.

The other end: firmware/src.

Every integer is little endian. A request knows the type of its reply; `read_reply` checks the length and raises
MessageError with the number that does not fit.
"""

import enum
import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from agent.mcu.errors import MessageError

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<HBBI")
REPLY_BIT = 0x80
UNKNOWN = 0xFFFFFFFF
"""A figure that the board cannot give; becomes None."""

R_co = TypeVar("R_co", covariant=True)


class MessageType(enum.IntEnum):
    """Types from 0x10 on are effects (exactly once, in sequence).

    Below are queries that may run twice.
    """

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
    """The fourth byte of a reply."""

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


class Rule(enum.IntEnum):
    """How the int8 update is rounded (port_rule of firmware/include/port_engine.h)."""

    STOCHASTIC = 0
    NEAREST = 1
    TRUNCATE = 2
    Q88 = 3


class MemoryRegion(enum.IntEnum):
    """What READ and CRC look at."""

    PARAMETERS = 0
    LOGITS = 1


class RestoreSource(enum.IntEnum):
    """Where RESTORE takes the parameters from."""

    SNAPSHOT = 0
    INITIAL = 1


class ResetReason(enum.IntEnum):
    """Why the device started last."""

    POWER = 1
    REQUEST = 2
    FAULT = 3
    WATCHDOG = 4


class Request(Protocol[R_co]):
    """One request: its type, its bytes, and how to read its reply."""

    @property
    def type(self) -> MessageType:
        """Return the message type."""

    def payload(self) -> bytes:
        """Return the bytes after the header."""

    def read_reply(self, payload: bytes) -> R_co:
        """Return the reply that `payload` holds; raise MessageError if it does not fit."""


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
    """Return header and payload of a reply; raise MessageError if it is none."""
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


def _unpack(layout: struct.Struct, payload: bytes, name: str) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise MessageError(f"{name} reply of {len(payload)} bytes, expected {layout.size}: {payload[:64].hex()}")
    fields: tuple[int, ...] = layout.unpack(payload)
    return fields


def _expect_empty(payload: bytes, name: str) -> None:
    if payload:
        raise MessageError(f"{name} reply of {len(payload)} bytes, expected none: {payload[:64].hex()}")


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device says of itself in HELLO. Sizes in bytes."""

    protocol: int
    oldest_protocol: int
    firmware: tuple[int, int, int]
    max_payload: int
    ram_bytes: int
    flash_bytes: int
    nonce: int
    next_sequence: int
    class_count: int
    input_bytes: int
    parameter_bytes: int
    arena_bytes: int
    trains: bool
    has_q88: bool
    has_storage: bool
    has_snapshot: bool
    slot_bytes: int
    ticks_hz: int
    model_hash: bytes
    board: str
    model: str
    serial: bytes

    @property
    def firmware_version(self) -> str:
        """Return the version as text, such as `0.1.0`."""
        return ".".join(map(str, self.firmware))

    @property
    def serial_text(self) -> str | None:
        """Return the factory id in hex, None for a board without one."""
        return self.serial.hex() if any(self.serial) else None


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask who is there.

    `token` is random: a device without entropy draws its boot nonce from it.
    """

    token: int
    type: ClassVar[MessageType] = MessageType.HELLO
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BBBBHHIIIHHIIIIII32s24s32s8s")

    def payload(self) -> bytes:
        return struct.pack("<I", self.token)

    def read_reply(self, payload: bytes) -> DeviceInfo:
        """Return what the device says of itself.

        Raises MessageError for a reply of another length.
        """
        if len(payload) != self._LAYOUT.size:
            raise MessageError(f"HELLO reply of {len(payload)} bytes, expected {self._LAYOUT.size}")
        (protocol, oldest, major, minor, patch, max_payload, ram, flash, nonce, sequence, classes, inputs, parameters,
         arena, flags, slot, hertz, model_hash, board, model, serial) = self._LAYOUT.unpack(payload)  # fmt: skip
        return DeviceInfo(
            protocol=protocol, oldest_protocol=oldest, firmware=(major, minor, patch), max_payload=max_payload,
            ram_bytes=ram, flash_bytes=flash, nonce=nonce, next_sequence=sequence, class_count=classes,
            input_bytes=inputs, parameter_bytes=parameters, arena_bytes=arena, trains=bool(flags & 1),
            has_q88=bool(flags & 2), has_storage=bool(flags & 4), has_snapshot=bool(flags & 8), slot_bytes=slot,
            ticks_hz=hertz, model_hash=model_hash, board=_text(board), model=_text(model), serial=serial,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Counters since boot; None where the board cannot tell."""

    frames: int
    bad_crc: int
    bad_cobs: int
    overlong: int
    duplicates: int
    refused: int
    overruns: int
    trained: int
    evaluated: int
    saves: int
    stack_used_bytes: int | None
    stack_bytes: int | None
    static_ram_bytes: int | None
    reset_reason: ResetReason | None
    ticks: int

    @property
    def frame_errors(self) -> int:
        """Return the frames that arrived damaged."""
        return self.bad_crc + self.bad_cobs + self.overlong

    @property
    def ram_used_bytes(self) -> int | None:
        """Return static RAM plus the deepest stack so far, None if either is unknown."""
        if self.static_ram_bytes is None or self.stack_used_bytes is None:
            return None
        return self.static_ram_bytes + self.stack_used_bytes


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the counters."""

    type: ClassVar[MessageType] = MessageType.STATUS
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<14IQ")

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> DeviceStatus:
        (frames, bad_crc, bad_cobs, overlong, duplicates, refused, overruns, trained, evaluated, saves, stack_used,
         stack, static, reason, ticks) = _unpack(self._LAYOUT, payload, "STATUS")  # fmt: skip
        return DeviceStatus(
            frames=frames, bad_crc=bad_crc, bad_cobs=bad_cobs, overlong=overlong, duplicates=duplicates,
            refused=refused, overruns=overruns, trained=trained, evaluated=evaluated, saves=saves,
            stack_used_bytes=_known(stack_used), stack_bytes=_known(stack), static_ram_bytes=_known(static),
            reset_reason=ResetReason(reason) if reason in set(ResetReason) else None, ticks=ticks,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DevicePages:
    """The external memory that a model's pages go to, and what went there and back since boot. Sizes in bytes.

    `medium` is empty where the device has none. `written_bytes` counts whole blocks, as the medium wears. `torn`: a step
    ended half way, parameters and state must be restored.
    """

    medium: str
    medium_bytes: int
    block_bytes: int
    needed_bytes: int
    read_bytes: int
    written_bytes: int
    failed: int
    damaged: int
    torn: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """Ask for the medium of the pages and its counters."""

    type: ClassVar[MessageType] = MessageType.PAGES
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<8sIIIQQIII")

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> DevicePages:
        """Return what the device says of its pages.

        Raises MessageError for a reply of another length.
        """
        if len(payload) != self._LAYOUT.size:
            raise MessageError(f"PAGES reply of {len(payload)} bytes, expected {self._LAYOUT.size}")
        medium, size, block, needed, read, written, failed, damaged, torn = self._LAYOUT.unpack(payload)
        return DevicePages(_text(medium), size, block, needed, read, written, failed, damaged, bool(torn))


@dataclass(frozen=True, slots=True)
class Echo:
    """Ask for the same bytes back."""

    data: bytes
    type: ClassVar[MessageType] = MessageType.ECHO

    def payload(self) -> bytes:
        return self.data

    def read_reply(self, payload: bytes) -> bytes:
        return payload


@dataclass(frozen=True, slots=True)
class Read:
    """Read `length` bytes of a region from `offset`."""

    offset: int
    length: int
    region: MemoryRegion = MemoryRegion.PARAMETERS
    type: ClassVar[MessageType] = MessageType.READ

    def payload(self) -> bytes:
        return struct.pack("<III", self.region, self.offset, self.length)

    def read_reply(self, payload: bytes) -> bytes:
        """Return the bytes that were read.

        Raises MessageError for a reply of another length.
        """
        if len(payload) != self.length:
            raise MessageError(f"READ reply of {len(payload)} bytes, asked for {self.length}")
        return payload


@dataclass(frozen=True, slots=True)
class Crc:
    """Ask for the CRC-32 of part of a region."""

    offset: int
    length: int
    region: MemoryRegion = MemoryRegion.PARAMETERS
    type: ClassVar[MessageType] = MessageType.CRC
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<I")

    def payload(self) -> bytes:
        return struct.pack("<III", self.region, self.offset, self.length)

    def read_reply(self, payload: bytes) -> int:
        return _unpack(self._LAYOUT, payload, "CRC")[0]


@dataclass(frozen=True, slots=True)
class Load:
    """Overwrite parameter bytes from `offset`."""

    offset: int
    data: bytes
    type: ClassVar[MessageType] = MessageType.LOAD

    def payload(self) -> bytes:
        return struct.pack("<I", self.offset) + self.data

    def read_reply(self, payload: bytes) -> None:
        _expect_empty(payload, "LOAD")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Learning rate and rounding of the update.

    `scaling` is quantisation-aware scaling.
    """

    learning_rate: float
    rule: Rule = Rule.STOCHASTIC
    scaling: bool = True


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a snapshot needs beside parameters and options."""

    generator: int
    steps: int


@dataclass(frozen=True, slots=True)
class DeviceTraining:
    """Options and state as the device has them.

    `generation` counts snapshots (0: not one).
    """

    options: TrainingOptions
    state: TrainingState
    generation: int


_TRAINING = struct.Struct("<fBBHIII")


def _read_training(payload: bytes, name: str) -> DeviceTraining:
    rate, rule, scaling, _, generator, steps, generation = _unpack(_TRAINING, payload, name)
    try:
        options = TrainingOptions(rate, Rule(rule), bool(scaling))
    except ValueError as error:
        raise MessageError(f"{name} reply: {error}") from error
    return DeviceTraining(options, TrainingState(generator, steps), generation)


@dataclass(frozen=True, slots=True)
class Options:
    """Set what is given, read all."""

    options: TrainingOptions | None = None
    state: TrainingState | None = None
    type: ClassVar[MessageType] = MessageType.OPTIONS

    def payload(self) -> bytes:
        flags = (self.options is not None) | (self.state is not None) << 1
        options = self.options or TrainingOptions(0.0)
        state = self.state or TrainingState(0, 0)
        return struct.pack(
            "<IfBBHII", flags, options.learning_rate, options.rule, options.scaling, 0, state.generator, state.steps
        )

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "OPTIONS")


@dataclass(frozen=True, slots=True)
class Push:
    """Write part of the input tensor; pieces in order, offset 0 starts again."""

    offset: int
    data: bytes
    type: ClassVar[MessageType] = MessageType.PUSH

    def payload(self) -> bytes:
        return struct.pack("<I", self.offset) + self.data

    def read_reply(self, payload: bytes) -> None:
        _expect_empty(payload, "PUSH")


@dataclass(frozen=True, slots=True)
class LearnResult:
    """Outcome of TRAIN or EVAL: `done` samples of those sent.

    Fewer if the host asked for attention.
    """

    done: int
    correct: int
    loss_sum: float
    state: TrainingState


_LEARN = struct.Struct("<HHfII")
_SAMPLES = struct.Struct("<HH")
SAMPLE_PUSHED = 1


def _labelled(labels: tuple[int, ...], samples: bytes | None) -> bytes:
    head = _SAMPLES.pack(len(labels), SAMPLE_PUSHED if samples is None else 0)
    return head + struct.pack(f"<{len(labels)}H", *labels) + (samples or b"")


def _read_learn(payload: bytes, name: str) -> LearnResult:
    done, correct, loss, generator, steps = _unpack(_LEARN, payload, name)
    return LearnResult(done, correct, loss, TrainingState(generator, steps))


@dataclass(frozen=True, slots=True)
class Train:
    """Train on samples laid out one after the other, or (`samples` None, one label) on the pushed input."""

    labels: tuple[int, ...]
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.TRAIN

    def payload(self) -> bytes:
        return _labelled(self.labels, self.samples)

    def read_reply(self, payload: bytes) -> LearnResult:
        return _read_learn(payload, "TRAIN")


@dataclass(frozen=True, slots=True)
class Eval:
    """Count right predictions and loss; the state in the reply is the unchanged one."""

    labels: tuple[int, ...]
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.EVAL

    def payload(self) -> bytes:
        return _labelled(self.labels, self.samples)

    def read_reply(self, payload: bytes) -> LearnResult:
        return _read_learn(payload, "EVAL")


INFER_MAX = 31
"""Samples per INFER: the reply has to fit the device's reply cache of 64 bytes."""


@dataclass(frozen=True, slots=True)
class Infer:
    """Predict the classes of `count` samples, or (`samples` None) of the pushed input."""

    count: int
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.INFER

    def payload(self) -> bytes:
        return _SAMPLES.pack(self.count, SAMPLE_PUSHED if self.samples is None else 0) + (self.samples or b"")

    def read_reply(self, payload: bytes) -> tuple[int, ...]:
        """Return the classes, one for each sample.

        Raises MessageError for a reply of another length.
        """
        done, *classes = _unpack(struct.Struct(f"<H{self.count}H"), payload, "INFER")
        if done != self.count:
            raise MessageError(f"INFER did {done} of {self.count} samples")
        return tuple(classes)


@dataclass(frozen=True, slots=True)
class Save:
    """Write a snapshot to the device's non-volatile memory."""

    type: ClassVar[MessageType] = MessageType.SAVE

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "SAVE")


@dataclass(frozen=True, slots=True)
class Restore:
    """Take the parameters from the newest snapshot, or from the flash image."""

    source: RestoreSource = RestoreSource.SNAPSHOT
    type: ClassVar[MessageType] = MessageType.RESTORE

    def payload(self) -> bytes:
        return bytes([self.source])

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "RESTORE")


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a pushed input. (A running TRAIN is stopped by framing.ATTENTION.)"""

    type: ClassVar[MessageType] = MessageType.ABORT

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> None:
        _expect_empty(payload, "ABORT")


@dataclass(frozen=True, slots=True)
class Reset:
    """Start the device again; its RAM, and the session, are lost."""

    type: ClassVar[MessageType] = MessageType.RESET

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> None:
        _expect_empty(payload, "RESET")
