"""Frames on a stream: four bytes of length, big-endian, and that many bytes."""

import struct
from collections.abc import Iterator

from port_planner.base.errors import PortError

FRAME_LIMIT_BYTES = 16 << 10
"""Largest frame in bytes.

The longest message, a certificate in a pairing, has 2.2 kB; the rest is reserved for later versions.
"""
_LENGTH = struct.Struct(">I")


class FrameError(PortError):
    """A frame is empty, or longer than any of ours."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(f"a frame has {nbytes} bytes; valid frames have 1 to {FRAME_LIMIT_BYTES}")


def framed(content: bytes) -> bytes:
    """Return a frame; raises FrameError for content that does not fit into one."""
    if not 0 < len(content) <= FRAME_LIMIT_BYTES:
        raise FrameError(len(content))
    return _LENGTH.pack(len(content)) + content


class FrameReader:
    """Extracts frames from a stream that arrives in arbitrary parts; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that `data` completes; raises FrameError, after which the stream must not be used."""
        self._held += data
        at = 0
        while len(self._held) - at >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._held, at)
            if not 0 < nbytes <= FRAME_LIMIT_BYTES:
                self._held.clear()
                raise FrameError(nbytes)
            end = at + _LENGTH.size + nbytes
            if len(self._held) < end:
                break
            yield bytes(self._held[at + _LENGTH.size : end])
            at = end
        del self._held[:at]

    @property
    def held_bytes(self) -> int:
        """Number of bytes that wait for the rest of their frame."""
        return len(self._held)
