"""Losses of held-out texts, kept one by one: an evaluation that is cut goes on where it was, and its mean has the same bits."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from port_agent.system.atomic_file import write_atomically
from port_planner.base.cache import read_sealed, sealed


class _EvaluationRecord(msgspec.Struct, frozen=True):
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
        found = read_sealed(self._path, _EvaluationRecord)
        return found.losses if found is not None and (found.made_of, found.updates) == (self._made_of, updates) else []

    def write(self, updates: int, losses: Sequence[float]) -> None:
        """Keep them in the place of those before. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, sealed(_EvaluationRecord(self._made_of, updates, list(losses))))

    def remove(self) -> None:
        """Remove them: nobody goes on with them."""
        self._path.unlink(missing_ok=True)
