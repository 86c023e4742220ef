"""Frames over a socket that may say too little, too much or nothing."""

import socket
import struct
import time
from collections.abc import Iterator

import pytest

from port_agent.peers.connection.framing import framed
from port_agent.peers.pairing.exchange import PairingError
from port_agent.peers.pairing.stream import PairingStream

Pair = tuple[socket.socket, PairingStream]


@pytest.fixture
def ends() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, PairingStream(right, time.monotonic() + 60.0)


def test_frames_come_whole(ends: Pair) -> None:
    raw, stream = ends
    raw.sendall(framed(b"one") + framed(b"two" * 1000))
    assert (stream.receive(), stream.receive()) == (b"one", b"two" * 1000)
    stream.send(b"three")
    assert raw.recv(100) == framed(b"three")


@pytest.mark.parametrize("nbytes", [0, 1 << 20, 2**32 - 1])
def test_lengths_that_no_frame_has(ends: Pair, nbytes: int) -> None:
    raw, stream = ends
    raw.sendall(struct.pack(">I", nbytes))
    with pytest.raises(PairingError, match="a frame has"):
        stream.receive()


def test_an_end_in_the_middle(ends: Pair) -> None:
    raw, stream = ends
    raw.sendall(framed(b"whole")[:-1])
    raw.close()
    with pytest.raises(PairingError, match="closed"):
        stream.receive()


def test_silence_has_an_end() -> None:
    left, right = socket.socketpair()
    with left, right:
        with pytest.raises(PairingError, match="broke: timed out"):
            PairingStream(right, time.monotonic() + 0.05).receive()
        with pytest.raises(PairingError, match="took too long"):
            PairingStream(right, time.monotonic() - 1.0).send(b"x")
