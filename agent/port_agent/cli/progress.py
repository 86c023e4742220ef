"""A progress bar for work in named stages, and what each of them took."""

import os
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from port_agent.cli.terminal import terminal


@dataclass(slots=True)
class Spent:
    """Seconds by the clock, and of processors: this process's and those of processes that ended, on the stage in which they did."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class StageBar:
    """One bar per stage, drawn as the stages come. Quiet where nobody looks."""

    def __init__(self, stages: tuple[str, ...], *, quiet: bool = False) -> None:
        self._stages = stages
        self._progress = Progress(
            TextColumn("{task.description:>8}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), console=terminal(stderr=True), disable=quiet or not sys.stderr.isatty(),
        )  # fmt: skip
        self._tasks = {s: self._progress.add_task(s, total=1.0, start=False, visible=False) for s in stages}
        self.spent: dict[str, Spent] = {}
        """What each stage has taken, the present one as far as its last update; several visits are added up."""
        self._stage, self._since = stages[0], _clocks()

    def update(self, stage: str, share: float) -> None:
        """Say that `stage` is `share` (0 to 1) done; the stages before it are complete."""
        self._account(stage)
        for earlier in self._stages[: self._stages.index(stage)]:
            self._progress.update(self._tasks[earlier], completed=1.0)
            self._progress.stop_task(self._tasks[earlier])
        task = self._tasks[stage]
        self._progress.update(task, visible=True)
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(task, completed=share)

    def _account(self, stage: str) -> None:
        """Book the time since the last update on the stage that was under way then."""
        now = _clocks()
        spent = self.spent.setdefault(self._stage, Spent())
        spent.wall_s += now.wall_s - self._since.wall_s
        spent.cpu_s += now.cpu_s - self._since.cpu_s
        self._stage, self._since = stage, now

    def __enter__(self) -> Self:
        self._progress.start()
        self._since = _clocks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._account(self._stage)
        self._progress.stop()


def _clocks() -> Spent:
    times = os.times()
    return Spent(time.perf_counter(), times.user + times.system + times.children_user + times.children_system)
