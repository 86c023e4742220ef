"""When a fine-tuning writes checkpoints and when it ends. Torch-free."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

CHECKPOINT_S = 300.0
"""Seconds between two checkpoints: the most that an interruption loses, apart from the current update."""


class TrainingExit(BaseException):
    """A fine-tuning must end at once, wherever it is. Like Ctrl-C, it is not an error that a library may catch."""


class Steering:
    """Decides when a fine-tuning writes checkpoints and ends; this class decides by a clock, SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.leaving = False
        """Whether the run ends after the current update."""
        self._written = time.monotonic()

    def began(self, done: int, of: int) -> None:
        """Record that training begins or resumes, with the finished updates and their total."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Active while updates are made; a second signal ends the process in the usual way."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, frame: FrameType | None) -> None:
            self.leaving = True
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Active while weights and optimizer state are inconsistent; TrainingExit is raised
        before or after this block.
        """
        yield

    def finish(self) -> None:
        """Called before results are written: TrainingExit is raised here or never."""

    def finished(self, done: int, out: str) -> None:
        """Called when all results are in `out`, while the checkpoint still exists."""

    def checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due after this update."""
        return time.monotonic() - self._written >= CHECKPOINT_S

    def wrote(self, done: int, nbytes: int, seconds: float) -> None:
        """Called after a checkpoint was written."""
        self._written = time.monotonic()

    def has_time_to_write(self, nbytes: int) -> bool:
        """Return whether a last checkpoint of this size is worthwhile after TrainingExit."""
        return True
