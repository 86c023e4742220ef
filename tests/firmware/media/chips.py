"""Chips behind an SPI bus that speak their command sets: a serial NOR flash of the 25 series
and an SD card in SPI mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

OPEN_LINE = 0xFF


class Chip(Protocol):
    """What a chip does for the bus: it is selected or not, and every byte in brings one out."""

    def select(self, on: bool) -> None: ...

    def exchange(self, byte: int) -> int: ...


@dataclass
class NorFlash:
    """A 25-series flash: write enable latch, sector erase, page program with wrap, status polling.

    `busy_polls`: status reads until an operation is done. `pulled`: the line is open.
    """

    size_code: int = 16
    busy_polls: int = 3
    pulled: bool = False
    protected: bool = False
    memory: bytearray = field(init=False)
    erases: int = 0
    programs: int = 0
    latch: bool = False
    _busy: int = 0
    _sent: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.memory = bytearray(b"\xff" * (1 << self.size_code))

    def select(self, on: bool) -> None:
        if not on and self._sent:
            self._execute(bytes(self._sent))
        self._sent = bytearray()

    def _execute(self, sent: bytes) -> None:
        code, address = sent[0], int.from_bytes(sent[1:4], "big")
        if self.pulled or (self._busy and code != 0x05):
            return
        if code == 0x06:
            self.latch = not self.protected
        elif code == 0x20 and self.latch and len(sent) == 4:
            start = address // 4096 * 4096
            self.memory[start : start + 4096] = b"\xff" * 4096
            self.erases, self.latch, self._busy = self.erases + 1, False, self.busy_polls
        elif code == 0x02 and self.latch and len(sent) > 4:
            for i, byte in enumerate(sent[4:]):
                self.memory[address // 256 * 256 + (address + i) % 256] &= byte
            self.programs, self.latch, self._busy = self.programs + 1, False, self.busy_polls

    def exchange(self, byte: int) -> int:
        self._sent.append(byte)
        code, count = self._sent[0], len(self._sent)
        if self.pulled:
            return OPEN_LINE
        if code == 0x05 and count > 1:
            status = (self._busy > 0) | self.latch << 1
            self._busy = max(0, self._busy - 1)
            return status
        if code == 0x9F and count > 1:
            return (0xEF, 0x40, self.size_code)[(count - 2) % 3]
        if code == 0x03 and count > 4 and not self._busy:
            address = int.from_bytes(self._sent[1:4], "big") + count - 5
            return self.memory[address % len(self.memory)]
        return OPEN_LINE


def crc7(data: bytes) -> int:
    """Return the CRC of a command with its end bit."""
    crc = 0
    for byte in data:
        for bit in range(7, -1, -1):
            crc = (crc << 1 | byte >> bit & 1) ^ (0x89 if crc & 0x40 else 0)
    for _ in range(7):
        crc = crc << 1 ^ (0x89 if crc & 0x40 else 0)
    return (crc & 0x7F) << 1 | 1


def crc16(data: bytes) -> bytes:
    """Return the CRC of a block, big endian."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x1021 if crc & 0x8000 else 0)) & 0xFFFF
    return crc.to_bytes(2, "big")


@dataclass
class SdCard:
    """A card in SPI mode.

    `high_capacity`: addressed by blocks. `flips`: a bit of the next so many blocks read is turned on the way.
    `refuses_writes`: the status register shows an error after a write.
    """

    blocks: int = 4096
    high_capacity: bool = True
    wakes_after: int = 3
    pulled: bool = False
    flips: int = 0
    refuses_writes: bool = False
    memory: bytearray = field(init=False)
    written: int = 0
    bad_commands: int = 0
    _selected: bool = False
    _idle: bool = True
    _app: bool = False
    _sent: bytearray = field(default_factory=bytearray)
    _answer: Iterator[int] = field(default_factory=lambda: iter(()))
    _block: int | None = None
    _data: bytearray | None = None
    _clocks: int = 0

    def __post_init__(self) -> None:
        self.memory = bytearray(512 * self.blocks)

    def select(self, on: bool) -> None:
        self._selected = on
        self._sent = bytearray()

    def exchange(self, byte: int) -> int:
        if self.pulled:
            return OPEN_LINE
        if not self._selected:
            self._clocks += 8
            return OPEN_LINE
        out = next(self._answer, OPEN_LINE)
        if self._data is not None:
            self._receive(byte)
        elif self._sent or byte & 0xC0 == 0x40:
            self._sent.append(byte)
            if len(self._sent) == 6:
                command, self._sent = bytes(self._sent), bytearray()
                self._answer = iter(self._command(command))
        return out

    def _command(self, sent: bytes) -> list[int]:
        number, argument = sent[0] & 0x3F, int.from_bytes(sent[1:5], "big")
        if sent[5] != crc7(sent[:5]) or self._clocks < 74:
            self.bad_commands += 1
            return [OPEN_LINE, 0x09]
        app, self._app = self._app, number == 55
        commands: dict[int, Callable[[int], list[int]]] = {
            0: self._reset,
            8: lambda a: [1, 0, 0, a >> 8 & 15, a & 0xFF],
            9: self._csd,
            13: self._status,
            17: self._read,
            24: self._write,
            55: lambda _: [int(self._idle)],
            59: lambda _: [int(self._idle)],
            58: lambda _: [int(self._idle), 0xC0 if self.high_capacity else 0x80, 0xFF, 0x80, 0],
        }
        if app and number == 41:
            self.wakes_after -= 1
            self._idle = self.wakes_after > 0
            return [OPEN_LINE, int(self._idle)]
        return [OPEN_LINE, *commands[number](argument)] if number in commands else [OPEN_LINE, 0x04]

    def _reset(self, _argument: int) -> list[int]:
        self._idle = True
        return [1]

    def _csd(self, _argument: int) -> list[int]:
        if self.high_capacity:
            size = self.blocks // 1024 - 1
            csd = bytes([0x40, *[0] * 6, size >> 16, size >> 8 & 255, size & 255, *[0] * 6])
        else:  # version 1: 512-byte blocks, factor 4
            size = self.blocks // 4 - 1
            csd = bytes([0, 0, 0, 0, 0, 9, size >> 10 & 3, size >> 2 & 255, (size & 3) << 6, 0, 0, *[0] * 5])
        return [0, OPEN_LINE, 0xFE, *csd, *crc16(csd)]

    def _status(self, _argument: int) -> list[int]:
        return [0, 4 if self.refuses_writes else 0]

    def _place(self, argument: int) -> int:
        return argument if self.high_capacity else argument // 512

    def _read(self, argument: int) -> list[int]:
        at = 512 * self._place(argument)
        if self._idle or at + 512 > len(self.memory):
            return [0x40]
        block = bytearray(self.memory[at : at + 512])
        check = crc16(bytes(block))
        if self.flips:
            self.flips -= 1
            block[7] ^= 16
        return [0, OPEN_LINE, OPEN_LINE, 0xFE, *block, *check]

    def _write(self, argument: int) -> list[int]:
        self._block, self._data = self._place(argument), bytearray()
        return [0]

    def _receive(self, byte: int) -> None:
        data = self._data
        if data is None or self._block is None:
            return
        if not data and byte != 0xFE:
            return
        data.append(byte)
        if len(data) < 1 + 512 + 2:
            return
        block, check = bytes(data[1:513]), bytes(data[513:])
        good = check == crc16(block)
        if good:
            self.memory[512 * self._block : 512 * self._block + 512] = block
            self.written += 1
        self._data = None
        self._answer = iter([0xE5 if good else 0xEB, 0, 0, 0])
