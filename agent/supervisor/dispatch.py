"""From the decision to the worker: who runs next, who goes on, who leaves."""

from agent.jobs.model import Job, JobKind, JobState, may_run, order
from agent.policy.decide import Policy, PolicyDecision, ResourceLimits, State, window_closes_in_s
from agent.supervisor.context import Core
from agent.supervisor.job.run_state import Surroundings
from agent.supervisor.job.runner import LAST_COMMIT_S
from agent.system.clock import local_time

BEFORE_CLOSING_S = 15.0
"""So long before a window closes a last checkpoint is made: what is known in advance costs no work."""
WARM_MARGIN_C = 7.0
"""This close below the limit the plan with the least power is taken."""


class Dispatcher:
    """Starts, steers and ends the worker of the one job that may run.

    As the device's conditions and the user say.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._fitting: dict[int, tuple[tuple[int | None, int | None], bool]] = {}
        """By job id: the memory limit and the job's ceiling for which it was looked whether a plan fits, and the answer."""

    def act(self, decision: PolicyDecision) -> None:
        """Do what `decision` and the state of the jobs ask for; called at every look."""
        runner = self._core.runner
        runner.watch_silence()
        runner.attachments.tell_cancelled()
        job = runner.job
        if job is not None and job.state is JobState.CANCELLED:
            runner.cancel()
        elif job is not None and job.state is JobState.PAUSED:
            runner.leave("you paused the job", LAST_COMMIT_S)
        elif decision.state is State.PAUSE:
            runner.pause()
        elif decision.state is State.LEAVE:
            runner.leave("; ".join(decision.reasons), 0.0 if "memory" in decision.codes else LAST_COMMIT_S)
        elif job is not None:
            self._go_on(job, decision)
        else:
            self._start_next(decision)

    def _go_on(self, job: Job, decision: PolicyDecision) -> None:
        core, around = self._core, self._surroundings(decision)
        better = (other for other in self._candidates() if other.spec.priority > job.spec.priority)
        first = next((other for other in better if self._fits(other, around)), None)
        if first is not None:
            core.runner.leave_after_checkpoint(f"job {first.label} has a higher priority")
            return
        core.runner.resume()
        closes_s = window_closes_in_s(core.config.policy, local_time(core.clock.wall_s()))
        if closes_s is not None and closes_s < BEFORE_CLOSING_S:
            core.runner.checkpoint_within(BEFORE_CLOSING_S)
        pressure = core.admission.facts.memory_pressure_percent
        under_pressure = pressure is not None and pressure > core.config.policy.memory_pressure_percent
        core.runner.adapt(around, under_pressure)

    def _fits(self, job: Job, around: Surroundings) -> bool:
        """Return whether `job` would start.

        A worker that leaves for one that cannot would leave again at every look.
        """
        asked = (around.memory_bytes, job.memory_ceiling_bytes)
        known = self._fitting.get(job.id)
        if known is None or known[0] != asked:
            known = self._fitting[job.id] = (asked, self._core.runner.fits(job, around))
        return known[1]

    def _start_next(self, decision: PolicyDecision) -> None:
        core = self._core
        if core.store.trouble is not None:
            return  # what it would learn could not be kept
        for job in self._candidates():
            if core.runner.start(job, self._surroundings(decision)):
                return

    def _candidates(self) -> list[Job]:
        """Return the jobs that could run now, best first."""
        core, now_s = self._core, self._core.clock.monotonic_s()
        ready = []
        for job in core.store.all():
            waited = False
            if job.spec.kind is JobKind.ATTACHED and not core.runner.attachments.answers(job.id):
                continue
            if job.state is JobState.BACKOFF:
                waited = now_s >= self._retry_at(job, now_s)
            else:
                core.retry_at_s.pop(job.id, None)
            has_data = bool(core.inboxes.state(job.spec.name).new) if job.spec.waits_for_data else False
            if may_run(job, has_data=has_data, waited=waited):
                ready.append(job)
        return order(ready)

    def _retry_at(self, job: Job, now_s: float) -> float:
        """Return when a job's backoff ends; counted from when this process first saw the failure."""
        known = self._core.retry_at_s.get(job.id)
        if known is None or known[0] != job.failures:
            known = (job.failures, now_s + (job.retry_after_s or 0.0))
            self._core.retry_at_s[job.id] = known
        return known[1]

    def _surroundings(self, decision: PolicyDecision) -> Surroundings:
        return surroundings(self._core, granted_limits(self._core.config.policy, decision.state))


def granted_limits(policy: Policy, state: State) -> ResourceLimits:
    """Return how much of the machine a worker may take in `state`."""
    return policy.in_use if state is State.TRAIN_GENTLY else policy.not_in_use


def surroundings(core: Core, limits: ResourceLimits) -> Surroundings:
    """Return what a run would find now, with these limits."""
    policy, options, readings = core.config.policy, core.config.options, core.admission.facts
    warm = readings.temperature_c is not None and readings.temperature_c > policy.max_temperature_c - WARM_MARGIN_C
    return Surroundings(
        limits=limits,
        total_memory_bytes=readings.total_memory_bytes,
        warm=warm,
        flash_budget_bytes_per_day=policy.flash_write_budget_bytes_per_day,
        flash_written_today_bytes=core.wear.today_bytes(),
        give_up_after=options.max_failures_without_progress,
        job_log_bytes=options.job_log_bytes,
    )
