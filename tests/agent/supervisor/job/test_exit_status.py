"""Why a worker ended, in a table of every way to end."""

import pytest

from port_agent.jobs.job import WorkerOutcome
from port_agent.supervisor.job.exit_status import WorkerExit, classify
from port_agent.worker.protocol import FailureCause, TrainingFailed


def failed(message: str, cause: FailureCause = FailureCause.OTHER) -> TrainingFailed:
    return TrainingFailed(code="SomeError", message=message, cause=cause)


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        (WorkerExit(0, finished=True), WorkerOutcome.FINISHED, "finished"),
        (WorkerExit(75, finished=True, asked_to_leave=True), WorkerOutcome.FINISHED, "finished"),
        (WorkerExit(-9, finished=True), WorkerOutcome.FINISHED, "finished"),
        (WorkerExit(0), WorkerOutcome.FAILED, "without reporting"),
        (WorkerExit(75, asked_to_leave=True), WorkerOutcome.LEFT, "on request"),
        (WorkerExit(75, cancelled=True), WorkerOutcome.CANCELLED, "by you"),
        (WorkerExit(-9, oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "at its memory limit"),
        (WorkerExit(1, oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "at its memory limit"),
        (WorkerExit(1, failure=failed("", FailureCause.OUT_OF_MEMORY)), WorkerOutcome.OUT_OF_MEMORY, "out of memory"),
        (WorkerExit(-9, system_oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "the machine ran out"),
        (WorkerExit(-9), WorkerOutcome.CRASHED, "SIGKILL"),
        (WorkerExit(-11), WorkerOutcome.CRASHED, "SIGSEGV"),
        (WorkerExit(-99), WorkerOutcome.CRASHED, "signal 99"),
        (WorkerExit(-9, asked_to_leave=True, killed_after_s=0.85), WorkerOutcome.LEFT, "within 0.8"),
        (WorkerExit(-11, asked_to_leave=True), WorkerOutcome.CRASHED, "SIGSEGV"),
        (WorkerExit(-15, asked_to_leave=True), WorkerOutcome.LEFT, "on request"),
        (WorkerExit(2), WorkerOutcome.IMPOSSIBLE, "never run"),
        (WorkerExit(1, failure=failed("bad", FailureCause.IMPOSSIBLE)), WorkerOutcome.IMPOSSIBLE, "bad"),
        (WorkerExit(4, failure=failed("nan", FailureCause.DIVERGED)), WorkerOutcome.IMPOSSIBLE, "nan"),
        (WorkerExit(1, failure=failed("no data")), WorkerOutcome.FAILED, "no data"),
        (WorkerExit(3), WorkerOutcome.FAILED, "exit status 3"),
    ],
)
def test_why_a_worker_ended(end: WorkerExit, outcome: WorkerOutcome, words: str) -> None:
    found, detail = classify(end)
    assert found is outcome
    assert words in detail
