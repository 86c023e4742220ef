"""Frames over a blocking socket, each with a time limit."""

import socket
import struct
import time

from port_agent.peers.connection.framing import FRAME_LIMIT_BYTES, FrameError, framed
from port_agent.peers.pairing.exchange import PairingError

_LENGTH = struct.Struct(">I")


class PairingStream:
    """One connection of a pairing, which ends at `end_s` of the monotonic clock."""

    def __init__(self, sock: socket.socket, end_s: float) -> None:
        self._socket, self._end_s = sock, end_s

    def send(self, content: bytes) -> None:
        """Send a frame; raises PairingError."""
        try:
            self._socket.settimeout(self._left_s())
            self._socket.sendall(framed(content))
        except OSError as error:
            raise PairingError(f"the connection broke: {error.strerror or error}") from error

    def receive(self) -> bytes:
        """Return the next frame; raises PairingError."""
        (nbytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 < nbytes <= FRAME_LIMIT_BYTES:
            raise PairingError(str(FrameError(nbytes)))
        return self._exactly(nbytes)

    def _exactly(self, nbytes: int) -> bytes:
        held = bytearray()
        while len(held) < nbytes:
            try:
                self._socket.settimeout(self._left_s())
                chunk = self._socket.recv(nbytes - len(held))
            except OSError as error:
                raise PairingError(f"the connection broke: {error.strerror or error}") from error
            if not chunk:
                raise PairingError("the other side closed the connection")
            held += chunk
        return bytes(held)

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise PairingError("the other side took too long")
        return left_s
