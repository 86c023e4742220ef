"""Why a worker ended, as one pure function of everything that the supervisor saw."""

import signal
from dataclasses import dataclass

from port_agent.jobs.job import WorkerOutcome
from port_agent.worker.protocol import FailureCause, TrainingFailed
from port_planner.base.errors import ExitCode


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of a worker process as seen from outside. `returncode` is negative for a signal."""

    returncode: int
    finished: bool = False
    cancelled: bool = False
    asked_to_leave: bool = False
    killed_after_s: float | None = None
    """Set when the supervisor lost patience and killed it."""
    failure: TrainingFailed | None = None
    """Failure that the worker itself reported."""
    oom_kills: int = 0
    """Kills by the kernel in the worker's own group."""
    system_oom_kills: int = 0
    """Kills for lack of memory anywhere on the machine while the worker ran."""


LEFT = "left on request"
LEFT_BECAUSE = "left: "
"""Prefix of the message about a worker that was asked to leave, followed by the reason at that time."""


def left_because(detail: str, reason: str) -> str:
    """Return the message about a worker that left, with the reason why it was asked to;
    `detail` comes from `classify`.
    """
    if not reason:
        return detail
    return f"{LEFT_BECAUSE}{reason}" if detail == LEFT else f"{detail} ({reason})"


def classify(end: WorkerExit) -> tuple[WorkerOutcome, str]:
    """Return the outcome and a sentence for the user."""
    if end.cancelled:
        return WorkerOutcome.CANCELLED, "cancelled by you"
    if end.finished and end.failure is None:  # its results are written: what happened afterwards does not count
        return WorkerOutcome.FINISHED, "finished"
    if end.returncode == ExitCode.DONE:
        return WorkerOutcome.FAILED, "the worker ended without reporting that it finished"
    if end.returncode == ExitCode.LEFT:
        return WorkerOutcome.LEFT, LEFT
    if end.oom_kills:
        return WorkerOutcome.OUT_OF_MEMORY, "the kernel killed the worker at its memory limit"
    cause = end.failure.cause if end.failure is not None else None
    message = end.failure.message if end.failure is not None else ""
    if cause is FailureCause.OUT_OF_MEMORY:
        return WorkerOutcome.OUT_OF_MEMORY, f"the worker ran out of memory: {message}"
    if cause is FailureCause.DIVERGED:
        return WorkerOutcome.IMPOSSIBLE, message
    if cause is FailureCause.IMPOSSIBLE or end.returncode == ExitCode.IMPOSSIBLE:
        return WorkerOutcome.IMPOSSIBLE, message or "the worker reports that this job can never run as it is"
    if end.returncode < 0:
        return _signalled(end)
    return WorkerOutcome.FAILED, message or f"the worker failed with exit status {end.returncode}"


def _signalled(end: WorkerExit) -> tuple[WorkerOutcome, str]:
    if end.asked_to_leave and end.killed_after_s is not None:
        return (
            WorkerOutcome.LEFT,
            f"did not leave within {end.killed_after_s:.1f} s and was killed; resumes at its checkpoint",
        )
    if end.asked_to_leave and -end.returncode == signal.SIGTERM:
        return WorkerOutcome.LEFT, LEFT
    if -end.returncode == signal.SIGKILL and end.system_oom_kills:
        return WorkerOutcome.OUT_OF_MEMORY, "the kernel killed the worker because the machine ran out of memory"
    try:
        name = signal.Signals(-end.returncode).name
    except ValueError:
        name = f"signal {-end.returncode}"
    return WorkerOutcome.CRASHED, f"the worker was killed by {name}"
