"""Who says when a fine-tuning writes checkpoints and when it ends. Torch-free."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

CHECKPOINT_S = 300.0
"""Between two checkpoints: what a cut costs at most, but for the update that is under way."""


class TrainingExit(BaseException):
    """A fine-tuning is to end at once, wherever it is: like Ctrl-C, no error that a library may swallow."""


class Steering:
    """Who says when a fine-tuning writes checkpoints and ends. This one: a clock, SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.leaving = False
        """Whether it ends after the update under way."""
        self._written = time.monotonic()

    def began(self, done: int, of: int) -> None:
        """So many of all updates are done as it begins or goes on."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While updates are made; a second signal ends the process as always."""
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
        """While weights and optimizer state belong to no one update: TrainingExit comes before or after."""
        yield

    def finish(self) -> None:
        """From here on results are written: TrainingExit comes before, or no more."""

    def finished(self, done: int, out: str) -> None:
        """All results are in `out`, after so many updates; the checkpoint is still there."""

    def checkpoint_due(self) -> bool:
        """Return whether a checkpoint is to be written after this update."""
        return time.monotonic() - self._written >= CHECKPOINT_S

    def wrote(self, done: int, nbytes: int, seconds: float) -> None:
        """Take note of a checkpoint after so many updates."""
        self._written = time.monotonic()

    def has_time_to_write(self, nbytes: int) -> bool:
        """Return whether a last checkpoint of this size is worth it after TrainingExit."""
        return True
