"""The one running job: its worker process, its plan, its progress, and what becomes of it when the worker ends."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agent.cgroup import CgroupError, DelegatedTree, WorkerGroup, WorkerLimits
from agent.energy.drift import Correction
from agent.health import HealthBoard
from agent.jobs import Job, JobError, JobKind, JobState, Outcome
from agent.jobs_store import JobStore
from agent.policy import Limits
from agent.supervisor.clock import Clock
from agent.supervisor.commands import (
    BundleFacts,
    RunPaths,
    WorkerKind,
    bundle_path,
    checkpoint_steps,
    worker_command,
)
from agent.supervisor.inbox import Inboxes
from agent.supervisor.instance import LockFile
from agent.supervisor.joblog import JobLog
from agent.supervisor.outcome import WorkerExit, classify
from agent.supervisor.plans import (
    PlanFigures,
    at_measured_speed,
    checkpoint_interval_s,
    choose_plan,
    data_limit,
    eta_s,
    memory_max,
    smaller_plan,
)
from agent.supervisor.process import Launch, Phase, Wish, WorkerProcess
from agent.supervisor.verdict import Bookkeeper, Ended
from planner.errors import PortError
from planner.units import format_bytes, format_seconds

PROGRESS_FLUSH_S = 60.0
"""Progress goes to the database this often: the worker's own checkpoints are what counts after a power cut."""
_STEP_SMOOTHING = 0.2
PLAN_SWITCH_PAUSE_S = 30.0
"""After a switch of the plan the figures need this long to settle."""


FAREWELL_S = 10.0
"""How long a worker that may stay a little gets for its last checkpoint."""
PRESSURE_MEMORY_S = 900.0
"""After memory pressure the smaller plan stays this long, lest the plans swing with the system's load."""


class Meter(Protocol):
    """What the energy meter wants to hear of a running job."""

    def on_worker_start(self, job: str, now_s: float, label: str = "") -> None:
        """A worker was started."""

    def on_worker_stop(self, job: str, now_s: float) -> None:
        """The worker has ended."""

    def on_event(self, job: str, event: Mapping[str, object], now_s: float) -> None:
        """The worker reported something."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run depends on at its start."""

    limits: Limits
    total_memory_bytes: int | None
    warm: bool = False
    flash_budget_bytes_per_day: int = 1 << 32
    give_up_after: int = 6
    job_log_bytes: int = 1 << 20


@dataclass(slots=True)
class _Run:
    """The state of one worker process."""

    job_id: int
    worker: WorkerProcess
    log: JobLog
    plans: tuple[PlanFigures, ...]
    plan: int | None
    gentle: bool
    limit_bytes: int | None
    round: int | None
    last_checkpoint_s: float
    last_flush_s: float
    switched_at_s: float
    last_step_s: float | None = None
    """When the newest step was reported; None after a pause, which is no part of a step."""
    pressed_until_s: float = 0.0
    """Until then no larger plan is taken: the system was short of memory."""
    farewell_at_s: float | None = None
    """When it was asked for a last checkpoint, after which it leaves."""
    out: str | None = None


