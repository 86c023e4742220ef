"""The time of each stage of planning."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StageTime:
    """Wall-clock seconds of the stage, and CPU seconds of this process and of those that ended during the stage."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class StageClock:
    """Forwards progress, and adds the time since the last report to the stage that was in progress;
    repeated visits are added up.
    """

    def __init__(self, progress: Callable[[str, float], None], first: str) -> None:
        self._progress = progress
        self._taken: dict[str, StageTime] = {}
        self._stage, self._since = first, _clocks()

    def __call__(self, stage: str, share: float) -> None:
        """Report that `stage` is `share` (0 to 1) done."""
        self._account(stage)
        self._progress(stage, share)

    def taken(self) -> dict[str, StageTime]:
        """Return the time of each stage so far."""
        self._account(self._stage)
        return self._taken

    def _account(self, stage: str) -> None:
        now = _clocks()
        taken = self._taken.setdefault(self._stage, StageTime())
        taken.wall_s += now.wall_s - self._since.wall_s
        taken.cpu_s += now.cpu_s - self._since.cpu_s
        self._stage, self._since = stage, now


def _clocks() -> StageTime:
    times = os.times()
    return StageTime(time.perf_counter(), times.user + times.system + times.children_user + times.children_system)
