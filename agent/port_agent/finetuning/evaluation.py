"""Losses of held-out texts, stored one at a time: an interrupted evaluation resumes, and its mean has the same bits."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from port_agent.system.atomic_file import write_atomically
from port_planner.base.cache import read_sealed, sealed


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss; infinity if it is beyond the range of numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class _EvaluationRecord(msgspec.Struct, frozen=True):
    """`made_of`: settings, data and round. `updates`: number of updates of the weights to which the losses belong."""

    made_of: str
    updates: int
    losses: list[float]


class HeldOutLosses:
    """The file of the losses, next to the checkpoint.

    It only saves time, so a damaged file, or one of another training, is ignored.
    """

    def __init__(self, path: Path, made_of: str) -> None:
        self._path, self._made_of = path, made_of

    def read(self, updates: int) -> list[float]:
        """Return the stored losses of the first texts after `updates` updates; empty if there are none or they are
        unreadable.
        """
        found = read_sealed(self._path, _EvaluationRecord)
        return found.losses if found is not None and (found.made_of, found.updates) == (self._made_of, updates) else []

    def write(self, updates: int, losses: Sequence[float]) -> None:
        """Replace the stored losses. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, sealed(_EvaluationRecord(self._made_of, updates, list(losses))))

    def remove(self) -> None:
        """Remove the stored losses."""
        self._path.unlink(missing_ok=True)
