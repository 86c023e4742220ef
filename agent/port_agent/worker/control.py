"""The supervisor's commands, between the thread that receives them and the one that trains. Does not import torch."""

import threading
from collections.abc import Callable
from typing import Protocol

from port_agent.worker.protocol import (
    Command,
    Event,
    LeaveNow,
    PauseTraining,
    ResumeTraining,
    StopAfterStep,
    SwitchPlan,
    TakeWork,
    WorkerPaused,
    WorkerResumed,
    WriteCheckpoint,
)
from port_planner.base.errors import PortError

ORPHAN_COMMIT_S = 1.0
"""Seconds for a last commit after the supervisor is gone; the next supervisor waits two seconds for the old worker."""

Emit = Callable[[Event], None]
"""Sends an event to the supervisor."""


class LeftOnRequest(PortError):
    """The run ended on request; the last checkpoint is valid."""


class Training(Protocol):
    """The training that is controlled."""

    @property
    def step(self) -> int:
        """Number of finished steps in this round."""

    def interrupt(self) -> None:
        """Make the gate be called soon."""


class Control:
    """The supervisor's commands, set by the receiving thread and executed between two instructions.

    `abandon` ends the process. It is called to leave while there is no trainer, and so nothing to lose. It is also
    called if a trainer has not left after `leave_patience_s`, if that is given.
    """

    def __init__(self, emit: Emit, abandon: Callable[[], None], leave_patience_s: float | None = None) -> None:
        self._emit, self._abandon, self._leave_patience_s = emit, abandon, leave_patience_s
        self._trainer: Training | None = None
        self._changed = threading.Condition()
        self._paused = self._news = self._checkpoint = False
        self._switch: SwitchPlan | None = None
        self._work: TakeWork | None = None
        self.leaving = self.stopping = False
        self.leave_within_s = 0.0
        """Seconds that a last commit may take."""

    def handle(self, command: Command) -> None:
        """Handle a command of the supervisor."""
        with self._changed:
            match command:
                case PauseTraining():
                    self._paused = True
                case ResumeTraining():
                    self._paused = False
                case LeaveNow():
                    self.leave_within_s = command.within_s
                    self._begin_to_leave()
                case StopAfterStep():
                    self.stopping = True
                case WriteCheckpoint():
                    self._checkpoint = True
                case TakeWork():
                    self._work = command
                case SwitchPlan():
                    self._switch = command
            self._news = True
            self._changed.notify_all()
            self._interrupt()

    def leave(self) -> None:
        """Make the worker end, because it was asked to, or because the supervisor is gone."""
        self.handle(LeaveNow(within_s=ORPHAN_COMMIT_S))

    def attach(self, trainer: Training) -> None:
        """Apply earlier and later commands to this trainer."""
        with self._changed:
            self._trainer = trainer
            self._interrupt()

    @property
    def waits_for_trainer(self) -> bool:
        """Whether a command requires the trainer to interrupt its work."""
        with self._changed:
            return self._paused or self.leaving or self.stopping or self._checkpoint

    def gate(self, finishes_first: Callable[[float], bool] = lambda within_s: False) -> None:
        """Wait while paused; raise LeftOnRequest to leave.

        Does not raise if `finishes_first` says that the current step is better finished in the remaining seconds.
        """
        with self._changed:
            if self._paused and not self.leaving:
                self._emit(WorkerPaused(step=self._step()))
                while self._paused and not self.leaving:
                    self._changed.wait()
                if not self.leaving:
                    self._emit(WorkerResumed(step=self._step()))
            if self.leaving and not finishes_first(self.leave_within_s):
                raise LeftOnRequest("left on request")

    def take_work(self) -> tuple[str, ...]:
        """Wait for a task and return it; raise LeftOnRequest to leave."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is not None or self.leaving)
            if self._work is None:
                raise LeftOnRequest("left on request")
            return self._work.words

    def wait(self, seconds: float) -> None:
        """Sleep, but wake up for a command."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or self.leaving, seconds)
            self._news = False

    def take_plan(self) -> SwitchPlan | None:
        """Return the plan to which to switch, once."""
        with self._changed:
            switch, self._switch = self._switch, None
            return switch

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        with self._changed:
            wanted, self._checkpoint = self._checkpoint, False
            return wanted

    def _begin_to_leave(self) -> None:
        if self.leaving:
            return
        self.leaving = True
        if self._leave_patience_s is not None:
            timer = threading.Timer(self._leave_patience_s, self._abandon)
            timer.daemon = True
            timer.start()

    def _interrupt(self) -> None:
        if self._trainer is not None and (self._paused or self.leaving):
            self._trainer.interrupt()
        elif self.leaving:
            self._abandon()

    def _step(self) -> int:
        return 0 if self._trainer is None else self._trainer.step
