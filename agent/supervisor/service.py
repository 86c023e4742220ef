"""What a user can ask of a running supervisor: the verbs behind the control interface."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.jobs.model import Job, JobKind, JobRequestError, JobSpec, JobState, to_record
from agent.jobs.store import HistoryEntry
from agent.policy.config import describe, restart_needed
from agent.policy.decide import next_window
from agent.supervisor.context import PAUSE_SETTING, Core
from agent.supervisor.job.plan_choice import eta_s
from agent.system.atomic_file import sync_directory
from agent.system.clock import local_time

BUNDLE_NAME = "bundle.port"
_SPEC_FIELDS = frozenset(JobSpec.__dataclass_fields__) - {"bundle", "kind", "arguments"}


class Service:
    """The verbs. Every change wakes the loop, which then acts on it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # --- jobs

    async def submit(self, request: dict[str, Any], upload: Path | None) -> Job:
        """Return the new job, durable; `upload` is the bundle as it arrived, which becomes the job's own."""
        core = self._core
        spec = _spec(request, upload)

        def prepare(directory: Path) -> None:
            if upload is not None:
                upload.rename(directory / BUNDLE_NAME)
                sync_directory(directory)
            if spec.waits_for_data:
                core.inboxes.create(spec.name)

        job = await asyncio.to_thread(core.store.add, spec, core.clock.wall_s(), prepare)
        self._note(job, "submitted", f"priority {spec.priority}")
        if spec.deadline_at is not None:
            core.timers.set_deadline(job.id, spec.deadline_at)
        core.wake.set()
        return job

    def pause_job(self, job: Job) -> Job:
        """Hold a job until `resume_job`; its worker gives the memory back."""
        if job.state.is_over:
            raise JobRequestError(f"job {job.label} is over ({job.state.name.lower()}); nothing to pause", job.id)
        return self._change(replace(job, state=JobState.PAUSED, reason="paused by you"), "paused")

    def resume_job(self, job: Job) -> Job:
        """Let a paused, waiting or given-up job go on."""
        if job.state in (JobState.FINISHED, JobState.CANCELLED):
            raise JobRequestError(f"job {job.label} is {job.state.name.lower()}; submit it again", job.id)
        if job.state in (JobState.QUEUED, JobState.RUNNING, JobState.WAITING_DATA):
            return job
        if job.state is JobState.FAILED:
            self._core.inboxes.drop_round(self._core.store.job_dir(job.id), job.rounds + 1)
        in_round = (self._core.store.job_dir(job.id) / "rounds" / str(job.rounds + 1)).is_dir()
        waits = job.spec.waits_for_data and not in_round
        state = JobState.WAITING_DATA if waits else JobState.QUEUED
        self._core.health.clear("job-given-up", str(job.id))
        return self._change(replace(job, state=state, reason="", failures=0, finished_at=None), "resumed")

    def cancel_job(self, job: Job) -> Job:
        """End a job for good; its files stay until the history is trimmed."""
        if job.state.is_over:
            raise JobRequestError(f"job {job.label} is already over ({job.state.name.lower()})", job.id)
        self._core.timers.set_deadline(job.id, None)
        self._core.inboxes.forget(job.spec.name)
        now = self._core.clock.wall_s()
        return self._change(
            replace(job, state=JobState.CANCELLED, reason="cancelled by you", finished_at=now), "cancelled"
        )

    def change_spec(self, job: Job, **changes: Any) -> Job:
        """Change priority or deadline of a job."""
        job = replace(job, spec=replace(job.spec, **changes))
        if "deadline_at" in changes:
            self._core.timers.set_deadline(job.id, changes["deadline_at"])
            self._core.health.clear("deadline-missed", str(job.id))
        return self._change(job, ", ".join(f"{name} is now {value}" for name, value in changes.items()))

    # --- the whole agent

    def pause_all(self, for_s: float | None) -> float:
        """Train nothing for a time, or until `resume_all`; returns the end in Unix time (infinity for good)."""
        until = math.inf if for_s is None else self._core.clock.wall_s() + for_s
        self._core.store.remember(PAUSE_SETTING, repr(until))
        self._core.wake.set()
        return until

    def resume_all(self) -> None:
        """End the pause of everything."""
        self._core.store.remember(PAUSE_SETTING, None)
        self._core.wake.set()

    def reload(self) -> tuple[dict[str, object], list[str]]:
        """Apply the configuration files; raises ConfigError while the old settings stay in force.

        Returns the settings now in force, and the names of those that wait for the next start.
        """
        self._core.reload()
        return describe(self._core.config), restart_needed(self._core.started_with, self._core.config)

    async def settle(self) -> None:
        """Wait until what was asked for is on disk; raises StoreError when the disk refuses (it still holds)."""
        if not await asyncio.to_thread(self._core.store.flush) and self._core.store.trouble is not None:
            raise self._core.store.trouble

    # --- looking

    def status(self) -> dict[str, Any]:
        """Return everything that one screen shows."""
        core = self._core
        decision, facts, now_s = core.admission.decision, core.admission.facts, core.clock.monotonic_s()
        wall_s = core.clock.wall_s()
        jobs = core.store.all()
        waiting = [job for job in jobs if not job.state.is_over]
        state, reasons = self._headline(waiting)
        opens = next_window(core.config.policy, local_time(wall_s))
        paused = core.paused_until()
        return {
            "v": 1,
            "time": wall_s,
            "uptime_s": now_s - core.started_s,
            "state": state,
            "may_train": decision is not None and decision.state.trains,
            "reasons": reasons,
            "conditions": list(decision.reasons) if decision else [],
            "codes": list(decision.codes) if decision else [],
            "paused_until": None if paused is None or math.isinf(paused) else paused,
            "job": core.runner.describe(),
            "waiting": [self.brief(job) for job in waiting if core.runner.job is None or job.id != core.runner.job.id],
            "facts": {
                "power": facts.power.value,
                "power_detail": facts.power_detail,
                "battery_percent": facts.battery_percent,
                "temperature_c": facts.temperature_c,
                "throttled": facts.throttle.now.value,
                "voices": [
                    {"name": signal.name, "idle": signal.idle.value, "detail": signal.detail}
                    for signal in facts.idle_signals
                ],
                "free_disk_bytes": facts.free_disk_bytes,
                "available_memory_bytes": facts.available_memory_bytes,
                "memory_pressure_percent": facts.memory_pressure_percent,
                "online": facts.online.value,
                "metered": facts.metered.value,
            },
            "flash_written_today_bytes": core.wear.today_bytes(),
            "flash_budget_bytes": core.config.policy.flash_write_budget_bytes_per_day,
            "next_window": opens.timestamp() if opens else None,
            "energy": core.meter.snapshot().as_dict() if core.meter else None,
            "health": self.health(),
        }

    def health(self) -> list[dict[str, object]]:
        """Return what is wrong now, the worst first."""
        return [item.as_json() for item in self._core.health.items(self._core.clock.monotonic_s())]

    def brief(self, job: Job) -> dict[str, Any]:
        """Return one line about a job."""
        left = eta_s(job.step, job.total_steps, job.measured.step_s)
        retry = self._core.retry_at_s.get(job.id)
        waits_s = None if retry is None else max(0.0, retry[1] - self._core.clock.monotonic_s())
        return {
            "id": job.id,
            "name": job.spec.name,
            "kind": job.spec.kind.value,
            "state": job.state.name.lower(),
            "state_number": int(job.state),
            "reason": job.reason,
            "step": job.step,
            "total_steps": job.total_steps,
            "loss": job.loss,
            "priority": job.spec.priority,
            "deadline_at": job.spec.deadline_at,
            "retry_in_s": waits_s if job.state is JobState.BACKOFF else None,
            "eta_s": None if job.state.is_over else left,
            "submitted_at": job.submitted_at,
        }

    def detail(self, job: Job, history: list[HistoryEntry]) -> dict[str, Any]:
        """Return everything about a job."""
        store = self._core.store
        entries = [{"at": entry.at, "kind": entry.kind, "text": entry.text} for entry in history]
        inbox = str(self._core.inboxes.root / job.spec.name) if job.spec.waits_for_data else None
        record = to_record(job) | self.brief(job)
        return record | {"history": entries, "directory": str(store.job_dir(job.id)), "inbox": inbox}

    def result(self, job: Job) -> Path:
        """Return the file with the trained weights."""
        if job.result is None or not Path(job.result).is_file():
            raise JobRequestError(f"job {job.label} has no result yet ({job.state.name.lower()})", job.id)
        return Path(job.result)

    # --- inside

    def _headline(self, waiting: list[Job]) -> tuple[str, list[str]]:
        core = self._core
        phase = core.runner.phase
        decision = core.admission.decision
        conditions = list(decision.reasons) if decision else ["starting"]
        if phase is not None and core.runner.requested is not None:
            wish = core.runner.requested.value
            shown = {"train": phase.value, "pause": "paused", "leave": "leaving"}[wish]
            return shown, conditions
        if not waiting:
            return "idle", ["no jobs; `port-agent submit job.port` adds one"]
        if decision is not None and decision.state.trains:
            return "waiting", [f"{job.label}: {job.reason or job.state.name.lower()}" for job in waiting[:5]]
        return "waiting", conditions

    def _change(self, job: Job, what: str) -> Job:
        self._core.store.save(job)
        self._note(job, "request", what)
        self._core.wake.set()
        return job

    def _note(self, job: Job, kind: str, text: str) -> None:
        self._core.store.note(self._core.clock.wall_s(), job.id, kind, text)


