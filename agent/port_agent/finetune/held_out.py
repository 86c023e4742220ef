"""Losses of held-out texts, kept one by one: an evaluation that is cut goes on where it was, and its mean has the same bits."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from port_agent.system.atomic_file import write_atomically

_SUM_BYTES = 4
"""Of the checksum in front."""


class _Kept(msgspec.Struct, frozen=True):
    """`made_of`: settings, data and round; `updates`: how many the weights had that the losses are of."""

    made_of: str
    updates: int
    losses: list[float]


class HeldOutLosses:
    """The file in which they are, beside the checkpoint. It saves time alone: a damaged one, or of another training, is none."""

    def __init__(self, path: Path, made_of: str) -> None:
        self._path, self._made_of = path, made_of

    def read(self, updates: int) -> list[float]:
        """Return the losses of the first texts after so many updates; empty where none are kept, or can be read."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return []
        if _sum_of(content[_SUM_BYTES:]) != content[:_SUM_BYTES]:
            return []
        found = msgspec.msgpack.decode(content[_SUM_BYTES:], type=_Kept)
        return found.losses if (found.made_of, found.updates) == (self._made_of, updates) else []

    def write(self, updates: int, losses: Sequence[float]) -> None:
        """Keep them in the place of those before. Raises OSError."""
        content = msgspec.msgpack.encode(_Kept(self._made_of, updates, list(losses)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, _sum_of(content) + content)

    def remove(self) -> None:
        """Remove them: nobody goes on with them."""
        self._path.unlink(missing_ok=True)


def _sum_of(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_SUM_BYTES)
