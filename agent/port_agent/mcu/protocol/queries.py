"""Requests that change nothing, with their replies: identity, counters and pages, and bytes of the memory.

The other end: firmware/src/queries.c.
"""

import enum
import struct
from dataclasses import dataclass
from typing import ClassVar

from port_agent.mcu.board.board_errors import MessageError
from port_agent.mcu.protocol.messages import MessageType, unpack_reply

_UNKNOWN = 0xFFFFFFFF
"""Value of a figure that the board cannot give; it becomes None."""


class MemoryRegion(enum.IntEnum):
    """Memory regions that READ and CRC access."""

    PARAMETERS = 0
    LOGITS = 1


class ResetReason(enum.IntEnum):
    """Why the device last started."""

    POWER = 1
    REQUEST = 2
    FAULT = 3
    WATCHDOG = 4


def _known(value: int) -> int | None:
    return None if value == _UNKNOWN else value


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device's self-description in HELLO. Sizes in bytes."""

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
    has_targets: bool
    slot_bytes: int
    ticks_hz: int
    model_hash: bytes
    board: str
    model: str
    serial: bytes

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample to learn from: its input and, if it has targets, an f32 for each output."""
        return self.input_bytes + (4 * self.class_count if self.has_targets else 0)

    @property
    def firmware_version(self) -> str:
        """Return the version as text, such as `0.1.0`."""
        return ".".join(map(str, self.firmware))

    @property
    def serial_text(self) -> str | None:
        """Return the factory id in hexadecimal; None for a board without one."""
        return self.serial.hex() if any(self.serial) else None


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask a device for its identity.

    `token` is random: a device without entropy derives its boot nonce from it.
    """

    token: int
    type: ClassVar[MessageType] = MessageType.HELLO
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BBBBHHIIIHHIIIIII32s24s32s8s")

    def payload(self) -> bytes:
        return struct.pack("<I", self.token)

    def read_reply(self, payload: bytes) -> DeviceInfo:
        """Return the device's self-description.

        Raises MessageError if the reply has another length.
        """
        (protocol, oldest, major, minor, patch, max_payload, ram, flash, nonce, sequence, classes, inputs, parameters,
         arena, flags, slot, hertz, model_hash, board, model, serial) = unpack_reply(self._LAYOUT, payload, "HELLO")  # fmt: skip
        return DeviceInfo(
            protocol=protocol, oldest_protocol=oldest, firmware=(major, minor, patch), max_payload=max_payload,
            ram_bytes=ram, flash_bytes=flash, nonce=nonce, next_sequence=sequence, class_count=classes,
            input_bytes=inputs, parameter_bytes=parameters, arena_bytes=arena, trains=bool(flags & 1),
            has_q88=bool(flags & 2), has_storage=bool(flags & 4), has_snapshot=bool(flags & 8),
            has_targets=bool(flags & 16), slot_bytes=slot, ticks_hz=hertz, model_hash=model_hash, board=_text(board), model=_text(model), serial=serial,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Counters since boot; None for those that the board lacks."""

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
        """Return the number of frames that arrived damaged."""
        return self.bad_crc + self.bad_cobs + self.overlong

    @property
    def ram_used_bytes(self) -> int | None:
        """Return static RAM plus the deepest stack so far; None if either is unknown."""
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
         stack, static, reason, ticks) = unpack_reply(self._LAYOUT, payload, "STATUS")  # fmt: skip
        return DeviceStatus(
            frames=frames, bad_crc=bad_crc, bad_cobs=bad_cobs, overlong=overlong, duplicates=duplicates,
            refused=refused, overruns=overruns, trained=trained, evaluated=evaluated, saves=saves,
            stack_used_bytes=_known(stack_used), stack_bytes=_known(stack), static_ram_bytes=_known(static),
            reset_reason=ResetReason(reason) if reason in set(ResetReason) else None, ticks=ticks,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DevicePages:
    """The external memory for a model's pages, and the traffic to and from it since boot. Sizes in bytes.

    `medium` is empty if the device has none. `written_bytes` counts whole blocks, which is what wears the medium.
    `torn`: a step ended half way, so parameters and state must be restored.
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
        """Return the device's page figures.

        Raises MessageError if the reply has another length.
        """
        medium, size, block, needed, read, written, failed, damaged, torn = unpack_reply(self._LAYOUT, payload, "PAGES")
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

        Raises MessageError if the reply has another length.
        """
        if len(payload) != self.length:
            raise MessageError(f"READ reply of {len(payload)} bytes, but {self.length} were requested")
        return payload


@dataclass(frozen=True, slots=True)
class Crc:
    """Ask for the CRC-32 of a part of a region."""

    offset: int
    length: int
    region: MemoryRegion = MemoryRegion.PARAMETERS
    type: ClassVar[MessageType] = MessageType.CRC
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<I")

    def payload(self) -> bytes:
        return struct.pack("<III", self.region, self.offset, self.length)

    def read_reply(self, payload: bytes) -> int:
        (crc,) = unpack_reply(self._LAYOUT, payload, "CRC")
        return int(crc)
