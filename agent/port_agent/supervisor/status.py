"""What a supervisor shows of itself: its parts read into the answers of the control interface."""

import math
from collections.abc import Sequence

from port_agent.control.answers import AgentStatus, DeviceState, FlashLife, IdleSignalState, JobSummary
from port_agent.energy.wear import outlook
from port_agent.facts import Facts
from port_agent.jobs.model import Job, JobState
from port_agent.jobs.store import SetAsideJob
from port_agent.policy.decide import next_window
from port_agent.supervisor.context import Core
from port_agent.supervisor.job.plans.choice import eta_s
from port_agent.supervisor.job.worker_process import RequestedState
from port_agent.system.clock import local_time

_SHOWN_WAITING = 5


def agent_status(core: Core) -> AgentStatus:
    """Return everything that one screen shows."""
    decision, wall_s, now_s = core.admission.decision, core.clock.wall_s(), core.clock.monotonic_s()
    runs = core.runners.statuses()
    running = {run.id for run in runs}
    alive = [job for job in core.store.all() if not job.state.is_over]
    state, reasons = _headline(core, alive)
    opens = next_window(core.config.policy, local_time(wall_s))
    paused = core.paused_until()
    return AgentStatus(
        time=wall_s,
        uptime_s=now_s - core.started_s,
        state=state,
        may_train=decision is not None and decision.state.trains,
        reasons=tuple(reasons),
        conditions=decision.reasons if decision else (),
        codes=decision.codes if decision else (),
        paused_until=None if paused is None or math.isinf(paused) else paused,
        job=core.runners.shown.status(),
        running=runs,
        waiting=tuple(job_summary(core, job) for job in alive if job.id not in running),
        facts=device_state(core.admission.facts),
        flash_written_today_bytes=core.wear.today_bytes(),
        flash_budget_bytes=core.config.policy.flash_write_budget_bytes_per_day,
        flash_life=_flash_life(core),
        next_window=opens.timestamp() if opens else None,
        usual_day_s=core.usual_times.usual_day_s(),
        energy=core.meter.snapshot().as_dict() if core.meter else None,
        health=tuple(core.health.items(now_s)),
    )


def _flash_life(core: Core) -> FlashLife | None:
    medium = core.medium
    if medium is None or medium.endurance_bytes is None:
        return None
    rate = core.wear.daily_bytes()
    left = int(medium.endurance_bytes * (1.0 - (core.used_life or 0.0)))
    years = outlook(round(rate), 1.0, medium.endurance_bytes, core.used_life or 0.0).years_left
    return FlashLife(medium.kind.value, medium.endurance_bytes, medium.assumed, core.used_life, left, rate, years)


def device_state(facts: Facts) -> DeviceState:
    """Return what the sensors say, in the words of the control interface."""
    return DeviceState(
        power=facts.power.value,
        power_detail=facts.power_detail,
        battery_percent=facts.battery_percent,
        temperature_c=facts.temperature_c,
        throttled=facts.throttle.now.value,
        idle_signals=tuple(
            IdleSignalState(signal.name, signal.idle.value, signal.detail) for signal in facts.idle_signals
        ),
        free_disk_bytes=facts.free_disk_bytes,
        available_memory_bytes=facts.available_memory_bytes,
        memory_pressure_percent=facts.memory_pressure_percent,
        online=facts.online.value,
        metered=facts.metered.value,
    )


def job_summary(core: Core, job: Job) -> JobSummary:
    """Return one line about a job."""
    retry = core.retry_at_s.get(job.id)
    waits_s = None if retry is None else max(0.0, retry[1] - core.clock.monotonic_s())
    return JobSummary(
        id=job.id,
        name=job.spec.name,
        kind=job.spec.kind.value,
        state=job.state.name.lower(),
        state_number=int(job.state),
        reason=job.reason,
        step=job.step,
        total_steps=job.total_steps,
        loss=job.loss,
        priority=job.spec.priority,
        deadline_at=job.spec.deadline_at,
        retry_in_s=waits_s if job.state is JobState.BACKOFF else None,
        eta_s=None if job.state.is_over else eta_s(job.step, job.total_steps, job.measured.step_s),
        submitted_at=job.submitted_at,
        owner=job.spec.owner,
        on=job.away.name if job.away is not None and job.state is JobState.AWAY else None,
        guest_of=job.spec.guest.owner if job.spec.guest is not None else None,
    )


def set_aside_summary(job: SetAsideJob) -> JobSummary:
    """Return one line about a stored job that cannot be restored; its state's number is 0."""
    return JobSummary(
        id=job.id, name=job.name, kind="", state="set aside", state_number=0, reason=job.reason, step=0, total_steps=None,
        loss=None, priority=0, deadline_at=None, retry_in_s=None, eta_s=None, submitted_at=0.0,
    )  # fmt: skip


def _headline(core: Core, alive: Sequence[Job]) -> tuple[str, list[str]]:
    """Return the state in a word, and why."""
    shown, decision = core.runners.shown, core.admission.decision
    conditions = list(decision.reasons) if decision else ["starting"]
    if shown.shown_phase is not None and shown.requested is not None:
        asked = {RequestedState.PAUSE: "paused", RequestedState.LEAVE: "leaving"}
        missing = [runner.waits_for for runner in core.runners if runner.waits_for]
        return asked.get(shown.requested, shown.shown_phase), [*missing, *conditions]
    if not alive:
        return "idle", ["no jobs; `port-agent submit job.port` adds one"]
    if decision is not None and decision.state.trains:
        return "waiting", [f"{job.label}: {job.reason or job.state.name.lower()}" for job in alive[:_SHOWN_WAITING]]
    return "waiting", conditions
