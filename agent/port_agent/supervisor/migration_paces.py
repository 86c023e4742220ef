"""How much longer and costlier steps are here than planned: the median over the last jobs."""

from collections.abc import Sequence

from port_agent.jobs.job import Job
from port_agent.supervisor.context import DaemonContext

_LAST = 9
_LEAST, _MOST = 1e-3, 1e3
"""Range of valid measurements."""


def paces(context: DaemonContext, guests_of: str | None = None) -> tuple[float, float]:
    """Return the ratios of measured to planned seconds and joules of a step; 1 if nothing was measured.

    Jobs from the device with the id `guests_of` are used if there are any, because their plans were made there.
    """
    jobs = [job for job in context.store.all() if job.promise is not None and job.measured.step_s]
    theirs = [job for job in jobs if guests_of and job.spec.guest is not None and job.spec.guest.device == guests_of]
    chosen = (theirs or [job for job in jobs if job.spec.guest is None])[-_LAST:]
    seconds = [
        (job.measured.step_s or 0.0) / job.promise.step_s for job in chosen if job.promise and job.promise.step_s
    ]
    joules = [one for job in chosen if (one := _joules(context, job)) is not None]
    return _middle(seconds), _middle(joules)


def _joules(context: DaemonContext, job: Job) -> float | None:
    """Return the ratio of measured to planned joules of a job's step since the agent started."""
    used = None if context.meter is None else context.meter.job_energy().get(str(job.id))
    if used is None or not used.steps or job.promise is None or not job.promise.step_joules:
        return None
    return used.gross_joules / used.steps / job.promise.step_joules


def _middle(values: Sequence[float]) -> float:
    if not values:
        return 1.0
    return min(_MOST, max(_LEAST, sorted(values)[len(values) // 2]))
