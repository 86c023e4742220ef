"""The media drivers of the firmware as a library of this machine, over a bus that a chip in Python answers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from port_planner.mcu.host import firmware_root
from tests.firmware.media.chips import Chip

OPENERS = {"nor": "nor_open", "sd": "sd_open"}
STATE_WORDS = 32
"""Larger than the state of any driver."""

_START = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
_BUSY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_SELECT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
_CLOCK = ctypes.CFUNCTYPE(ctypes.c_uint64)
_MOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Transfer(IntEnum):
    """`port_transfer`."""

    DONE = 0
    BUSY = 1
    FAILED = 2


class _Spi(ctypes.Structure):
    _fields_ = (
        ("start", _START),
        ("busy", _BUSY),
        ("select", _SELECT),
        ("microseconds", _CLOCK),
        ("context", ctypes.c_void_p),
    )


class Medium(ctypes.Structure):
    """`port_medium`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("mapped", ctypes.c_void_p),
        ("write", _MOVE),
        ("read", _MOVE),
        ("poll", _POLL),
        ("context", ctypes.c_void_p),
    )


def build(folder: Path) -> ctypes.CDLL:
    """Compile the drivers."""
    root, library = firmware_root(), folder / "media.so"
    sources = [str(path) for path in sorted((root / "media").glob("*.c"))]
    flags = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{root / 'include'}"]
    subprocess.run(["cc", *flags, *sources, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Bus:
    """A driver bound to a chip.

    `late`: polls until the DMA of an exchange is done. Every look at the clock takes `tick_us`.
    """

    def __init__(self, library: ctypes.CDLL, chip: Chip, late: int = 0, tick_us: int = 10) -> None:
        self.chip, self.late, self._left, self._now, self.tick_us = chip, late, 0, 0, tick_us
        self._library = library
        self._spi = _Spi(_START(self._start), _BUSY(self._busy), _SELECT(self._select), _CLOCK(self._clock), None)
        self._state = (ctypes.c_uint64 * STATE_WORDS)()
        self.medium = Medium()
        self.exchanged = 0

    def open(self, name: str) -> int:
        """Look for the chip; 0 where it answers."""
        opened: Callable[..., int] = getattr(self._library, OPENERS[name])
        return opened(ctypes.byref(self._state), ctypes.byref(self._spi), ctypes.byref(self.medium))

    def _start(self, _context: int | None, out: int | None, into: int | None, count: int) -> None:
        sent = ctypes.string_at(out, count) if out else b"\xff" * count
        got = bytes(self.chip.exchange(byte) for byte in sent)
        self.exchanged += count
        if into:
            ctypes.memmove(into, got, count)
        self._left = self.late

    def _busy(self, _context: int | None) -> int:
        self._left -= 1
        return int(self._left >= 0)

    def _select(self, _context: int | None, on: int) -> None:
        self.chip.select(bool(on))

    def _clock(self) -> int:
        self._now += self.tick_us
        return self._now

    def write(
        self, offset: int, data: bytes, between: Callable[[int], None] = lambda poll: None
    ) -> tuple[Transfer, int]:
        """Write, calling `between(poll)` before each poll; return the outcome and the polls."""
        buffer = ctypes.create_string_buffer(data, len(data))
        return self._finish(self.medium.write(self.medium.context, offset, buffer, len(data)), between)

    def read(
        self, offset: int, count: int, between: Callable[[int], None] = lambda poll: None
    ) -> tuple[Transfer, bytes, int]:
        """Read, calling `between(poll)` before each poll; return the outcome, what was read and the polls."""
        buffer = ctypes.create_string_buffer(count)
        outcome, polls = self._finish(self.medium.read(self.medium.context, offset, buffer, count), between)
        return outcome, buffer.raw, polls

    def _finish(self, outcome: int, between: Callable[[int], None]) -> tuple[Transfer, int]:
        polls = 0
        while outcome == Transfer.BUSY:
            between(polls)
            outcome = self.medium.poll(self.medium.context)
            polls += 1
        return Transfer(outcome), polls
