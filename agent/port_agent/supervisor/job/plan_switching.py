"""Adapt a run to its conditions: the plan, the limits, the time of a checkpoint, and
whether the deadline can be met.
"""

from dataclasses import replace

from port_agent.energy.drift import Correction
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import Job
from port_agent.supervisor.job.attachments import AttachedProgram
from port_agent.supervisor.job.bookkeeping import JobRecords
from port_agent.supervisor.job.plan_choice import (
    PlanFigures,
    WriteAllowance,
    at_measured_speed,
    checkpoint_interval_s,
    choose_plan,
    data_limit,
    eta_s,
    smaller_plan,
)
from port_agent.supervisor.job.run_state import RunConditions, WorkerRun
from port_agent.system.cgroup import CgroupError
from port_agent.system.clock import Clock, day_left_s
from port_planner.base.units import format_bytes, format_seconds

PLAN_SWITCH_PAUSE_S = 30.0
"""Seconds that the figures need to settle after a change of plan."""
PRESSURE_MEMORY_S = 900.0
"""Seconds for which the smaller plan stays after memory pressure, so that plans do not
alternate with the system's load.
"""
CORRECTION_NOTE_S = 1800.0
"""Seconds between notes of a correction.

A noisy machine corrects its figures repeatedly; history and disk need not record each time.
"""


class PlanSwitcher:
    """Chooses plans at the start of a run and during it."""

    def __init__(self, records: JobRecords, health: HealthBoard, clock: Clock) -> None:
        self._records, self._health, self._clock = records, health, clock

    def choose(self, job: Job, plans: tuple[PlanFigures, ...], conditions: RunConditions) -> PlanFigures | None:
        """Return the plan to run, or None when none fits."""
        deadline = job.spec.deadline_at
        return choose_plan(
            at_measured_speed(plans, job.plan, job.measured.step_s),
            conditions.memory_bytes,
            job.memory_ceiling_bytes,
            steps_left=None if job.total_steps is None else max(0, job.total_steps - job.step),
            time_left_s=None if deadline is None else deadline - self._clock.wall_s(),
            allowance=WriteAllowance(conditions.flash_left_bytes, day_left_s(self._clock.wall_s())),
            warm=conditions.warm,
        )

    def adapt(self, run: WorkerRun, job: Job, conditions: RunConditions, pressure: bool) -> bool:
        """Adapt a training run to its conditions; returns False if no plan fits any more."""
        now_s = self._clock.monotonic_s()
        self._watch_deadline(job)
        self._make_checkpoints(run, job, conditions, now_s)
        wanted = run.figures
        if run.plans and now_s - run.switched_at_s >= PLAN_SWITCH_PAUSE_S:
            wanted = self._wanted_plan(run, job, conditions, pressure)
            if wanted is None:
                return False
        changes = wanted is not None and wanted.index != run.plan
        if wanted is not None and wanted.peak_bytes > run.peak_bytes:
            run.granted = wanted  # a smaller plan's limit applies once the worker has switched to it
        self.set_limits(run, conditions)
        if wanted is not None and changes:
            run.switched_at_s = now_s
            run.worker.switch_plan(
                wanted.index, "memory pressure" if pressure else "limits, deadline, flash allowance or temperature"
            )
        return True

    def switched(self, run: WorkerRun, conditions: RunConditions) -> None:
        """Handle the worker's change of plan: from now on, only the new plan's memory is granted."""
        run.granted = run.figures or run.granted
        self.set_limits(run, conditions)

    def set_limits(self, run: WorkerRun, conditions: RunConditions) -> None:
        """Set the limits of the worker's cgroup to those of the granted plan, unless they already are."""
        limits = conditions.worker_limits(run.granted)
        if limits == run.limits:
            return
        run.limits = limits
        if run.granted is not None:
            run.worker.widen_limit(data_limit(run.granted.peak_bytes))
        if isinstance(run.worker, AttachedProgram):
            run.worker.limit_cpu(limits.cpu_percent)
        if run.worker.group is None:
            return
        try:
            run.worker.group.configure(limits)
        except CgroupError as error:
            self._records.report("no-memory-limit", reason=error.reason)

    def correct(self, run: WorkerRun, correction: Correction) -> None:
        """Adopt the measured times of steps, so that the next look chooses a plan again."""
        corrected = []
        for plan in run.plans:
            step_s, step_joules = correction.apply(plan.step_s, plan.step_joules)
            corrected.append(replace(plan, step_s=step_s, step_joules=step_joules))
        run.plans = tuple(corrected)
        now_s = self._clock.monotonic_s()
        if run.corrected_s is None or now_s - run.corrected_s >= CORRECTION_NOTE_S:
            run.corrected_s = now_s
            self._records.note(run.job_id, "plan", correction.text)

    def _wanted_plan(self, run: WorkerRun, job: Job, conditions: RunConditions, pressure: bool) -> PlanFigures | None:
        now_s = self._clock.monotonic_s()
        if pressure:
            run.pressed_until_s = now_s + PRESSURE_MEMORY_S
            return smaller_plan(run.plans, run.all_bytes) or run.figures
        plans = run.plans
        if now_s < run.pressed_until_s:
            plans = tuple(plan for plan in plans if plan.all_bytes <= run.all_bytes)
        return self.choose(job, plans, conditions)

    def _make_checkpoints(self, run: WorkerRun, job: Job, conditions: RunConditions, now_s: float) -> None:
        if job.spec.checkpoint_every is not None:
            return
        measured, budget = job.measured, conditions.flash_budget_bytes_per_day
        every_s = checkpoint_interval_s(measured.checkpoint_s, measured.checkpoint_bytes, budget)
        if now_s - run.last_checkpoint_s >= every_s:
            run.last_checkpoint_s = now_s
            run.worker.checkpoint()

    def _watch_deadline(self, job: Job) -> None:
        left_s = eta_s(job.step, job.total_steps, job.measured.step_s)
        if job.spec.deadline_at is None or left_s is None:
            return
        until_s = job.spec.deadline_at - self._clock.wall_s()
        if left_s <= until_s:
            self._health.clear("deadline-missed", str(job.id))
            return
        self._records.report(
            "deadline-missed",
            key=str(job.id),
            job=job.label,
            needed=format_seconds(left_s),
            left=format_seconds(until_s) if until_s > 0 else "nothing",
        )


def no_plan_fits(conditions: RunConditions) -> str:
    """Return the reason for leaving, for the user."""
    return f"no plan fits into {format_bytes(conditions.memory_bytes or 0)}"
