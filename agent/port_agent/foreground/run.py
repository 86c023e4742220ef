"""A worker that its caller follows until it ends: its events, their totals, and why it could not train."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from port_agent.system.memory_limit import hold_resident
from port_agent.worker.protocol import (
    EvaluationDone,
    Event,
    FailureCause,
    LeaveNow,
    StepDone,
    StopAfterStep,
    TrainingFailed,
    TrainingFinished,
    WorkerReady,
)
from port_agent.worker.start import Worker
from port_planner.base.errors import ExitCode, PortError

_AFTER_STEP = StopAfterStep()

OnEvent = Callable[[Event], None]
"""Called with each event of a worker, such as `StepDone` with its loss (`port_agent.worker.protocol`)."""


def no_listener(event: Event) -> None:
    """Do nothing with an event."""


class TrainingFailedError(PortError):
    """The worker could not train, was killed, or left without a reason; the message names the remedy."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class TrainReport:
    """The totals of a run's events, of this run only: a resumed run starts at zero."""

    first_loss: float | None = None
    """Loss of the run's first step; None before it, and if it is not finite."""
    last_loss: float | None = None
    steps: int = 0
    """Number of steps that this run did; for a fine-tuning, of updates."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    read_bytes: int = 0
    """Bytes paged in; `written_bytes`: bytes paged out."""
    written_bytes: int = 0
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    """Seconds of transfers that overlapped with compute."""
    peak_rss_bytes: int = 0
    planned_peak_bytes: int = 0
    device_peak_bytes: int = 0
    evaluations: list[EvaluationDone] = field(default_factory=list)
    result: TrainingFinished | None = None
    """Step, output and checksums; None if the run was stopped before its end."""
    failure: str = ""
    would_fail_again: bool = False
    """Whether the same steps would fail again in the same way."""

    def take(self, event: Event) -> None:
        """Add one event."""
        match event:
            case WorkerReady():
                self.planned_peak_bytes = event.planned_peak_bytes or 0
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.start_peak_bytes or 0)
            case StepDone():
                self.first_loss = event.loss if self.first_loss is None else self.first_loss
                self.last_loss = event.loss
                self.steps += 1
                self.wall_s += event.wall_s
                self.cpu_s += event.cpu_s
                self.read_bytes += event.paged_in_bytes
                self.written_bytes += event.paged_out_bytes
                self.transfer_s += event.transfer_s
                self.hidden_s += event.hidden_s
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.peak_rss_bytes or 0)
                self.device_peak_bytes = max(self.device_peak_bytes, event.device_peak_bytes or 0)
            case EvaluationDone():
                self.evaluations.append(event)
            case TrainingFinished():
                self.result = event
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.peak_rss_bytes or 0)
            case TrainingFailed():
                self.failure = event.message
                self.would_fail_again = event.cause in (FailureCause.DIVERGED, FailureCause.IMPOSSIBLE)


class ForegroundRun:
    """A worker from its start to its end. As a context manager it leaves no worker behind."""

    def __init__(
        self, worker: Worker, resident_bytes: int | None = None, first_stop: StopAfterStep | LeaveNow = _AFTER_STEP
    ) -> None:
        """`resident_bytes`: bytes that it may keep resident after a step; None: what its start arguments say.

        `first_stop`: the command that ends this kind of worker with a checkpoint.
        """
        self._worker, self._resident_bytes, self._first_stop = worker, resident_bytes, first_stop
        self._stops = 0
        self.report = TrainReport()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._worker.process.kill()
            self._worker.process.wait()

    def stop(self) -> None:
        """Ask it to end with a checkpoint as soon as it can; a second call makes it leave at once."""
        self._stops += 1
        self._worker.send(self._first_stop if self._stops == 1 else LeaveNow())

    @property
    def stop_requested(self) -> bool:
        """Whether `stop` was called."""
        return self._stops > 0

    def events(self) -> Iterator[Event]:
        """Yield its events as they arrive, each already counted in the report; raise
        TrainingFailedError if it failed.
        """
        for event in self._worker.events():
            self.report.take(event)
            yield event
            if isinstance(event, StepDone) and self._resident_bytes is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    hold_resident(self._worker.process.pid, self._resident_bytes)
        self._check_end()

    def finish(self, on_event: OnEvent = no_listener) -> TrainReport:
        """Follow it to its end and return the totals. Ctrl-C stops it after its step. Raises TrainingFailedError."""
        with self.stopped_by_ctrl_c():
            for event in self.events():
                on_event(event)
        return self.report

    @contextlib.contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Make Ctrl-C call `stop` within the block, if this is the main thread; Python does not
        handle signals in others.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def ended(self) -> bool:
        """Whether the worker's process has ended."""
        return self._worker.process.poll() is not None

    @property
    def left(self) -> bool:
        """Whether it ended before the job did; the same request resumes from its checkpoint."""
        return self._worker.process.returncode == ExitCode.LEFT

    def _check_end(self) -> None:
        code = self._worker.process.returncode
        if not code or code == ExitCode.LEFT:
            return
        reason = self.report.failure or (
            f"the worker was killed by signal {-code}" if code < 0 else f"the worker ended with exit code {code}"
        )
        if not self.report.would_fail_again:
            reason = f"{reason.removesuffix('.')}. The last checkpoint is safe; the same command resumes"
        raise TrainingFailedError(reason, abs(code))
