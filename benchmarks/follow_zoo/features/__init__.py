"""Small programs, each about one thing that training programs do."""

from benchmarks.follow_zoo.compare import Program
from benchmarks.follow_zoo.features import (
    autograd,
    escapes,
    hooks,
    layers,
    loops,
    losses,
    optimizers,
    precision,
    reparametrized,
    saving,
    tensors,
    workers,
)

_PARTS = (
    loops,
    layers,
    losses,
    optimizers,
    precision,
    reparametrized,
    hooks,
    autograd,
    tensors,
    workers,
    saving,
    escapes,
)

KNOWN_WRONG = frozenset({"layers/prod"})
"""Refused: autograd takes another formula for the gradient of prod() while any dispatch mode is active."""


def registered() -> dict[str, Program]:
    """Return every feature by name."""
    return {
        f"{part.FEATURES.subject}/{name}": program
        for part in _PARTS
        for name, program in part.FEATURES.programs.items()
    }
