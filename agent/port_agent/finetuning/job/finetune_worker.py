"""A fine-tuning under the daemon's control:
`python -m port_agent.finetuning.job.finetune_worker JOB --control-fd N [ROUND]`, inside its budget.

The main thread executes the daemon's commands in a signal handler, between two operators, as the interceptor arranges
for every handler. To pause, it waits there. To leave, it ends there, after it has saved the state of the finished
updates if there is time. Weights and optimizer state change only during an update, and an update is always finished.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from port_agent.finetuning.job_file import FinetuneJob
from port_agent.finetuning.round_files import RoundFiles
from port_agent.finetuning.steering import Steering, TrainingExit
from port_agent.finetuning.text.tokenizing import TokenizerProcess
from port_agent.intercept.exec.children import Children
from port_agent.worker.control import Control, Emit, LeftOnRequest
from port_agent.worker.protocol import CheckpointWritten, TrainingFinished, WorkerReady
from port_agent.worker.serve import serve
from port_planner.base.errors import ExitCode
from port_planner.base.process_memory import peak_resident_bytes, resident_bytes

if TYPE_CHECKING:
    from port_agent.finetuning.training import Update
    from port_agent.intercept.exec.step_figures import StepFigures

_SIGNAL = signal.SIGUSR1
"""The signal that wakes the main thread; nothing in the training loop uses it."""

_MARGIN_S = 0.5
"""A worker that must leave at once is killed a second later."""

_SLOW_BYTES_PER_S = 10e6
"""Assumed speed of writing a checkpoint until one was written: that of a slow SD card."""


def main() -> ExitCode:
    """Fine-tune as the job file says; return the exit code."""
    job = msgspec.json.decode(sys.argv[1], type=FinetuneJob)
    files = msgspec.json.decode(sys.argv[4], type=RoundFiles) if sys.argv[4:] else None
    return serve(int(sys.argv[3]), lambda control, emit: _work(job, files, control, emit))


def _work(job: FinetuneJob, files: RoundFiles | None, control: Control, emit: Emit) -> None:
    """Fine-tune. Raises LeftOnRequest when it left as asked, and FinetuneError."""
    steering = DaemonSteering(control, emit)
    try:
        control.attach(steering)
        job.check_files()
        _train(job, files, emit, steering)
    except TrainingExit:
        raise LeftOnRequest("left on request") from None


def _train(job: FinetuneJob, files: RoundFiles | None, emit: Emit, steering: "DaemonSteering") -> None:
    tokenizer = TokenizerProcess(job.options)
    tokenizer.tokenized()  # before torch is loaded, so that the memory used for reading is released
    from port_agent.finetuning.federated import FederatedRound
    from port_agent.finetuning.training import finetune

    def note(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    given = None if files is None else FederatedRound.of(files)
    outcome = finetune(job.options, steering.updated, note, steering, given, tokenizer)
    if outcome.left:
        raise TrainingExit
    if given is not None and outcome.loss_after is not None and not given.trains:
        note(f"loss of held-out text: {outcome.loss_after:.3f} with the averaged adapter")
    elif outcome.loss_before is not None and outcome.loss_after is not None:
        note(f"loss of held-out text: {outcome.loss_before:.3f} before, {outcome.loss_after:.3f} after")
    if outcome.sample_after is not None:
        note(f"sample before: {outcome.sample_before or '(in an earlier run)'}\nsample after: {outcome.sample_after}")
    if outcome.out:
        note(f"written: {outcome.out}")


class DaemonSteering(Steering):
    """Commands of the daemon, received by a separate thread and executed by the main thread."""

    def __init__(self, control: Control, emit: Emit) -> None:
        """From here on commands interrupt the main thread, which this must be."""
        super().__init__()
        self._control, self._emit = control, emit
        self._children = Children()
        self._updating = self._obeying = self._leave_requested = False
        self._seconds_per_byte = 1 / _SLOW_BYTES_PER_S
        self._before: StepFigures | None = None
        self.step = self._of = 0
        """Number of finished updates, and their total."""
        signal.signal(_SIGNAL, self._obey)

    def interrupt(self) -> None:
        """Make the main thread execute the command: between two operators, or at the end of the current update."""
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _obey(self, number: int, frame: FrameType | None) -> None:
        """Execute the current command.

        A signal that arrives meanwhile makes it check again; only one call at a time commands the children.
        """
        self._leave_requested = True
        if self._obeying or self.leaving:
            return
        self._obeying = True
        try:
            while self._leave_requested:
                self._leave_requested = False
                self._gate()
        finally:
            self._obeying = False
            if self._leave_requested and not self.leaving:  # since the last check
                self.interrupt()

    def _gate(self) -> None:
        """Wait while paused, with the process's children stopped. Raises TrainingExit."""
        began_s = time.perf_counter()
        self._children.stop()
        try:
            self._control.gate(lambda within_s: self._updating)
        except LeftOnRequest:
            self.leaving = True
            raise TrainingExit from None
        finally:
            self._children.go_on()
        if self._before is not None:  # a pause does not count as part of an update
            waited_s = time.perf_counter() - began_s
            self._before = replace(self._before, wall_s=self._before.wall_s + waited_s)

    # -- what the training loop asks and reports

    def began(self, done: int, of: int) -> None:
        """Report that the worker is ready."""
        self.step, self._of, self._before = done, of, self._figures(done)
        peak = peak_resident_bytes()
        self._emit(
            WorkerReady(
                pid=os.getpid(),
                step=done,
                total_steps=of,
                plan=0,
                resident_bytes=resident_bytes(),
                start_peak_bytes=peak,
            )
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Do nothing: a worker ignores the terminal's signals."""
        yield

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Defer leaving until the update is complete, then raise TrainingExit."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
        self._leave_if_requested()

    def finish(self) -> None:
        """Defer leaving for good; raise TrainingExit if it was already requested."""
        self._updating = True
        self._leave_if_requested()

    def finished(self, done: int, out: str) -> None:
        """Report the end to the daemon, which then counts the job as done, however this process ends."""
        self._emit(TrainingFinished(step=done, out=out, peak_rss_bytes=peak_resident_bytes()))

    def _leave_if_requested(self) -> None:
        if self._control.leaving and not self.leaving:
            self.leaving = True
            raise TrainingExit

    def checkpoint_due(self) -> bool:
        """Return whether the daemon, which knows their cost, asked for a checkpoint."""
        return self._control.take_checkpoint()

    def wrote(self, done: int, nbytes: int, seconds: float) -> None:
        """Report a checkpoint to the daemon."""
        self._seconds_per_byte = seconds / max(1, nbytes)
        self._emit(CheckpointWritten(step=done, bytes=nbytes, wall_s=seconds))

    def has_time_to_write(self, nbytes: int) -> bool:
        """Return whether a last checkpoint can be written before the worker is killed, judged by
        the time of an earlier one.
        """
        return nbytes * self._seconds_per_byte < self._control.leave_within_s + _MARGIN_S

    def updated(self, update: "Update") -> None:
        """Report an update to the daemon."""
        now = self._figures(update.done)
        if self._before is not None:
            self._emit(now.step_since(self._before, update.loss, self._of))
        self.step, self._before = update.done, now

    def _figures(self, done: int) -> "StepFigures":
        from port_agent.intercept.budget import report_of_this_process
        from port_agent.intercept.exec.step_figures import StepFigures

        return StepFigures.now(done, report_of_this_process())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
