"""Mapped memory as a page medium: at once, or as slow as it is told to be, beside other work."""

from __future__ import annotations

import ctypes

import pytest

from tests.firmware.media.harness import Medium, Transfer, build

pytestmark = pytest.mark.process

_CLOCK, _THERE = ctypes.CFUNCTYPE(ctypes.c_uint64), ctypes.CFUNCTYPE(ctypes.c_int)


class Psram(ctypes.Structure):
    """`psram`."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("bytes_per_s", ctypes.c_uint32),
        ("ticks_hz", ctypes.c_uint32),
        ("ticks", _CLOCK),
        ("is_there", _THERE),
        ("rest", ctypes.c_uint64 * 4),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("media"))


class Board:
    """Memory, a clock that the test turns, and whether the part is there."""

    def __init__(self, library: ctypes.CDLL, bytes_per_s: int) -> None:
        self.memory, self.now, self.there = ctypes.create_string_buffer(4096), 0, True
        self.part = Psram(
            ctypes.addressof(self.memory), bytes_per_s, 1000, _CLOCK(lambda: self.now), _THERE(lambda: int(self.there))
        )
        library.psram_medium.restype = Medium
        self.medium: Medium = library.psram_medium(ctypes.byref(self.part), ctypes.c_uint32(4096))

    def poll(self) -> Transfer:
        return Transfer(self.medium.poll(self.medium.context))


def test_memory_without_a_speed_is_done_at_once(library: ctypes.CDLL) -> None:
    board, data = Board(library, 0), ctypes.create_string_buffer(b"abcdefgh", 8)
    assert board.medium.write(board.medium.context, 100, data, 8) == Transfer.DONE
    assert board.memory.raw[100:108] == b"abcdefgh"
    back = ctypes.create_string_buffer(8)
    assert board.medium.read(board.medium.context, 100, back, 8) == Transfer.DONE and back.raw == b"abcdefgh"


def test_slow_memory_takes_its_time_beside_other_work(library: ctypes.CDLL) -> None:
    board, data = Board(library, 1000), ctypes.create_string_buffer(b"x" * 64, 64)
    assert board.medium.write(board.medium.context, 0, data, 64) == Transfer.BUSY
    board.now = 32
    assert board.poll() is Transfer.BUSY and board.memory.raw[:64] == b"x" * 32 + b"\0" * 32
    board.now = 64
    assert board.poll() is Transfer.DONE and board.memory.raw[:64] == b"x" * 64


def test_memory_that_is_pulled_in_the_middle_fails(library: ctypes.CDLL) -> None:
    board, data = Board(library, 1000), ctypes.create_string_buffer(64)
    assert board.medium.write(board.medium.context, 0, data, 64) == Transfer.BUSY
    board.there = False
    assert board.poll() is Transfer.FAILED
    assert board.medium.read(board.medium.context, 0, data, 64) == Transfer.FAILED
