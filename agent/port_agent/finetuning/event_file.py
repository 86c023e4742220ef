"""Losses in TensorBoard's format: a file of records, each with a length, a message and their
checksums. Does not import torch.

Messages are `Event` of tensorflow/core/util/event.proto, encoded as protocol buffers: a time, a step, and a named
number.
"""

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

_VERSION = b"brain.Event:2"
_DOUBLE, _BYTES, _FLOAT = 1, 2, 5
"""Wire types of a field, the last three bits of its key; 0 is a whole number."""

_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8
"""The polynomial of CRC-32C with its bits reversed, and the constant that TFRecord adds."""


class EventFile:
    """A file for one run in a directory that TensorBoard reads; each record is complete once it is added."""

    def __init__(self, folder: Path) -> None:
        """Raise OSError if no file can be created there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}.port-agent"
        self._add(_field(3, _VERSION))

    def add(self, name: str, value: float, step: int) -> None:
        """Add a number after `step` updates. Raises OSError."""
        number = _field(1, name.encode()) + _key(2, _FLOAT) + struct.pack("<f", value)
        self._add(_key(2, 0) + _whole(step) + _field(5, _field(1, number)))

    def _add(self, message: bytes) -> None:
        event = _key(1, _DOUBLE) + struct.pack("<d", time.time()) + message
        length = struct.pack("<Q", len(event))
        with self._path.open("ab") as stream:
            stream.write(length + _sum(length) + event + _sum(event))


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _whole(len(content)) + content


def _key(number: int, kind: int) -> bytes:
    return bytes((number << 3 | kind,))


def _whole(value: int) -> bytes:
    """Return a whole number as a varint: seven bits at a time, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _sum(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _SUMS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _byte_sums() -> Sequence[int]:
    sums = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ _POLYNOMIAL * (value & 1)
        sums.append(value)
    return sums


_SUMS = _byte_sums()
"""CRC-32C of each byte."""
