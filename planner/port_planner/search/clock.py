"""The clock of a search: CPU seconds, or the number of its attempts, which is the same in each run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_UNLIMITED_S = 1e6
_NODES = 200
"""Number of nodes of the solver's tree for one run while attempts are counted."""


class _Count:
    attempts: float | None = None


def now() -> float:
    """Return the CPU seconds, or the attempts so far if these are counted."""
    return time.process_time() if _Count.attempts is None else _Count.attempts


def note_attempt() -> None:
    """Count an attempt: a schedule that was judged, or a neighbourhood that was searched."""
    if _Count.attempts is not None:
        _Count.attempts += 1.0


def solver_seconds(seconds: float) -> float:
    """Return how long the solver may take, if `seconds` are left on this clock."""
    return seconds if _Count.attempts is None else _UNLIMITED_S


def solver_nodes() -> int | None:
    """Return how many nodes a run of the solver may take; None: as many as its time allows."""
    return None if _Count.attempts is None else _NODES


@contextmanager
def counted() -> Iterator[None]:
    """Count attempts instead of seconds in the block; limits are then numbers of attempts."""
    before, _Count.attempts = _Count.attempts, 0.0
    try:
        yield
    finally:
        _Count.attempts = before
