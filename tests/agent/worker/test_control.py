"""Commands of the supervisor, between the thread that receives them and the one that trains."""

import threading
from collections.abc import Callable

import pytest

from port_agent.worker.control import Control, LeftOnRequest
from port_agent.worker.protocol import (
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

PATIENCE_S = 60.0


class Trainer:
    """Counts how often it was interrupted."""

    def __init__(self) -> None:
        self.step, self.interruptions = 7, 0

    def interrupt(self) -> None:
        self.interruptions += 1


class Watched:
    """A control whose events a test awaits."""

    def __init__(self, leave_patience_s: float | None = None) -> None:
        self.said: list[Event] = []
        self.spoken, self.abandoned = threading.Semaphore(0), threading.Event()
        self.trainer = Trainer()
        self.control = Control(self._emit, self.abandoned.set, leave_patience_s)

    def _emit(self, event: Event) -> None:
        self.said.append(event)
        self.spoken.release()

    def at_gate(self) -> "Thread":
        return Thread(self.control.gate)

    def next_event(self) -> Event:
        assert self.spoken.acquire(timeout=PATIENCE_S)
        return self.said[-1]


class Thread:
    """A call in a thread, which keeps what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except LeftOnRequest as error:
            self.error = error

    def join(self) -> BaseException | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.control.attach(made.trainer)
    return made


def test_a_gate_that_nobody_closed_is_open(watched: Watched) -> None:
    watched.control.gate()
    assert watched.said == [] and watched.trainer.interruptions == 0 and not watched.control.waits_for_trainer


def test_a_pause_holds_at_the_gate_until_resume_and_says_where(watched: Watched) -> None:
    watched.control.handle(PauseTraining())
    assert watched.trainer.interruptions == 1 and watched.control.waits_for_trainer
    gate = watched.at_gate()
    assert watched.next_event() == WorkerPaused(step=7)
    watched.control.handle(WriteCheckpoint())  # woken, and still paused
    watched.control.handle(ResumeTraining())
    assert watched.next_event() == WorkerResumed(step=7) and gate.join() is None
    assert watched.said == [WorkerPaused(step=7), WorkerResumed(step=7)]


def test_a_pause_that_is_taken_back_before_the_gate_was_none(watched: Watched) -> None:
    for command in (PauseTraining(), ResumeTraining()):
        watched.control.handle(command)
    watched.control.gate()
    assert watched.said == []


def test_leaving_ends_a_pause_without_resuming(watched: Watched) -> None:
    watched.control.handle(PauseTraining())
    gate = watched.at_gate()
    watched.next_event()
    watched.control.handle(LeaveNow())
    assert isinstance(gate.join(), LeftOnRequest) and watched.said == [WorkerPaused(step=7)]
    for command in (PauseTraining(), ResumeTraining()):
        watched.control.handle(command)
        with pytest.raises(LeftOnRequest, match="left on request"):
            watched.control.gate()
    assert not watched.abandoned.is_set(), "the trainer leaves by itself"


def test_without_a_trainer_nothing_is_lost_by_going_at_once() -> None:
    watched = Watched()
    watched.control.handle(PauseTraining())
    assert not watched.abandoned.is_set()
    watched.control.leave()
    assert watched.abandoned.is_set()


@pytest.mark.parametrize("early", [True, False])
def test_what_waits_for_its_work_takes_it_however_early_it_comes(early: bool) -> None:
    watched, found = Watched(), list[tuple[str, ...]]()
    work = TakeWork(words=("--bundle", "job.port"))
    if early:
        watched.control.handle(work)
    taking = Thread(lambda: found.append(watched.control.take_work()))
    if not early:
        watched.control.handle(WriteCheckpoint())
        watched.control.handle(work)
    assert taking.join() is None and found == [("--bundle", "job.port")]
    watched = Watched()
    taking = Thread(lambda: found.append(watched.control.take_work()))
    watched.control.leave()
    assert isinstance(taking.join(), LeftOnRequest) and watched.abandoned.is_set()


def test_what_was_heard_before_the_trainer_came_holds_for_it() -> None:
    watched = Watched()
    watched.control.handle(PauseTraining())
    watched.control.attach(watched.trainer)
    assert watched.trainer.interruptions == 1
    gate = watched.at_gate()
    assert watched.next_event() == WorkerPaused(step=7)
    watched.control.handle(ResumeTraining())
    assert gate.join() is None


def test_a_pause_before_there_is_a_step_is_told_at_step_zero() -> None:
    watched = Watched()
    watched.control.handle(PauseTraining())
    gate = watched.at_gate()
    assert watched.next_event() == WorkerPaused(step=0)
    watched.control.handle(ResumeTraining())
    gate.join()


def test_a_trainer_that_does_not_leave_is_abandoned_after_its_patience_and_once() -> None:
    count = []
    watched = Watched()
    control = Control(watched._emit, lambda: (count.append(1), watched.abandoned.set())[1], leave_patience_s=0.01)
    control.attach(watched.trainer)
    for _ in range(3):
        control.leave()
    assert watched.abandoned.wait(PATIENCE_S)
    assert len(count) == 1 and control.leaving


def test_what_is_asked_for_between_steps_is_taken_once_and_interrupts_nothing(watched: Watched) -> None:
    control = watched.control
    for command in (WriteCheckpoint(), SwitchPlan(plan=1), SwitchPlan(plan=2, reason="heat"), WriteCheckpoint()):
        control.handle(command)
    assert watched.trainer.interruptions == 0 and control.waits_for_trainer
    assert control.take_plan() == SwitchPlan(plan=2, reason="heat") and control.take_plan() is None
    assert control.take_checkpoint() and not control.take_checkpoint()
    assert not control.waits_for_trainer
    control.handle(StopAfterStep())
    assert control.stopping and control.waits_for_trainer and watched.trainer.interruptions == 0


def test_a_sleep_ends_with_a_command_and_with_one_that_came_before(watched: Watched) -> None:
    watched.control.handle(WriteCheckpoint())
    watched.control.wait(PATIENCE_S)
    sleeper = Thread(lambda: watched.control.wait(PATIENCE_S))
    watched.control.handle(SwitchPlan(plan=1))
    sleeper.join()
    watched.control.leave()
    for _ in range(2):
        watched.control.wait(PATIENCE_S)  # who leaves never sleeps again
