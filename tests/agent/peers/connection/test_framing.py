"""Frames: whole, byte by byte, glued, cut off, and lengths that are none."""

import struct

import pytest

from port_agent.peers.connection.framing import FRAME_LIMIT_BYTES, FrameError, FrameReader, framed

CONTENTS = [b"a", b"bc" * 100, bytes(FRAME_LIMIT_BYTES)]
STREAM = b"".join(framed(content) for content in CONTENTS)


def test_golden() -> None:
    assert framed(b"abc") == b"\x00\x00\x00\x03abc"


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 1000, len(STREAM)])
def test_whatever_the_chunks_the_frames_are_the_same(chunk: int) -> None:
    reader = FrameReader()
    found = [frame for at in range(0, len(STREAM), chunk) for frame in reader.feed(STREAM[at : at + chunk])]
    assert found == CONTENTS and reader.held_bytes == 0


def test_a_frame_that_is_cut_waits_and_is_no_frame() -> None:
    for end in range(len(framed(CONTENTS[1]))):
        reader = FrameReader()
        assert list(reader.feed(framed(CONTENTS[1])[:end])) == [] and reader.held_bytes == end


@pytest.mark.parametrize("nbytes", [0, FRAME_LIMIT_BYTES + 1, 2**32 - 1])
def test_a_length_that_no_frame_has_ends_the_stream_and_holds_nothing(nbytes: int) -> None:
    reader = FrameReader()
    frames = reader.feed(framed(b"first") + struct.pack(">I", nbytes) + bytes(100))
    assert next(frames) == b"first"
    with pytest.raises(FrameError) as caught:
        next(frames)
    assert caught.value.nbytes == nbytes and reader.held_bytes == 0


@pytest.mark.parametrize("nbytes", [0, FRAME_LIMIT_BYTES + 1])
def test_what_no_frame_holds_is_not_sent(nbytes: int) -> None:
    with pytest.raises(FrameError):
        framed(bytes(nbytes))
