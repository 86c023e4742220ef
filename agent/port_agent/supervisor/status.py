"""The supervisor's state, as answers of the control interface."""

import math
from collections.abc import Sequence

from port_agent.control.http_answers import AgentStatus, DeviceState, FlashLife, IdleSignalState, JobSummary
from port_agent.energy.wear import outlook
from port_agent.facts import Facts
from port_agent.jobs.job import Job, JobState
from port_agent.jobs.store import SetAsideJob
from port_agent.policy.decide import next_window
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.job.exit_status import LEFT_BECAUSE
from port_agent.supervisor.job.plan_choice import eta_s
from port_agent.supervisor.job.worker_process import RequestedState
from port_agent.supervisor.sleep_inhibitor import sleep_text
from port_agent.system.clock import local_time

_SHOWN_WAITING = 5


def agent_status(context: DaemonContext) -> AgentStatus:
    """Return everything that one screen shows."""
    decision, wall_s, now_s = context.admission.decision, context.clock.wall_s(), context.clock.monotonic_s()
    runs = context.runners.statuses()
    running = {run.id for run in runs}
    alive = [job for job in context.store.all() if not job.state.is_over]
    state, reasons = _headline(context, alive)
    opens = next_window(context.config.policy, local_time(wall_s))
    paused = context.pause.until()
    return AgentStatus(
        time=wall_s,
        uptime_s=now_s - context.started_s,
        state=state,
        may_train=decision is not None and decision.state.trains,
        reasons=tuple(reasons),
        conditions=decision.reasons if decision else (),
        codes=decision.codes if decision else (),
        paused_until=None if paused is None or math.isinf(paused) else paused,
        job=context.runners.shown.status(),
        running=runs,
        waiting=tuple(job_summary(context, job) for job in alive if job.id not in running),
        facts=device_state(context.admission.facts),
        flash_written_today_bytes=context.wear.today_bytes(),
        flash_budget_bytes=context.config.policy.flash_write_budget_bytes_per_day,
        flash_life=_flash_life(context),
        next_window=opens.timestamp() if opens else None,
        sleep=sleep_text(context.sleep, context.config.policy),
        usual_day_s=context.usual_times.usual_day_s(),
        energy=context.meter.snapshot().as_dict() if context.meter else None,
        health=tuple(context.health.items(now_s)),
    )


def pause_text(context: DaemonContext) -> str:
    """Return why everything is paused and until when; empty for no pause."""
    until = context.pause.until()
    if until is None:
        return ""
    end = "" if math.isinf(until) else f" until {local_time(until):%a %d %b %H:%M}"
    return f"{context.pause.reason}{end}"


def _flash_life(context: DaemonContext) -> FlashLife | None:
    medium = context.medium
    if medium is None or medium.endurance_bytes is None:
        return None
    rate = context.wear.daily_bytes()
    left = int(medium.endurance_bytes * (1.0 - (context.used_life or 0.0)))
    years = outlook(round(rate), 1.0, medium.endurance_bytes, context.used_life or 0.0).years_left
    return FlashLife(medium.kind.value, medium.endurance_bytes, medium.assumed, context.used_life, left, rate, years)


def device_state(facts: Facts) -> DeviceState:
    """Return the sensors' readings, in the terms of the control interface."""
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


def job_summary(context: DaemonContext, job: Job) -> JobSummary:
    """Return one line about a job."""
    retry = context.retry_at_s.get(job.id)
    waits_s = None if retry is None else max(0.0, retry[1] - context.clock.monotonic_s())
    return JobSummary(
        id=job.id,
        name=job.spec.name,
        kind=job.spec.kind.value,
        state=job.state.name.lower(),
        state_number=int(job.state),
        reason=_why_it_waits(context, job),
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


def _why_it_waits(context: DaemonContext, job: Job) -> str:
    """Return the known reason why a job does not run.

    The reason for its last interruption no longer counts once the policy lets jobs train.
    """
    decision = context.admission.decision
    may_train = decision is not None and decision.state.trains
    return "" if may_train and job.state is JobState.QUEUED and job.reason.startswith(LEFT_BECAUSE) else job.reason


def set_aside_summary(job: SetAsideJob) -> JobSummary:
    """Return one line about a stored job that cannot be restored; its state has the number 0."""
    return JobSummary(
        id=job.id, name=job.name, kind="", state="set aside", state_number=0, reason=job.reason, step=0, total_steps=None,
        loss=None, priority=0, deadline_at=None, retry_in_s=None, eta_s=None, submitted_at=0.0,
    )  # fmt: skip


def _headline(context: DaemonContext, alive: Sequence[Job]) -> tuple[str, list[str]]:
    """Return the state in a word, and the reason."""
    shown, decision = context.runners.shown, context.admission.decision
    conditions = list(decision.reasons) if decision else ["starting"]
    if shown.shown_phase is not None and shown.requested is not None:
        wanted = {RequestedState.PAUSE: "paused", RequestedState.LEAVE: "leaving"}
        missing = [runner.waits_for for runner in context.runners if runner.waits_for]
        return wanted.get(shown.requested, shown.shown_phase), [*missing, *conditions]
    if not alive:
        return "idle", ["no jobs; `port-agent job submit job.port` adds one"]
    if decision is not None and decision.state.trains:
        return "waiting", [
            f"{job.label}: {_why_it_waits(context, job) or job.state.name.lower()}" for job in alive[:_SHOWN_WAITING]
        ]
    return "waiting", conditions
