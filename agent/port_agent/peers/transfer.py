"""The receiving side of files that move from one device to another in parts, each in a question or an answer.

The length of a file on disk shows how much of it has arrived. So after an interruption of either side, a transfer
continues where it was. A repeated part counts once, and one that would leave a gap is ignored. A file is whole if its
hash is the announced one. The protocol determines which side asks for the next part (`peers.moving`,
`peers.federation`), and its announcement is kept as the journal.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CHUNK_BYTES = 768 << 10
"""Bytes of a file in one question or answer, below the limits of both."""


@dataclass(frozen=True, slots=True)
class IncomingFile:
    """An arriving file: its destination, length and hash (None if the other device gives none)."""

    path: Path
    nbytes: int
    sha256: str | None = None

    @property
    def received(self) -> int:
        """Bytes received."""
        return file_bytes(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes were received."""
        return self.received >= self.nbytes

    def take(self, offset: int, data: bytes) -> None:
        """Add the part that begins at `offset`, if it is the next one.

        Raises OSError, after which the file contains nothing of the part.
        """
        if offset == self.received:
            _append(self.path, data[: max(0, self.nbytes - offset)])

    def verify(self) -> bool:
        """Return whether a whole file is the announced one, and remove it if not; raises OSError."""
        if not self.nbytes or self.sha256 is None or sha256_of(self.path) == self.sha256:
            return True
        self.path.unlink()
        return False


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """Files that arrive one after another."""

    files: Sequence[IncomingFile]

    @property
    def position(self) -> tuple[int, int]:
        """The number of the file of the next part, and the part's offset; a number beyond the last
        means that all are complete.
        """
        for number, file in enumerate(self.files):
            if not file.is_whole:
                return number, file.received
        return len(self.files), 0

    def prepare(self) -> None:
        """Create directories and empty files; remove files that are longer than announced. Raises OSError."""
        for file in self.files:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            if file.received > file.nbytes:
                file.path.unlink()
            file.path.touch()

    def verify(self) -> IncomingFile | None:
        """Return the first file that differs from the announcement and must be sent again; None if all
        are correct. Raises OSError.
        """
        return next((file for file in self.files if not file.verify()), None)


def file_hash(file: Path) -> str:
    """Return the hash of a file, which is read again only if its size or time has changed. Raises OSError."""
    status = file.stat()
    return _kept_hash(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _kept_hash(file: Path, nbytes: int, modified_ns: int) -> str:
    return sha256_of(file)


def sha256_of(file: Path) -> str:
    """Return the hash of a file; raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_bytes(file: Path) -> int:
    """Return the number of bytes of a file that exist."""
    return file.stat().st_size if file.exists() else 0


def read_chunk(file: Path, offset: int) -> bytes:
    """Return the part of a file that begins at `offset`; raises OSError."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(CHUNK_BYTES)


def _append(file: Path, data: bytes) -> None:
    before, rest = file_bytes(file), memoryview(data)
    with file.open("ab", buffering=0) as stream:
        try:
            while rest:
                rest = rest[stream.write(rest) or 0 :]
        except OSError:
            stream.truncate(before)
            raise
