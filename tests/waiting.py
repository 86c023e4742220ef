"""Waiting for what another process does. Within a process, await its event instead."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 120.0
"""What a busy machine may take; nobody waits so long where the test passes."""
_LOOK_FIRST_S, _LOOK_LAST_S = 0.01, 0.1
_OF_THE_WAIT = 0.05
"""How much of the time waited passes until the next look, within these: a daemon that is asked a hundred times a
second is busy with that.
"""

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
    begun_s = time.monotonic()
    while not (found := look()):
        waited_s = time.monotonic() - begun_s
        assert waited_s < patience_s, explain()
        time.sleep(min(max(_LOOK_FIRST_S, _OF_THE_WAIT * waited_s), _LOOK_LAST_S))
    return found


def wait_until_drawn_moment(numbers: random.Random, most_s: float) -> None:
    """Let a moment pass that is drawn: attacks come at any."""
    time.sleep(numbers.uniform(0.0, most_s))


def used_ticks(pid: int, stretch_s: float = 0.3) -> int:
    """Return the processor time, in ticks, that a process takes within a stretch: one that
    rests sends no event of that.
    """
    before = _ticks(pid)
    time.sleep(stretch_s)
    return _ticks(pid) - before


def _ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
