"""Record and report what happens to a job when its worker has ended."""

from dataclasses import dataclass, replace

from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import Job, JobKind, JobState, WorkerOutcome, after_exit
from port_agent.jobs.store import JobStore
from port_agent.supervisor.job.log import JobLog
from port_agent.supervisor.job.plan_choice import PlanFigures, smaller_plan
from port_agent.system.clock import Clock
from port_planner.base.units import format_bytes

_SHOWN_A_DAY_S = 86400.0
_SHOWN_A_WEEK_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """A run that ended: its plans, the memory of the current plan, and its memory limit."""

    plans: tuple[PlanFigures, ...] = ()
    all_bytes: int = 0
    limit_bytes: int | None = None


class JobRecords:
    """Keeps jobs, their history and logs, and the health items about them consistent."""

    def __init__(self, store: JobStore, health: HealthBoard, clock: Clock) -> None:
        self.log_bytes = 1 << 20
        self._store, self._health, self._clock = store, health, clock

    def note(self, job_id: int, kind: str, text: str) -> None:
        """Add an entry to the history and to the job's log."""
        wall_s = self._clock.wall_s()
        self._store.note(wall_s, job_id, kind, text)
        JobLog(self._store.job_dir(job_id), self.log_bytes).note(text, wall_s)

    def report(self, code: str, *, key: str = "", lasts_s: float | None = None, **values: object) -> None:
        """Report that a condition holds now."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        self._health.report(code, now_s, wall_s, key=key, lasts_s=lasts_s, **values)

    def settle(self, job: Job, outcome: WorkerOutcome, detail: str, give_up_after: int, ended: RunEnd) -> None:
        """Record and report what happens to the job."""
        smaller = None
        if outcome is WorkerOutcome.OUT_OF_MEMORY:
            smaller = self._after_out_of_memory(job, ended)
            job = replace(job, memory_ceiling_bytes=ended.all_bytes if smaller is not None else None)
        before = job
        job = after_exit(job, outcome, detail, give_up_after, smaller)
        if before.state is JobState.CANCELLED or (before.state is JobState.PAUSED and not job.state.is_over):
            job = replace(job, state=before.state, reason=before.reason)  # what the user did meanwhile takes precedence
        if job.state.is_over:
            job = replace(job, finished_at=self._clock.wall_s())
            self._health.clear("deadline-missed", str(job.id))
        self._store.save(job)
        self.note(job.id, outcome.name.lower(), f"at step {job.step}: {job.reason or detail}")
        self._report_failures(job)

    def no_fit(self, job: Job, needed: int, limit: int | None) -> None:
        """Report that a job needs at least `needed` bytes, which it may not have."""
        allowed = "below the plan that was killed" if limit is None else format_bytes(limit)
        self.report("job-does-not-fit", key=str(job.id), job=job.label, needed=format_bytes(needed), allowed=allowed)

    def _after_out_of_memory(self, job: Job, ended: RunEnd) -> int | None:
        smaller = smaller_plan(ended.plans, ended.all_bytes)
        self.report(
            "out-of-memory",
            key=str(job.id),
            lasts_s=_SHOWN_A_DAY_S,
            job=job.label,
            limit=format_bytes(ended.limit_bytes) if ended.limit_bytes else "the machine's memory",
            action="the next run takes a smaller plan" if smaller else "there is no smaller plan",
        )
        return smaller.index if smaller else None

    def _report_failures(self, job: Job) -> None:
        key = str(job.id)
        if job.spec.kind is JobKind.ATTACHED:
            return  # its user sees how it ended
        if job.state is JobState.FAILED:
            self._health.clear("job-failing", key)
            self.report("job-given-up", key=key, lasts_s=_SHOWN_A_WEEK_S, job=job.label, id=job.id, reason=job.reason)
        elif job.failures >= 2:
            self.report("job-failing", key=key, job=job.label, id=job.id, failures=job.failures, reason=job.reason)
        else:
            self._health.clear("job-failing", key)
