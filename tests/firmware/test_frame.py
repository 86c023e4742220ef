"""The C receiver and sender against the golden frames and against the Python end, byte for byte."""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import FramingError
from port_agent.mcu.protocol.framing import decode_frame, encode_frame
from port_planner.base.errors import PortError

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "firmware" / "protocol"
FRAMES = sorted((ROOT / "tests" / "golden" / "mcu").glob("*.hex"))
CAPACITY = 300
PENDING, READY, BAD_COBS, BAD_CRC, OVERLONG = range(5)


class Receiver(ctypes.Structure):
    """struct frame_receiver."""

    _fields_ = (
        ("buffer", ctypes.POINTER(ctypes.c_uint8)),
        ("capacity", ctypes.c_uint32),
        ("used", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("crc", ctypes.c_uint32),
        ("remaining", ctypes.c_uint8),
        ("block", ctypes.c_uint8),
        ("overlong", ctypes.c_uint8),
    )


class Part(ctypes.Structure):
    """struct frame_part."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_uint32))


PUT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint8)


class Frames:
    """The compiled protocol, with a receiver of CAPACITY bytes between two guard zones."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.frame_send.restype = ctypes.c_uint32
        self._memory = (ctypes.c_uint8 * (CAPACITY + 32))(*([0xEE] * (CAPACITY + 32)))
        self._receiver = Receiver()
        start = ctypes.cast(ctypes.byref(self._memory, 16), ctypes.POINTER(ctypes.c_uint8))
        self._library.frame_receiver_init(ctypes.byref(self._receiver), start, CAPACITY)

    def feed(self, wire: bytes) -> Iterator[tuple[int, bytes]]:
        for byte in wire:
            event = self._library.frame_receive(ctypes.byref(self._receiver), ctypes.c_uint8(byte))
            if event != PENDING:
                yield event, bytes(self._memory[16 : 16 + self._receiver.size]) if event == READY else b""
        assert bytes(self._memory[:16]) + bytes(self._memory[-16:]) == b"\xee" * 32

    def send(self, *parts: bytes) -> bytes:
        sent = bytearray()
        array = (Part * len(parts))(*(Part(part, len(part)) for part in parts))
        self._library.frame_send(array, len(parts), PUT(lambda context, byte: sent.append(byte)), None)
        return bytes(sent)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("protocol") / "protocol.so"
    sources = [str(PROTOCOL / name) for name in ("frame.c", "crc32.c")]
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-shared", "-fPIC", "-O1"]
    subprocess.run([compiler, *flags, *sources, "-o", str(out)], check=True)
    return out


@pytest.fixture
def frames(library: Path) -> Frames:
    return Frames(library)


def golden(path: Path) -> bytes:
    return bytes.fromhex(path.read_text().split("#")[0])


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_golden_frames(path: Path, frames: Frames) -> None:
    wire = golden(path)
    content = decode_frame(wire[:-1])
    assert list(frames.feed(wire)) == [(READY, content)]
    assert list(frames.feed(b"\0\0" + wire + wire)) == [(READY, content)] * 2
    assert frames.send(content) == wire
    assert frames.send(content[:8], content[8:]) == wire
    for cut in range(1, len(wire) - 1):
        ((event, _),) = frames.feed(wire[:cut] + b"\0")
        assert event in (BAD_COBS, BAD_CRC)
        assert list(frames.feed(wire)) == [(READY, content)]


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_one_flipped_bit_never_passes(path: Path, frames: Frames) -> None:
    wire = golden(path)
    content = decode_frame(wire[:-1])
    for index in range(len(wire)):
        for bit in range(8):
            flipped = bytearray(wire)
            flipped[index] ^= 1 << bit
            assert (READY, content) not in list(frames.feed(bytes(flipped) + b"\0"))


def test_sizes_around_the_block_and_the_buffer(frames: Frames) -> None:
    for size in [0, 1, 2, 249, 250, 251, 252, 253, 254, 255, 256, CAPACITY - 5, CAPACITY - 4]:
        for content in (bytes(size), b"\x01" * size, bytes(i & 0xFF for i in range(size))):
            wire = encode_frame(content)
            assert frames.send(content) == wire
            assert list(frames.feed(wire)) == [(READY, content)]
    for size in [CAPACITY - 3, CAPACITY, 1000]:
        assert list(frames.feed(encode_frame(b"\x05" * size))) == [(OVERLONG, b"")]
    assert list(frames.feed(encode_frame(b"next"))) == [(READY, b"next")]


def test_both_ends_judge_junk_alike(frames: Frames) -> None:
    rng = random.Random(3)
    for _ in range(3000):
        wire = bytearray(encode_frame(rng.randbytes(rng.choice([0, 3, 10, 260])))[:-1])
        for _ in range(rng.randrange(3)):
            match rng.randrange(3):
                case 0:
                    wire[rng.randrange(len(wire))] = rng.randrange(1, 256)
                case 1:
                    del wire[rng.randrange(len(wire))]
                case _:
                    wire.insert(rng.randrange(len(wire) + 1), rng.randrange(1, 256))
            if not wire:
                wire = bytearray(b"\x01")
        try:
            expected = [(READY, decode_frame(bytes(wire)))]
        except FramingError as error:
            assert isinstance(error, PortError)
            expected = []
        assert [event for event in frames.feed(bytes(wire) + b"\0") if event[0] == READY] == expected
