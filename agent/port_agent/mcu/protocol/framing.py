"""Frames on the wire: COBS of (content, CRC-32 little-endian), then one zero byte.

This module neither interprets contents nor performs input or output.

The other end is firmware/protocol/frame.c; byte layouts are in firmware/PROTOCOL.md.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from port_agent.mcu.board.board_errors import FramingError

CRC_BYTES = 4
CONTENT_MAX = 8192
"""Largest frame content that a host accepts.

Devices state their own limit in HELLO (512 to 4096). Twice the largest allows for newer devices, and keeps a faulty
port from filling the memory.
"""
ENCODED_MAX = CONTENT_MAX + CRC_BYTES + (CONTENT_MAX + CRC_BYTES) // 254 + 1
"""Largest encoded frame: COBS adds one byte, and one more per 254 bytes."""
DELIMITER = b"\0"
ATTENTION = bytes(16)
"""Bytes that stop a running TRAIN or EVAL.

The device looks for eight zeros in a row; sixteen survive the loss of a few.
"""

_BLOCK = 254


def cobs_encode(data: bytes) -> bytes:
    """Return `data` without zero bytes, encoded by consistent overhead byte stuffing (without delimiter)."""
    encoded = bytearray()
    start = 0
    while True:
        zero = data.find(0, start, start + _BLOCK)
        end = zero if zero >= 0 else min(start + _BLOCK, len(data))
        encoded.append(end - start + 1)
        encoded += data[start:end]
        if end == len(data):
            return bytes(encoded)
        start = end if zero < 0 else end + 1


def cobs_decode(encoded: bytes) -> bytes:
    """Return the data of one COBS string; raise FramingError for an invalid one."""
    data = bytearray()
    at = 0
    while at < len(encoded):
        code = encoded[at]
        end = at + code
        if code == 0 or end > len(encoded):
            raise FramingError(f"COBS block of {code} bytes at {at} in a string of {len(encoded)}")
        data += encoded[at + 1 : end]
        if code != _BLOCK + 1 and end < len(encoded):
            data.append(0)
        at = end
    return bytes(data)


def encode_frame(content: bytes) -> bytes:
    """Return the bytes to send for one frame, delimiter included.

    Raises FramingError for a payload that is too long.
    """
    if len(content) > CONTENT_MAX:
        raise FramingError(f"frame content of {len(content)} bytes, but the limit is {CONTENT_MAX}; send smaller parts")
    return cobs_encode(content + zlib.crc32(content).to_bytes(CRC_BYTES, "little")) + DELIMITER


def decode_frame(encoded: bytes) -> bytes:
    """Return the content of one frame given without its delimiter; raises FramingError if it is damaged."""
    data = cobs_decode(encoded)
    if len(data) < CRC_BYTES:
        raise FramingError(f"frame of {len(data)} bytes, shorter than its CRC")
    content, trailer = data[:-CRC_BYTES], data[-CRC_BYTES:]
    found, expected = zlib.crc32(content), int.from_bytes(trailer, "little")
    if found != expected:
        raise FramingError(f"CRC {found:08x}, the frame says {expected:08x} ({len(content)} bytes)")
    return content


@dataclass(slots=True)
class FrameCounters:
    """What a decoder has received so far."""

    frames: int = 0
    damaged: int = 0
    overlong: int = 0


class FrameDecoder:
    """Turns received bytes, however they are divided, into frame contents; damaged frames are counted and skipped."""

    def __init__(self) -> None:
        self.counters = FrameCounters()
        self._pending = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of every good frame that `data` completes."""
        for index, chunk in enumerate(data.split(DELIMITER)):
            if index > 0 and (content := self._end()) is not None:
                yield content
            self._append(chunk)

    def clear(self) -> None:
        """Discard an unfinished frame, as after a reconnect."""
        self._pending.clear()
        self._skipping = False

    def _append(self, chunk: bytes) -> None:
        if self._skipping:
            return
        self._pending += chunk
        if len(self._pending) > ENCODED_MAX:
            self._skipping = True
            self._pending.clear()
            self.counters.overlong += 1

    def _end(self) -> bytes | None:
        encoded = bytes(self._pending)
        skipped = self._skipping
        self.clear()
        if skipped or not encoded:
            return None
        try:
            content = decode_frame(encoded)
        except FramingError:
            self.counters.damaged += 1
            return None
        self.counters.frames += 1
        return content