class Runner:
    """Starts, steers and ends the worker of one job at a time."""

    def __init__(
        self,
        store: JobStore,
        inboxes: Inboxes,
        health: HealthBoard,
        clock: Clock,
        kinds: Mapping[JobKind, WorkerKind],
        worker_lock: Callable[[], LockFile],
        on_change: Callable[[], None],
    ) -> None:
        self.tree: DelegatedTree | None = None
        self.meter: Meter | None = None
        self._store, self._inboxes, self._health, self._clock = store, inboxes, health, clock
        self._kinds, self._worker_lock, self._on_change = kinds, worker_lock, on_change
        self._books = Bookkeeper(store, health, clock)
        self._run: _Run | None = None
        self._surroundings = Surroundings(Limits(), None)
        self.written_bytes = 0
        """Flash writes that workers reported and nobody has fetched yet."""

    # --- what others ask

    @property
    def job(self) -> Job | None:
        """The job that has a worker, or None."""
        return None if self._run is None else self._store.get(self._run.job_id)

    @property
    def phase(self) -> Phase | None:
        """What the worker does, or None without one."""
        return None if self._run is None else self._run.worker.phase

    @property
    def wish(self) -> Wish | None:
        """What was last asked of the worker, or None without one."""
        return None if self._run is None else self._run.worker.wish

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return None if self._run is None else self._run.worker.pid

    def own_cpu_s(self) -> float:
        """Return CPU seconds of this process and its workers, living and ended."""
        times = os.times()
        living = 0.0 if self._run is None else self._worker_cpu_s(self._run.worker)
        return times.user + times.system + times.children_user + times.children_system + living

    def _worker_cpu_s(self, worker: WorkerProcess) -> float:
        used = worker.group.cpu_s() if worker.group is not None else None
        if used is not None:
            return used
        if sys.platform == "darwin":
            return _mac_cpu_s(worker.pid)
        try:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

    def describe(self) -> dict[str, Any] | None:
        """Return the run as plain values for `status`."""
        run = self._run
        if run is None:
            return None
        job = self._store.get(run.job_id)
        figures = next((plan for plan in run.plans if plan.index == run.plan), None)
        left_s = eta_s(job.step, job.total_steps, job.measured.step_s)
        return {
            "id": job.id,
            "name": job.spec.name,
            "kind": job.spec.kind.value,
            "phase": run.worker.phase.value,
            "wish": run.worker.wish.value,
            "pid": run.worker.pid,
            "step": job.step,
            "total_steps": job.total_steps,
            "loss": job.loss,
            "step_s": job.measured.step_s,
            "eta_s": left_s,
            "plan": run.plan,
            "plans": len(run.plans),
            "planned_peak_bytes": figures.peak_bytes if figures else None,
            "memory_limit_bytes": run.limit_bytes if run.worker.group else None,
            "peak_rss_bytes": job.measured.peak_rss_bytes,
            "planned_joules": job.planned_joules,
            "deadline_at": job.spec.deadline_at,
        }

    # --- starting

    def start(self, job: Job, around: Surroundings, gentle: bool) -> bool:
        """Start the worker of `job`; returns False when it cannot run now (a health item or its state says why)."""
        if self._run is not None:
            raise JobError(f"job {self._run.job_id} is still running; one worker at a time", job.id)
        self._surroundings, self._books.log_bytes = around, around.job_log_bytes
        kind = self._kinds[job.spec.kind]
        job_dir = self._store.job_dir(job.id)
        bundle = bundle_path(job, job_dir)
        try:
            facts = kind.read_bundle(bundle) if bundle is not None else BundleFacts()
        except (PortError, OSError) as error:
            self._settle(job, Outcome.IMPOSSIBLE, f"the bundle cannot be used: {error}")
            return False
        plans, limit = facts.plans, around.limits.memory_limit(around.total_memory_bytes)
        plan = self._choose(job, plans, limit)
        if plans and plan is None:
            self._books.no_fit(job, plans, limit)
            return False
        self._health.clear("job-does-not-fit", str(job.id))
        if job.spec.waits_for_data and not self._inboxes.has_round(job.spec.name, job_dir, job.rounds + 1):
            self._store.save(replace(job, state=JobState.WAITING_DATA))  # its round was over when the agent was killed
            return False
        try:
            paths = self._paths(job, job_dir, bundle)
            return self._spawn(job, kind, paths, facts, plan, around, gentle)
        except OSError as error:
            self._settle(job, Outcome.FAILED, f"the worker cannot be started: {error}")
            return False

    def _choose(self, job: Job, plans: tuple[PlanFigures, ...], limit: int | None) -> PlanFigures | None:
        deadline = job.spec.deadline_at
        return choose_plan(
            at_measured_speed(plans, job.plan, job.measured.step_s),
            limit,
            job.memory_ceiling_bytes,
            steps_left=None if job.total_steps is None else max(0, job.total_steps - job.step),
            time_left_s=None if deadline is None else deadline - self._clock.wall_s(),
            warm=self._surroundings.warm,
        )

    def _paths(self, job: Job, job_dir: Path, bundle: Path | None) -> RunPaths:
        if not job.spec.waits_for_data:
            return RunPaths(job_dir, bundle, Path(job.spec.data) if job.spec.data else None)
        number = job.rounds + 1
        return RunPaths(job_dir, bundle, self._inboxes.round_directory(job.spec.name, job_dir, number), number)

    def _spawn(
        self,
        job: Job,
        kind: WorkerKind,
        paths: RunPaths,
        facts: BundleFacts,
        plan: PlanFigures | None,
        around: Surroundings,
        gentle: bool,
    ) -> bool:
        now_s = self._clock.monotonic_s()
        limit = memory_max(plan.peak_bytes) if plan else around.limits.memory_limit(around.total_memory_bytes)
        lock = self._worker_lock()
        group: WorkerGroup | None = None
        try:
            if not lock.try_lock():
                raise OSError("the worker of an earlier supervisor is still there")
            paths.state.mkdir(exist_ok=True)
            group = self._group(job, limit, around)
            every = checkpoint_steps(job, around.flash_budget_bytes_per_day)
            command = worker_command(kind, job, paths, plan.index if plan else None, every)
            belt = data_limit(plan.peak_bytes) if plan else None
            launch = Launch(command, paths.job_dir, group, belt, kind.environment(facts, plan))
            log = JobLog(paths.job_dir, around.job_log_bytes)
            worker = self._worker(launch, log)
            worker.start(lock)
            lock.write(str(worker.pid))
        except OSError:
            if group is not None:
                group.remove()
            raise
        finally:
            lock.close()
        index = plan.index if plan else None
        self._run = _Run(
            job.id,
            worker,
            log,
            facts.plans,
            index,
            gentle,
            limit,
            paths.round,
            now_s,
            now_s,
            now_s - PLAN_SWITCH_PAUSE_S,
        )
        started = job.started_at if job.started_at is not None else self._clock.wall_s()
        self._store.save(
            replace(job, state=JobState.RUNNING, reason="", started_at=started, plan=index, attempts=job.attempts + 1)
        )
        shown = (
            "" if plan is None else f", plan {plan.index + 1} of {len(facts.plans)} ({format_bytes(plan.peak_bytes)})"
        )
        self._books.note(job.id, "started", f"worker {worker.pid} started at step {job.step}{shown}")
        if self.meter is not None:
            self.meter.on_worker_start(str(job.id), now_s, job.label)
        return True

    def _worker(self, launch: Launch, log: JobLog) -> WorkerProcess:
        return WorkerProcess(
            launch,
            on_event=self._on_event,
            on_output=lambda data: log.output(data, self._clock.wall_s()),
            on_exit=self._on_exit,
            on_disobedience=self._on_disobedience,
        )

    def _group(self, job: Job, limit: int | None, around: Surroundings) -> WorkerGroup | None:
        if self.tree is None:
            return None
        try:
            group, missing = self.tree.worker(job.id, WorkerLimits(limit, around.limits.cpu_percent))
        except CgroupError as error:
            self._books.report("no-memory-limit", reason=error.reason)
            return None
        self._health.clear("no-memory-limit")
        if missing:
            self._books.note(job.id, "limits", f"this kernel lacks {', '.join(missing)}")
        return group

    # --- steering

    def pause(self) -> None:
        """Stop between two instructions; the memory stays."""
        if self._run is not None:
            self._run.worker.pause()
            self._run.last_step_s = None

    def resume(self) -> None:
        """Go on after a pause."""
        if self._run is not None:
            self._run.worker.resume()
            self._run.farewell_at_s = None

    def leave(self, reason: str) -> None:
        """Give the memory back within a second."""
        if self._run is not None and self._run.worker.wish is not Wish.LEAVE:
            self._run.log.note(f"leaving: {reason}", self._clock.wall_s())
            self._run.worker.leave()

    def leave_after_checkpoint(self, reason: str) -> None:
        """Leave when the next checkpoint is written, or after `FAREWELL_S`: for reasons that can wait so long."""
        run, now_s = self._run, self._clock.monotonic_s()
        if run is None or run.worker.wish is Wish.LEAVE:
            return
        if run.worker.phase is not Phase.TRAINING or run.worker.wish is not Wish.TRAIN:
            self.leave(reason)
        elif run.farewell_at_s is None:
            run.farewell_at_s, run.last_checkpoint_s = now_s, now_s
            run.worker.checkpoint()
        elif now_s - run.farewell_at_s >= FAREWELL_S:
            self.leave(reason)

    def checkpoint_within(self, span_s: float) -> None:
        """Ask for a checkpoint unless one was made or asked for in the last `span_s`."""
        run, now_s = self._run, self._clock.monotonic_s()
        if run is not None and run.worker.phase is Phase.TRAINING and now_s - run.last_checkpoint_s > span_s:
            run.last_checkpoint_s = now_s
            run.worker.checkpoint()

    def cancel(self) -> None:
        """End the job for good."""
        if self._run is not None:
            self._run.worker.cancel()

    def kill(self) -> None:
        """Kill the worker at once: the supervisor ends and nobody is left to watch."""
        if self._run is not None:
            self._run.worker.kill()

    def adapt(self, around: Surroundings, gentle: bool, pressure: bool) -> None:
        """Fit a training worker to new limits, memory pressure or its deadline; called about once a second."""
        run = self._run
        if run is None or run.worker.wish is not Wish.TRAIN or run.worker.phase is not Phase.TRAINING:
            return
        self._surroundings = around
        now_s, job = self._clock.monotonic_s(), self._store.get(run.job_id)
        if gentle is not run.gentle:
            run.gentle = gentle
            self._set_limits(run, run.limit_bytes)
        self._make_checkpoints(run, job, now_s)
        self._watch_deadline(run, job)
        if not run.plans or now_s - run.switched_at_s < PLAN_SWITCH_PAUSE_S:
            return
        limit = around.limits.memory_limit(around.total_memory_bytes)
        wanted, reason = self._wanted_plan(run, job, limit, pressure)
        if wanted is None:
            self.leave(f"no plan fits into {format_bytes(limit or 0)}")
        elif wanted.index != run.plan:
            run.switched_at_s = now_s
            if wanted.peak_bytes > self._peak(run):
                self._set_limits(run, memory_max(wanted.peak_bytes))
            run.worker.switch_plan(wanted.index, reason)

    def correct(self, correction: Correction) -> None:
        """Take over what the steps really take, so that the next look chooses anew among the plans."""
        run = self._run
        if run is None or str(run.job_id) != correction.job:
            return
        corrected = []
        for plan in run.plans:
            step_s, step_joules = correction.apply(plan.step_s, plan.step_joules)
            corrected.append(replace(plan, step_s=step_s, step_joules=step_joules))
        run.plans = tuple(corrected)
        self._books.note(run.job_id, "plan", correction.text)

    def _wanted_plan(self, run: _Run, job: Job, limit: int | None, pressure: bool) -> tuple[PlanFigures | None, str]:
        now_s = self._clock.monotonic_s()
        if pressure:
            run.pressed_until_s = now_s + PRESSURE_MEMORY_S
            smaller = smaller_plan(run.plans, self._peak(run))
            current = next((plan for plan in run.plans if plan.index == run.plan), None)
            return smaller or current, "memory pressure"
        plans = run.plans
        if now_s < run.pressed_until_s:
            plans = tuple(plan for plan in plans if plan.peak_bytes <= self._peak(run))
        return self._choose(job, plans, limit), "limits, deadline or temperature"

    def _peak(self, run: _Run) -> int:
        return next((plan.peak_bytes for plan in run.plans if plan.index == run.plan), 0)

    def _set_limits(self, run: _Run, limit: int | None) -> None:
        run.limit_bytes = limit
        if run.worker.group is None:
            return
        try:
            run.worker.group.configure(WorkerLimits(limit, self._surroundings.limits.cpu_percent))
        except CgroupError as error:
            self._books.report("no-memory-limit", reason=error.reason)

    def _make_checkpoints(self, run: _Run, job: Job, now_s: float) -> None:
        if job.spec.checkpoint_every is not None:
            return
        budget = self._surroundings.flash_budget_bytes_per_day
        every_s = checkpoint_interval_s(job.measured.checkpoint_s, job.measured.checkpoint_bytes, budget)
        if now_s - run.last_checkpoint_s >= every_s:
            run.last_checkpoint_s = now_s
            run.worker.checkpoint()

    def _watch_deadline(self, run: _Run, job: Job) -> None:
        left_s = eta_s(job.step, job.total_steps, job.measured.step_s)
        if job.spec.deadline_at is None or left_s is None:
            return
        until_s = job.spec.deadline_at - self._clock.wall_s()
        if left_s > until_s:
            self._books.report(
                "deadline-missed",
                key=str(job.id),
                job=job.label,
                needed=format_seconds(left_s),
                left=format_seconds(until_s) if until_s > 0 else "nothing",
            )
        else:
            self._health.clear("deadline-missed", str(job.id))

    # --- hearing

    def _on_event(self, event: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            return
        now_s = self._clock.monotonic_s()
        kind, job = event["event"], self._store.get(run.job_id)
        if self.meter is not None:
            self.meter.on_event(str(run.job_id), event, now_s)
        if kind == "step":
            self._on_step(run, job, event, now_s)
            return
        if kind == "ready":
            job = replace(job, step=_count(event, "step") or 0, total_steps=_count(event, "total_steps"))
            self._store.keep_in_memory(job)
        elif kind == "checkpoint":
            self._on_checkpoint(run, job, event, now_s)
        elif kind == "plan":
            self._on_plan(run, job, event)
        elif kind == "eval":
            best = ", the best so far" if event.get("best") else ""
            run.log.note(f"evaluated at step {event.get('step')}: loss {event.get('loss')}{best}", self._clock.wall_s())
        elif kind == "finished":
            out = event.get("out")
            run.out = out if isinstance(out, str) else None
        elif kind == "failed":
            run.log.note(f"failed: {event.get('code')}: {event.get('message')}", self._clock.wall_s())
        self._on_change()

    def _on_step(self, run: _Run, job: Job, event: dict[str, Any], now_s: float) -> None:
        wall_s = _number(event, "wall_s") or 0.0
        since_s, run.last_step_s = None if run.last_step_s is None else now_s - run.last_step_s, now_s
        pace_s = wall_s if since_s is None else max(wall_s, since_s)  # reporting and checkpoints take time as well
        known = job.measured.step_s
        step_s = pace_s if known is None else known + _STEP_SMOOTHING * (pace_s - known)
        peak = max(_count(event, "peak_rss_bytes") or 0, job.measured.peak_rss_bytes or 0) or None
        joules = _number(event, "planned_joules")
        total = job.planned_joules if joules is None else (job.planned_joules or 0.0) + joules
        self.written_bytes += _count(event, "paged_out_bytes") or 0
        job = replace(
            job,
            step=_count(event, "step") or job.step,
            total_steps=_count(event, "total_steps") or job.total_steps,
            loss=_number(event, "loss"),
            trained_s=job.trained_s + wall_s,
            planned_joules=total,
            measured=replace(job.measured, step_s=step_s, peak_rss_bytes=peak),
        )
        self._store.keep_in_memory(job)
        if now_s - run.last_flush_s >= PROGRESS_FLUSH_S:
            run.last_flush_s = now_s
            self._store.save(job, manifest=False)

    def _on_checkpoint(self, run: _Run, job: Job, event: dict[str, Any], now_s: float) -> None:
        written = _count(event, "bytes")
        self.written_bytes += written or 0
        run.last_checkpoint_s = now_s
        measured = replace(job.measured, checkpoint_s=_number(event, "wall_s"), checkpoint_bytes=written)
        self._store.keep_in_memory(replace(job, measured=measured))
        if run.farewell_at_s is not None:
            self.leave("its checkpoint is written")

    def _on_plan(self, run: _Run, job: Job, event: dict[str, Any]) -> None:
        index = _count(event, "plan")
        if index is None:
            return
        run.plan = index
        peak = self._peak(run)
        if peak:
            self._set_limits(run, memory_max(peak))
        self._store.save(replace(job, plan=index))
        self._books.note(job.id, "plan", f"plan {index} ({format_bytes(peak)}): {event.get('reason', '')}")

    def _on_disobedience(self, command: str, limit_s: float) -> None:
        run = self._run
        if run is None:
            return
        job = self._store.get(run.job_id)
        action = "stopped by a signal" if command == "pause" else "killed"
        self._books.report(
            "worker-unresponsive",
            key=str(job.id),
            lasts_s=3600.0,
            job=job.label,
            command=command,
            limit=format_seconds(limit_s),
            action=action,
        )
        self._books.note(job.id, "unresponsive", f"{command}: no answer within {format_seconds(limit_s)}; {action}")

    # --- ending

    def _on_exit(self, end: WorkerExit) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        job = self._store.get(run.job_id)
        if run.worker.group is not None:
            run.worker.group.remove()
        if self.meter is not None:
            self.meter.on_worker_stop(str(job.id), self._clock.monotonic_s())
        outcome, detail = classify(end)
        if outcome is Outcome.FINISHED:
            job = self._finish(run, job)
        run.log.close(self._clock.wall_s())
        self._settle(job, outcome, detail, Ended(run.plans, self._peak(run), run.limit_bytes))
        self._on_change()

    def _finish(self, run: _Run, job: Job) -> Job:
        if run.round is not None:
            try:
                self._inboxes.finish_round(job.spec.name, self._store.job_dir(job.id), run.round)
            except OSError as error:
                self._books.report("inbox", key=job.spec.name, reason=str(error))
        return replace(job, result=run.out)

    def _settle(self, job: Job, outcome: Outcome, detail: str, ended: Ended | None = None) -> None:
        self._books.settle(job, outcome, detail, self._surroundings.give_up_after, ended or Ended())


def _mac_cpu_s(pid: int) -> float:
    import psutil  # only here: on Linux the supervisor does without it

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _count(event: Mapping[str, Any], name: str) -> int | None:
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
