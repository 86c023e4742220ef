"""A progress bar for work in named stages."""

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from port_agent.cli.terminal import terminal


class StageBar:
    """One bar per stage, drawn when the stage begins. Silent if the output is not a terminal."""

    def __init__(self, stages: tuple[str, ...], *, quiet: bool = False) -> None:
        self._stages = stages
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=terminal(stderr=True),
            disable=quiet or not sys.stderr.isatty(),
        )
        self._tasks = {s: self._progress.add_task(s, total=1.0, start=False, visible=False) for s in stages}

    def update(self, stage: str, share: float) -> None:
        """Report that `stage` is done up to `share` (0 to 1), and the stages before it completely."""
        for earlier in self._stages[: self._stages.index(stage)]:
            self._progress.update(self._tasks[earlier], completed=1.0)
            self._progress.stop_task(self._tasks[earlier])
        task = self._tasks[stage]
        self._progress.update(task, visible=True)
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(task, completed=share)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
