"""From the decision to the workers: which start, which continue, and which leave."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from port_agent.jobs.job import Job, JobKind, JobState, may_run, order
from port_agent.policy.decide import Policy, PolicyDecision, ResourceLimits, State, window_closes_in_s
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.job.board_places import THIS_COMPUTER, plugged_in
from port_agent.supervisor.job.plan_revision import PeerSolving
from port_agent.supervisor.job.run_state import RunConditions
from port_agent.supervisor.job.runner import LAST_COMMIT_S, Runner
from port_agent.supervisor.job.sharing import Claim, CpuShare, admit, cpu_shares
from port_agent.system.clock import local_time

BEFORE_CLOSING_S = 15.0
"""Seconds before a window closes at which a last checkpoint is made, so that a foreseeable end costs no work."""
BOARD_PATIENCE_S = 300.0
"""Seconds for which a worker waits for a missing board; then it releases its memory, and the job starts again when a
serial device is plugged in.
"""
WARM_MARGIN_C = 7.0
"""Degrees below the temperature limit at which the plan with the least power is chosen."""


class Dispatcher:
    """Starts, steers and ends workers: one on this computer, and one on each board that a job uses.

    It follows the device's conditions and the user's commands, within what the policy grants to all workers together.
    """

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._fitting: dict[int, tuple[tuple[int | None, int | None, frozenset[str] | None], bool]] = {}
        """Cached start checks by job id: memory limit, the job's ceiling, devices, and whether the job fits."""
        self._least: dict[int, tuple[int | None, float]] = {}
        """Least memory by job id: the ceiling for which it was determined, and the result."""

    def act(self, decision: PolicyDecision) -> None:
        """Apply `decision` to the jobs; called at every look."""
        runners = self._context.runners
        runners.host.attachments.report_cancelled()
        going = {}
        for place, (runner, job) in runners.busy().items():
            runner.watch_silence()
            if not self._end_or_pause(runner, job, decision):
                going[place] = job
        if decision.state.trains:
            self._share(going, decision)
        runners.tidy()

    def _end_or_pause(self, runner: Runner, job: Job, decision: PolicyDecision) -> bool:
        """Tell a worker to stop if the user or the decision requires it; return whether a command was sent."""
        if job.state is JobState.CANCELLED:
            runner.cancel()
        elif job.state is JobState.PAUSED:
            runner.leave("you paused the job", LAST_COMMIT_S)
        elif decision.state is State.PAUSE:
            runner.pause()
        elif decision.state is State.LEAVE:
            runner.leave("; ".join(decision.reasons), 0.0 if "memory" in decision.codes else LAST_COMMIT_S)
        elif self._stands_back(job):
            runner.leave_after_checkpoint("you want another job to run now")
        elif runner.waited_s > BOARD_PATIENCE_S:
            place = self._context.runners.place_of(job)
            self._context.without_board[job.id] = plugged_in(place)
            runner.leave(runner.waits_for or "")
        else:
            return False
        return True

    def _stands_back(self, job: Job) -> bool:
        """Return whether another job must run now instead."""
        now = self._context.run_now
        return now is not None and now.job_id != job.id

    def _share(self, going: Mapping[str, Job], decision: PolicyDecision) -> None:
        """Let jobs train in order, as far as the granted memory suffices.

        `going`: the jobs that may continue, by place.
        """
        whole, runners = self._conditions(decision), self._context.runners
        line = self._line(going)
        claims = [Claim(job.id, runners.place_of(job), job.spec.priority) for job in line]
        admitted = admit(claims, self._min_bytes, whole.memory_bytes)
        shares = cpu_shares(admitted, whole.limits.cpu_percent)
        needs = {place: runner.held_bytes for place, (runner, _) in runners.busy().items()}
        needs |= {place: self._min_bytes(claim) for place, claim in admitted.items()}

        def conditions(place: str) -> RunConditions:
            return replace(whole, taken_bytes=self._taken_bytes(place, needs), cpu=shares.get(place, CpuShare()))

        for place, job in going.items():
            claim = admitted.get(place)
            if claim is not None and claim.job_id != job.id:
                first = self._context.store.get(claim.job_id)
                runners.at(place).leave_after_checkpoint(f"job {first.label} has a higher priority")
            elif claim is None and not runners.at(place).has_plans:
                runners.at(place).leave_after_checkpoint("its memory is needed by jobs with higher priority")
            else:
                self._go_on(runners.at(place), self._assured(conditions(place), claim))
        if self._context.store.trouble is None:  # otherwise what they learn could not be stored
            self._start_waiting(line, conditions)

    def _assured(self, conditions: RunConditions, claim: Claim | None) -> RunConditions:
        """Return the run conditions of a job that continues.

        If it was admitted, they include the least memory that it needs, even while leaving workers still hold it.
        """
        granted = conditions.limits.memory_limit(conditions.total_memory_bytes)
        if claim is None or granted is None:
            return conditions
        return replace(conditions, taken_bytes=min(conditions.taken_bytes, granted - int(self._min_bytes(claim))))

    def _start_waiting(self, line: Sequence[Job], conditions: Callable[[str], RunConditions]) -> None:
        """Start the first job that can start in each free place; report why the jobs before it cannot."""
        runners = self._context.runners
        taken = {place: job.spec.priority for place, (_, job) in runners.busy().items()}
        for job in line:
            place = runners.place_of(job)
            if job.spec.priority <= taken.get(place, -math.inf) or not self._fits(job, conditions(place)):
                continue
            if place not in taken and runners.at(place).start(job, conditions(place)):
                taken[place] = job.spec.priority

    def _taken_bytes(self, place: str, needs: Mapping[str, float]) -> int:
        """Return the memory that the worker of `place` may not use.

        Boards get the least that they need, and this computer's worker gets the rest. If it uses less,
        the boards may take more.
        """
        others = {other: need for other, need in needs.items() if other != place}
        if place != THIS_COMPUTER and THIS_COMPUTER in others:
            others[THIS_COMPUTER] = max(others[THIS_COMPUTER], self._context.runners.host.held_bytes)
        return int(sum(need for need in others.values() if math.isfinite(need)))

    def _go_on(self, runner: Runner, conditions: RunConditions) -> None:
        context = self._context
        runner.resume()
        closes_s = window_closes_in_s(context.config.policy, local_time(context.clock.wall_s()))
        if closes_s is not None and closes_s < BEFORE_CLOSING_S:
            runner.checkpoint_within(BEFORE_CLOSING_S)
        pressure = context.admission.facts.memory_pressure_percent
        under_pressure = pressure is not None and pressure > context.config.policy.memory_pressure_percent
        runner.adapt(conditions, under_pressure)

    def _fits(self, job: Job, conditions: RunConditions) -> bool:
        """Return whether `job` would start; otherwise a health item says why.

        Otherwise a worker would leave at every look for a job that cannot start.
        """
        wanted = (conditions.memory_bytes, job.memory_ceiling_bytes, conditions.devices)
        known = self._fitting.get(job.id)
        if known is None or known[0] != wanted:
            known = self._fitting[job.id] = (wanted, self._context.runners.host.fits(job, conditions))
        return known[1]

    def _min_bytes(self, claim: Claim) -> float:
        """Return the least memory with which the job can run."""
        job = self._context.store.get(claim.job_id)
        known = self._least.get(job.id)
        if known is None or known[0] != job.memory_ceiling_bytes or job.spec.kind is not JobKind.TRAIN:
            known = (job.memory_ceiling_bytes, self._context.runners.host.least_bytes(job))
            self._least[job.id] = known
        return known[1]

    def _line(self, going: Mapping[str, Job]) -> list[Job]:
        """Return the jobs that run or could run now, best first; at equal rank, a running job comes first."""
        running = {job.id for job in going.values()}
        places = set(self._context.runners.busy()) - set(going)
        free = [job for job in self._candidates() if self._context.runners.place_of(job) not in places]
        return sorted(free, key=lambda job: (-job.spec.priority, job.id not in running))

    def _candidates(self) -> list[Job]:
        """Return the jobs that could run now, best first."""
        context, now_s = self._context, self._context.clock.monotonic_s()
        ready = []
        for job in context.store.all():
            waited = False
            if self._stands_back(job):
                continue
            if job.spec.kind is JobKind.ATTACHED and not context.runners.host.attachments.answers(job.id):
                continue
            if job.state is JobState.BACKOFF:
                self._forget(job)  # its bundle may not have been readable
                waited = now_s >= self._retry_at(job, now_s)
            else:
                context.retry_at_s.pop(job.id, None)
            has_data = bool(context.inboxes.state(job.spec.name).new) if job.spec.waits_for_data else False
            if self._lacks_board(job):
                continue
            if may_run(job, has_data=has_data, waited=waited):
                ready.append(job)
        return order(ready)

    def _forget(self, job: Job) -> None:
        """Forget a job's checks, so that they are repeated before its next start."""
        self._fitting.pop(job.id, None)
        self._least.pop(job.id, None)

    def _lacks_board(self, job: Job) -> bool:
        """Return whether a job's board was missing, and no serial device has been plugged in or removed since."""
        context = self._context
        missed = context.without_board.get(job.id)
        if missed is None or job.state is JobState.RUNNING:
            return False
        if not job.state.is_over and plugged_in(context.runners.place_of(job)) == missed:
            return True
        del context.without_board[job.id]
        return False

    def _retry_at(self, job: Job, now_s: float) -> float:
        """Return when a job's backoff ends, counted from when this process first saw the failure."""
        known = self._context.retry_at_s.get(job.id)
        if known is None or known[0] != job.failures:
            known = (job.failures, now_s + (job.retry_after_s or 0.0))
            self._context.retry_at_s[job.id] = known
        return known[1]

    def _conditions(self, decision: PolicyDecision) -> RunConditions:
        return run_conditions(self._context, granted_limits(self._context.config.policy, decision.state))


def granted_limits(policy: Policy, state: State) -> ResourceLimits:
    """Return how much of the machine a worker may use in `state`."""
    return policy.in_use if state is State.TRAIN_GENTLY else policy.not_in_use


def run_conditions(context: DaemonContext, limits: ResourceLimits) -> RunConditions:
    """Return the current run conditions with these limits."""
    policy, options, readings = context.config.policy, context.config.options, context.admission.facts
    warm = readings.temperature_c is not None and readings.temperature_c > policy.max_temperature_c - WARM_MARGIN_C
    return RunConditions(
        limits=limits,
        total_memory_bytes=readings.total_memory_bytes,
        warm=warm,
        flash_budget_bytes_per_day=policy.flash_write_budget_bytes_per_day,
        flash_written_today_bytes=context.wear.today_bytes(),
        give_up_after=options.max_failures_without_progress,
        job_log_bytes=options.job_log_bytes,
        devices=readings.devices,
        solving=PeerSolving(options.solve_on, str(context.settings.runtime_dir)) if options.solve_on else None,
    )
