"""Waiting for what another process does. Within a process, await its event instead."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0
"""What a busy machine may take; nobody waits so long where the test passes."""
_LOOK_EVERY_S = 0.01

T = TypeVar("T")


def until(
    look: Callable[[], T | None],
    explain: Callable[[], object] = lambda: "waited in vain",
    *,
    patience_s: float = PATIENCE_S,
) -> T:
    """Return what `look` gives once that is true.

    It looks again and again: the state of a process, of its memory or of what it answers sends no event to another one.
    """
    end_s = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < end_s, explain()
        time.sleep(_LOOK_EVERY_S)
    return found
