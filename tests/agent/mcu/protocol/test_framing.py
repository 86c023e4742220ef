"""COBS, CRC and the decoder: golden bytes fed whole, byte by byte, glued, truncated and with one flipped bit."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from port_agent.mcu.board.board_errors import FramingError
from port_agent.mcu.protocol.framing import (
    CONTENT_MAX,
    ENCODED_MAX,
    FrameDecoder,
    cobs_decode,
    cobs_encode,
    decode_frame,
    encode_frame,
)

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "mcu"
FRAMES = sorted(GOLDEN.glob("*.hex"))


def golden(path: Path) -> bytes:
    return bytes.fromhex(path.read_text().split("#")[0])


@pytest.mark.parametrize(
    ("plain", "encoded"),
    [
        (b"", b"\x01"),
        (b"\0", b"\x01\x01"),
        (b"\0\0", b"\x01\x01\x01"),
        (b"\x11\x22\0\x33", b"\x03\x11\x22\x02\x33"),
        (b"\x11\0\0\0", b"\x02\x11\x01\x01\x01"),
        (bytes(range(1, 255)), b"\xff" + bytes(range(1, 255))),
        (bytes(range(256)), b"\x01\xff" + bytes(range(1, 255)) + b"\x02\xff"),
        (bytes(range(1, 256)), b"\xff" + bytes(range(1, 255)) + b"\x02\xff"),
        (bytes(range(2, 256)) + b"\0", b"\xff" + bytes(range(2, 256)) + b"\x01\x01"),
    ],
)
def test_cobs_examples_of_the_paper(plain: bytes, encoded: bytes) -> None:
    assert cobs_encode(plain) == encoded
    assert cobs_decode(encoded) == plain


@given(st.binary(max_size=2000) | st.integers(0, 1100).map(lambda n: b"\x07" * n))
def test_cobs_round_trip_without_zeros(data: bytes) -> None:
    encoded = cobs_encode(data)
    assert 0 not in encoded
    assert len(encoded) <= len(data) + len(data) // 254 + 1
    assert cobs_decode(encoded) == data


@pytest.mark.parametrize("broken", [b"\x05\x01", b"\x00", b"\x02\x01\x00", b"\x03\x01\x01\x09"])
def test_broken_cobs_is_refused(broken: bytes) -> None:
    with pytest.raises(FramingError):
        cobs_decode(broken)


def test_frame_limits() -> None:
    largest = bytes(CONTENT_MAX)
    assert decode_frame(encode_frame(largest)[:-1]) == largest
    assert len(encode_frame(b"\x01" * CONTENT_MAX)) - 1 <= ENCODED_MAX
    with pytest.raises(FramingError, match=str(CONTENT_MAX)):
        encode_frame(bytes(CONTENT_MAX + 1))


def test_there_is_a_golden_frame_for_every_message() -> None:
    assert len(FRAMES) >= 30


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_golden_frame_in_any_chunks(path: Path) -> None:
    wire = golden(path)
    (content,) = FrameDecoder().feed(wire)
    assert encode_frame(content) == wire
    decoder = FrameDecoder()
    assert [frame for byte in wire for frame in decoder.feed(bytes([byte]))] == [content]
    assert list(FrameDecoder().feed(wire * 3)) == [content] * 3
    assert list(FrameDecoder().feed(b"\0\0" + wire + b"\0" + wire)) == [content] * 2


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_truncated_golden_frame_costs_one_frame_at_most(path: Path) -> None:
    wire = golden(path)
    (content,) = FrameDecoder().feed(wire)
    for cut in range(len(wire) - 1):  # at the last byte only the delimiter is missing: whole
        decoder = FrameDecoder()
        assert list(decoder.feed(wire[:cut] + b"\0")) == []
        assert list(decoder.feed(wire)) == [content]
        decoder = FrameDecoder()
        # the delimiter lost as well: the next frame goes down with it, the one after does not
        assert list(decoder.feed(wire[:cut] + wire + wire))[-1] == content


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_one_flipped_bit_never_passes(path: Path) -> None:
    wire = golden(path)
    (content,) = FrameDecoder().feed(wire)
    for index in range(len(wire)):
        for bit in range(8):
            flipped = bytearray(wire)
            flipped[index] ^= 1 << bit
            decoder = FrameDecoder()
            assert content not in decoder.feed(bytes(flipped))
            assert list(decoder.feed(b"\0" + wire)) == [content]


@pytest.mark.slow
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.data())
def test_decoder_does_not_care_how_bytes_are_cut(contents: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(map(encode_frame, contents))
    decoder = FrameDecoder()
    found: list[bytes] = []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        found += decoder.feed(wire[:size])
        wire = wire[size:]
    assert found == contents
    assert decoder.counters.frames == len(contents)


@given(st.binary(max_size=3000))
def test_junk_never_hurts_the_decoder(junk: bytes) -> None:
    decoder = FrameDecoder()
    list(decoder.feed(junk))
    assert list(decoder.feed(b"\0" + encode_frame(b"still here"))) == [b"still here"]


def test_endless_frame_does_not_fill_the_memory() -> None:
    decoder = FrameDecoder()
    for _ in range(20):
        assert list(decoder.feed(b"\x55" * 4096)) == []
    assert decoder.counters.overlong == 1
    assert list(decoder.feed(b"\0" + encode_frame(b"next"))) == [b"next"]
