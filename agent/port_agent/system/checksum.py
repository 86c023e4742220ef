"""CRC-32 of data on disk, in hexadecimal. It detects every flipped bit and every burst of up to 32 bits."""

import json
import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class RunningChecksum:
    """The checksum of content that arrives in parts."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Add the next part."""
        self._crc = zlib.crc32(chunk, self._crc)

    def text(self) -> str:
        """Return the checksum of all parts so far, as eight digits."""
        return f"{self._crc:08x}"


def bytes_checksum(content: bytes) -> str:
    """Return the checksum of bytes."""
    return f"{zlib.crc32(content):08x}"


def values_checksum(content: object) -> str:
    """Return the checksum of plain values; the order of their keys does not matter."""
    return bytes_checksum(json.dumps(content, sort_keys=True).encode())


def file_checksum(path: Path) -> str:
    """Return the checksum of a file, read at the medium's speed; raises OSError."""
    running = RunningChecksum()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            running.update(chunk)
    return running.text()