def _spec(request: dict[str, Any], upload: Path | None) -> JobSpec:
    """Return the job that a request describes; every value is checked here, at the boundary."""
    known = {name: value for name, value in request.items() if name in _SPEC_FIELDS and value is not None}
    unknown = set(request) - _SPEC_FIELDS - {"kind", "upload", "bundle", "arguments", "v"}
    if unknown:
        raise JobRequestError(f"unknown settings of a job: {', '.join(sorted(unknown))}")
    types: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "data": (str,),
        "epochs": (int,),
        "steps": (int,),
        "checkpoint_every": (int,),
        "priority": (int,),
        "deadline_at": (int, float),
        "waits_for_data": (bool,),
    }
    for name, value in known.items():
        if not isinstance(value, types[name]) or (isinstance(value, bool) and bool not in types[name]):
            raise JobRequestError(f"{name} is {value!r}; expected {types[name][0].__name__}")
    arguments = request.get("arguments") or []
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        raise JobRequestError(f"arguments are {arguments!r}; expected a list of words")
    try:
        kind = JobKind(request.get("kind", "train"))
    except ValueError as error:
        raise JobRequestError(f"there is no job kind {request.get('kind')!r}; use train or mcu") from error
    bundle = BUNDLE_NAME if upload is not None else request.get("bundle")
    if bundle is not None and upload is None and not (isinstance(bundle, str) and Path(bundle).exists()):
        raise JobRequestError(f"the agent cannot read the bundle {bundle!r}; let the client upload it")
    data = known.get("data")
    if data is not None and not Path(data).is_dir():
        raise JobRequestError(
            f"the agent cannot see the directory {data}; submit with --inbox and `port-agent feed` the files"
        )
    if "name" not in known:
        raise JobRequestError("a job needs a name")
    return JobSpec(**known, kind=kind, bundle=bundle, arguments=tuple(arguments))
