"""The running job of one place: starts and controls its worker, and settles the job when the worker ends."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from port_agent.control.http_answers import RunStatus
from port_agent.energy.drift import Correction
from port_agent.federate.orders import FOLDER, MODEL_FILE, RESULT_FILE, RESULT_PART_FILE, has_round
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import Job, JobKind, JobRequestError, JobState, WorkerOutcome
from port_agent.jobs.store import JobStore
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.attachments import AttachedProgram, Attachments, process_cpu_s
from port_agent.supervisor.job.bookkeeping import JobRecords, RunEnd
from port_agent.supervisor.job.exit_status import WorkerExit, classify, left_because
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.log import JobLog
from port_agent.supervisor.job.plan_choice import PlanFigures, data_limit, fitting, memory_max, resident_max
from port_agent.supervisor.job.plan_revision import WORTH_A_RESTART, PlanRevision
from port_agent.supervisor.job.plan_switching import PLAN_SWITCH_PAUSE_S, PlanSwitcher, no_plan_fits
from port_agent.supervisor.job.progress import ProgressRecorder
from port_agent.supervisor.job.run_state import Meter, RunConditions, WorkerRun
from port_agent.supervisor.job.sharing import BOARD_WORKER_BYTES
from port_agent.supervisor.job.silence_monitor import SilenceMonitor
from port_agent.supervisor.job.worker_kinds import (
    LOOKED_FOR,
    BundleFacts,
    RunPaths,
    WorkerKind,
    bundle_path,
    checkpoint_steps,
    worker_command,
)
from port_agent.supervisor.job.worker_process import Launch, RequestedState, WorkerPhase, WorkerProcess
from port_agent.system.cgroup import CgroupError, DelegatedTree, WorkerGroup, WorkerLimits
from port_agent.system.clock import Clock
from port_agent.system.locks import LockFile
from port_agent.system.passing_errors import is_passing
from port_agent.worker.protocol import CheckpointWritten, Event, PlanSwitched, StepDone
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.device_kinds import CPU

_SHOWN_AN_HOUR_S = 3600.0
LAST_COMMIT_S = 10.0
"""Seconds for a worker to commit its work when it is asked to leave for any reason except memory."""

FAREWELL_S = 10.0
"""Seconds for the last checkpoint of a worker that may stay a little longer."""


class Runner:
    """Starts, controls and ends the worker of one job at a time, on this computer or on one board."""

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
        self._records = JobRecords(store, health, clock)
        self._plan_switcher = PlanSwitcher(self._records, health, clock)
        self._progress = ProgressRecorder(store, self._records, clock)
        self.attachments = Attachments(store, clock, on_change)
        self._run: WorkerRun | None = None
        self._conditions = RunConditions(ResourceLimits(), None)

    # --- queries

    @property
    def job(self) -> Job | None:
        """The job that has a worker, or None."""
        return None if self._run is None else self._store.get(self._run.job_id)

    @property
    def phase(self) -> WorkerPhase | None:
        """The worker's activity; None without a worker."""
        return None if self._run is None else self._run.worker.phase

    @property
    def requested(self) -> RequestedState | None:
        """The last request to the worker; None without a worker."""
        return None if self._run is None else self._run.worker.requested

    @property
    def shown_phase(self) -> str | None:
        """The worker's activity, in a word for people; None without a worker."""
        return None if self._run is None else self._run.shown_phase

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return None if self._run is None else self._run.worker.pid

    @property
    def waits_for(self) -> str | None:
        """Why the worker cannot continue although it is allowed to, such as a missing board; or None."""
        return None if self._run is None else self._run.waits_for

    @property
    def waited_s(self) -> float:
        """Seconds for which the worker could not continue because something is missing."""
        since_s = None if self._run is None else self._run.waits_since_s
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    @property
    def has_plans(self) -> bool:
        """Whether the running job has plans of several sizes, so that `adapt` fits it to its memory."""
        return self._run is not None and bool(self._run.plans)

    @property
    def held_bytes(self) -> float:
        """The memory granted to the running job; if it has no plan, the least that it needs."""
        run, job = self._run, self.job
        if run is None or job is None:
            return 0.0
        return memory_max(run.granted.peak_bytes) if run.granted is not None else self.least_bytes(job)

    def cpu_s(self) -> float:
        """Return CPU seconds of the living worker and of attached programs."""
        living = 0.0 if self._run is None else self._worker_cpu_s(self._run.worker)
        return living + self.attachments.cpu_s()

    def _worker_cpu_s(self, worker: WorkerProcess | AttachedProgram) -> float:
        if isinstance(worker, AttachedProgram):
            return 0.0  # counted with all that are attached
        used = worker.group.cpu_s() if worker.group is not None else None
        if used is not None:
            return used
        if sys.platform == "darwin":
            return _mac_cpu_s(worker.pid)
        return process_cpu_s(worker.pid)

    def status(self) -> RunStatus | None:
        """Return the run as `status` shows it, or None without one."""
        return None if self._run is None else self._run.status(self._store.get(self._run.job_id))

    def take_written_bytes(self) -> int:
        """Return the flash writes that workers reported since the last call."""
        return self._progress.take_written_bytes()

    # --- starting

    def fits(self, job: Job, conditions: RunConditions) -> bool:
        """Return whether the device of `job` exists and a plan may run; otherwise report a
        health item, as `start` does.

        Reads the bundle; if it cannot be read, `start` reports it.
        """
        if not self._has_device(job, self._facts(job), conditions):
            return False
        least, limit = self.least_bytes(job), conditions.memory_bytes
        if least <= limit if limit is not None else math.isfinite(least):
            return True
        self._records.no_fit(job, self._smallest(job) if math.isinf(least) else int(least), limit)
        return False

    def least_bytes(self, job: Job) -> float:
        """Return the least memory with which `job` can start: 0 if only `start` can know, infinity if no amount helps.

        Reads the bundle.
        """
        if job.spec.kind is JobKind.MCU:
            return max(BOARD_WORKER_BYTES, job.measured.peak_rss_bytes or 0)
        plans = self._plans(job)
        if not plans:
            return 0.0
        allowed = fitting(plans, None, job.memory_ceiling_bytes)
        return min((memory_max(plan.peak_bytes) for plan in allowed), default=math.inf)

    def _smallest(self, job: Job) -> int:
        """Return the memory of the smallest plan, even if a plan of that size was killed."""
        return min(memory_max(plan.peak_bytes) for plan in self._plans(job))

    def _plans(self, job: Job) -> tuple[PlanFigures, ...]:
        """Return the plans of a job; none if it has none, or its bundle cannot be read."""
        program = self.attachments.get(job.id)
        return self._facts(job).plans if program is None else program.plans

    def _facts(self, job: Job) -> BundleFacts:
        """Return the facts in a job's bundle; empty if there is no bundle, or it cannot be read."""
        if job.spec.kind is JobKind.ATTACHED:
            return BundleFacts()
        bundle = bundle_path(job, self._store.job_dir(job.id))
        try:
            return BundleFacts() if bundle is None else self._kinds[job.spec.kind].read_bundle(bundle)
        except (PortError, OSError):
            return BundleFacts()

    def _has_device(self, job: Job, facts: BundleFacts, conditions: RunConditions) -> bool:
        """Return whether the device that computes a job exists, as far as known; otherwise report a health item."""
        kind, devices = facts.device_kind, conditions.devices
        if kind not in LOOKED_FOR or devices is None or kind in devices:
            self._health.clear("device-absent", str(job.id))
            return True
        self._records.report("device-absent", key=str(job.id), job=job.label, kind=kind, id=job.id)
        return False

    def start(self, job: Job, conditions: RunConditions) -> bool:
        """Start the worker of `job`; return False if it cannot run now. A health item or the job's
        state then gives the reason.

        Raises JobRequestError while another one runs.
        """
        if self._run is not None:
            raise JobRequestError(f"job {self._run.job_id} is still running here; wait for its end", job.id)
        self._conditions, self._records.log_bytes = conditions, conditions.job_log_bytes
        if job.spec.kind is JobKind.ATTACHED:
            return self._begin_attached(job, conditions)
        kind = self._kinds[job.spec.kind]
        job_dir = self._store.job_dir(job.id)
        bundle = bundle_path(job, job_dir)
        try:
            facts = kind.read_bundle(bundle) if bundle is not None else BundleFacts()
        except (PortError, OSError) as error:
            outcome = WorkerOutcome.FAILED if is_passing(error) else WorkerOutcome.IMPOSSIBLE
            again = "; it is tried again" if outcome is WorkerOutcome.FAILED else ""
            self._settle(job, outcome, f"the bundle cannot be used: {error}{again}")
            return False
        if not self._has_device(job, facts, conditions):
            return False
        plan = self._plan_switcher.choose(job, facts.plans, conditions)
        if facts.plans and plan is None:
            self._records.no_fit(job, self._smallest(job), conditions.memory_bytes)
            return False
        self._health.clear("job-does-not-fit", str(job.id))
        if job.spec.waits_for_data and not self._inboxes.has_round(job.spec.name, job_dir, job.rounds + 1):
            self._store.save(replace(job, state=JobState.WAITING_DATA))  # its round was over when the agent was killed
            return False
        if job.spec.federated and not _has_work(job, job_dir / FOLDER):
            self._store.save(
                replace(job, state=JobState.WAITING_DATA)
            )  # it has ended, or its result is no longer needed
            return False
        try:
            paths = self._paths(job, job_dir, bundle)
            return self._spawn(job, kind, paths, facts, plan, conditions)
        except OSError as error:
            self._settle(job, WorkerOutcome.FAILED, f"the worker cannot be started: {error}")
            return False

    def _begin_attached(self, job: Job, conditions: RunConditions) -> bool:
        """Let an attached program run, if it fits."""
        program = self.attachments.get(job.id)
        if program is None:
            return False
        plan = self._plan_switcher.choose(job, program.plans, conditions)
        if plan is None:
            self._records.no_fit(job, self._smallest(job), conditions.memory_bytes)
            return False
        self._health.clear("job-does-not-fit", str(job.id))
        now_s, limits = self._clock.monotonic_s(), conditions.worker_limits(plan)
        log = JobLog(self._store.job_dir(job.id), conditions.job_log_bytes)
        self._run = WorkerRun(
            job.id,
            program,
            log,
            program.plans,
            plan.index,
            plan,
            limits,
            None,
            last_checkpoint_s=now_s,
            last_flush_s=now_s,
            switched_at_s=now_s - PLAN_SWITCH_PAUSE_S,
            silence=SilenceMonitor(now_s),
        )
        self._mark_running(job, plan.index)
        if self.meter is not None:
            self.meter.on_worker_start(str(job.id), now_s, job.label, self.cpu_s)
        program.begin(limits.cpu_percent, self._on_event, self._on_exit, self._on_disobedience)
        return True

    def _mark_running(self, job: Job, plan: int | None) -> None:
        started = job.started_at if job.started_at is not None else self._clock.wall_s()
        self._store.save(
            replace(job, state=JobState.RUNNING, reason="", started_at=started, plan=plan, attempts=job.attempts + 1)
        )

    def _paths(self, job: Job, job_dir: Path, bundle: Path | None) -> RunPaths:
        if not job.spec.waits_for_data:
            data, federation = job.spec.data, job_dir / FOLDER if job.spec.federated else None
            return RunPaths(job_dir, bundle, job_dir / data if data else None, federation=federation)
        number = job.rounds + 1
        return RunPaths(job_dir, bundle, self._inboxes.round_directory(job.spec.name, job_dir, number), number)

    def _spawn(
        self,
        job: Job,
        kind: WorkerKind,
        paths: RunPaths,
        facts: BundleFacts,
        plan: PlanFigures | None,
        conditions: RunConditions,
    ) -> bool:
        now_s, limits = self._clock.monotonic_s(), conditions.worker_limits(plan)
        lock = self._worker_lock()
        group: WorkerGroup | None = None
        try:
            if not lock.try_lock():
                raise OSError("the worker of an earlier supervisor is still running")
            paths.state.mkdir(exist_ok=True)
            group = self._group(job, limits)
            every = checkpoint_steps(job, conditions.flash_budget_bytes_per_day)
            index = plan.index if plan else None
            command = worker_command(kind, job, paths, index, every, revised=facts.revised)
            maps_more = facts.device_kind != CPU  # a GPU's driver maps gigabytes that it never touches
            limit = data_limit(plan.peak_bytes) if plan and not maps_more else None
            self._report_lacks(kind, job)
            launch = Launch(command, group, limit, kind.environment(facts, plan))
            log = JobLog(paths.job_dir, conditions.job_log_bytes)
            worker = self._worker(launch, log)
            worker.start(lock)
            lock.write(str(worker.pid))
        except OSError:
            if group is not None:
                group.remove()
            raise
        finally:
            lock.close()
        self._run = WorkerRun(
            job.id,
            worker,
            log,
            facts.plans,
            index,
            plan,
            limits,
            paths.round,
            last_checkpoint_s=now_s,
            last_flush_s=now_s,
            switched_at_s=now_s - PLAN_SWITCH_PAUSE_S,
            silence=SilenceMonitor(now_s),
        )
        if job.spec.kind is JobKind.TRAIN and paths.bundle is not None and facts.plans and facts.device_kind == CPU:
            self._run.revision = PlanRevision(
                paths.bundle, facts.revised_for, one_thread=facts.threads == 1, solving=conditions.solving
            )
        self._mark_running(job, index)
        shown = f", plan {plan.index + 1} of {len(facts.plans)} ({_memory(plan, facts.device_kind)})" if plan else ""
        self._records.note(job.id, "started", f"worker {worker.pid} started at step {job.step}{shown}")
        if self.meter is not None:
            self.meter.on_worker_start(str(job.id), now_s, job.label, self.cpu_s)
        return True

    def _report_lacks(self, kind: WorkerKind, job: Job) -> None:
        reason = kind.lacks()
        if not reason:
            self._health.clear("no-allocator")
        elif not self._health.holds("no-allocator"):
            self._records.report("no-allocator", reason=reason)
            self._records.note(job.id, "allocator", f"glibc's own is used: {reason}")

    def _worker(self, launch: Launch, log: JobLog) -> WorkerProcess:
        return WorkerProcess(
            launch,
            on_event=self._on_event,
            on_output=lambda data: log.output(data, self._clock.wall_s()),
            on_exit=self._on_exit,
            on_disobedience=self._on_disobedience,
        )

    def _group(self, job: Job, limits: WorkerLimits) -> WorkerGroup | None:
        if self.tree is None:
            return None
        try:
            group, missing = self.tree.worker(job.id, limits)
        except CgroupError as error:
            self._records.report("no-memory-limit", reason=error.reason)
            return None
        if group.limits_memory:
            self._health.clear("no-memory-limit")
        if missing:
            self._records.note(job.id, "limits", f"this kernel lacks {', '.join(missing)}")
        return group

    # --- steering

    def pause(self) -> None:
        """Stop between two instructions, keeping the memory."""
        if self._run is not None:
            self._stop_revising(self._run)
            self._run.worker.pause()
            self._run.last_step_s = None

    def resume(self) -> None:
        """Continue after a pause."""
        if self._run is not None:
            self._run.worker.resume()
            self._run.farewell_at_s = None

    def leave(self, reason: str, within_s: float = 0.0) -> None:
        """Make the worker release its memory: within a second, or after a commit that takes less than `within_s`.

        If called again, the shorter time applies.
        """
        if self._run is not None:
            self._stop_revising(self._run)
            if self._run.worker.requested is not RequestedState.LEAVE:
                self._run.left_because = reason
                self._run.log.note(f"leaving: {reason}", self._clock.wall_s())
            worker = self._run.worker
            if isinstance(worker, AttachedProgram):
                worker.leave(reason)
            else:
                worker.leave(within_s)

    def leave_after_checkpoint(self, reason: str) -> None:
        """Leave when the next checkpoint is written, or after `FAREWELL_S`; for reasons
        that allow waiting that long.
        """
        run, now_s = self._run, self._clock.monotonic_s()
        if run is None or run.worker.requested is RequestedState.LEAVE:
            return
        trains = run.worker.phase is WorkerPhase.TRAINING and run.worker.requested is RequestedState.TRAIN
        if not trains or isinstance(run.worker, AttachedProgram):  # which loses nothing
            self.leave(reason)
        elif run.farewell_at_s is None:
            run.farewell_at_s, run.last_checkpoint_s = now_s, now_s
            run.worker.checkpoint()
        elif now_s - run.farewell_at_s >= FAREWELL_S:
            self.leave(reason)

    def checkpoint_within(self, span_s: float) -> None:
        """Ask for a checkpoint unless one was made or requested in the last `span_s`."""
        run, now_s = self._run, self._clock.monotonic_s()
        if run is not None and run.worker.phase is WorkerPhase.TRAINING and now_s - run.last_checkpoint_s > span_s:
            run.last_checkpoint_s = now_s
            run.worker.checkpoint()

    def watch_silence(self) -> None:
        """Detect a worker that may work but does not; kill it if that lasts. Called about once a second."""
        run = self._run
        if run is None or isinstance(run.worker, AttachedProgram):
            return
        works = run.worker.phase is WorkerPhase.TRAINING and run.worker.requested is RequestedState.TRAIN
        if not works or run.waits_for is not None:
            run.silence.note()
            return
        job, was_stuck = self._store.get(run.job_id), run.silence.stuck
        killed = run.silence.look(self._clock.monotonic_s(), self._worker_cpu_s(run.worker), job.measured.step_s)
        if run.silence.stuck and not was_stuck:
            silent = format_seconds(round(run.silence.silent_s))
            self._records.report(
                "worker-stuck", key=str(job.id), lasts_s=_SHOWN_AN_HOUR_S, job=job.label, silent=silent
            )
            self._records.note(job.id, "stuck", f"it has not reported or computed anything for {silent}")
        if killed:
            self._records.note(job.id, "stuck", "killed; it starts again from its checkpoint")
            run.worker.kill()

    def cancel(self) -> None:
        """End the job for good."""
        if self._run is not None:
            self._run.worker.cancel()

    def kill(self) -> None:
        """Kill the worker at once, because the supervisor ends."""
        if self._run is not None:
            self._stop_revising(self._run)
            self._run.worker.kill()

    def adapt(self, conditions: RunConditions, pressure: bool) -> None:
        """Adapt a training worker to new limits, memory pressure or its deadline; called about once a second."""
        run = self._run
        if (
            run is None
            or run.worker.requested is not RequestedState.TRAIN
            or run.worker.phase is not WorkerPhase.TRAINING
        ):
            return
        self._conditions, self._records.log_bytes = conditions, conditions.job_log_bytes
        if not self._plan_switcher.adapt(run, self._store.get(run.job_id), conditions, pressure):
            self.leave(no_plan_fits(conditions))
        elif run.granted is not None and run.last_step_s is not None and run.last_step_s > run.switched_at_s:
            run.worker.tighten_limit(resident_max(run.granted.peak_bytes))
        self._revise(run, conditions)

    def _revise(self, run: WorkerRun, conditions: RunConditions) -> None:
        """Plan again if the proportions of steps differ from the plan; restart the worker if the result is worth it."""
        if run.revision is None:
            return
        held = memory_max(run.granted.peak_bytes) if run.granted is not None else 0
        free = None if conditions.memory_bytes is None else conditions.memory_bytes - held
        try:
            found = run.revision.look(run.plan or 0, free)
        except OSError as error:
            self._records.note(run.job_id, "plan", f"its plans cannot be made again: {error}")
            run.revision = None
            return
        if found is not None:
            self._records.note(run.job_id, "plan", found.text)
            if found.saved >= WORTH_A_RESTART:
                self.leave_after_checkpoint("its plans were made again")

    @staticmethod
    def _stop_revising(run: WorkerRun) -> None:
        if run.revision is not None:
            run.revision.stop()

    def correct(self, correction: Correction) -> None:
        """Adopt the measured times of steps, so that the next look chooses a plan again."""
        if self._run is not None and str(self._run.job_id) == correction.job:
            self._plan_switcher.correct(self._run, correction)

    # --- events of the worker

    def _on_event(self, event: Event) -> None:
        run = self._run
        if run is None:
            return
        if self.meter is not None:
            self.meter.on_event(str(run.job_id), event, self._clock.monotonic_s())
        run.silence.note()
        if run.revision is not None and isinstance(event, StepDone):
            run.revision.take(event)
        self._progress.take(run, event)
        if isinstance(event, PlanSwitched):
            self._plan_switcher.switched(run, self._conditions)
        elif isinstance(event, CheckpointWritten) and run.farewell_at_s is not None:
            self.leave("its checkpoint is written")
        if not isinstance(event, StepDone):
            self._on_change()

    def _on_disobedience(self, command: str, limit_s: float) -> None:
        run = self._run
        if run is None:
            return
        job = self._store.get(run.job_id)
        if isinstance(run.worker, AttachedProgram):
            key, limit = str(job.id), format_seconds(limit_s)
            self._records.report("slow-release", key=key, lasts_s=_SHOWN_AN_HOUR_S, job=job.label, limit=limit)
            return
        action = "stopped by a signal" if command == "pause" else "killed"
        self._records.report(
            "worker-unresponsive",
            key=str(job.id),
            lasts_s=_SHOWN_AN_HOUR_S,
            job=job.label,
            command=command,
            limit=format_seconds(limit_s),
            action=action,
        )
        self._records.note(job.id, "unresponsive", f"{command}: no answer within {format_seconds(limit_s)}; {action}")

    # --- ending

    def _on_exit(self, end: WorkerExit) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        job = self._store.get(run.job_id)
        self._stop_revising(run)
        if run.worker.group is not None:
            run.worker.group.remove()
        if self.meter is not None:
            self.meter.on_worker_stop(str(job.id), self._clock.monotonic_s())
        outcome, detail = classify(end)
        if outcome is WorkerOutcome.LEFT:
            detail = run.waits_for or left_because(detail, run.left_because)
        if outcome is WorkerOutcome.FINISHED and job.spec.federated and job.spec.kind is JobKind.FINETUNE:
            job, outcome, detail = self._finish_round(run, job)
        elif outcome is WorkerOutcome.FINISHED:
            job = self._finish(run, job)
        run.log.close(self._clock.wall_s())
        self._settle(job, outcome, detail, RunEnd(run.plans, run.all_bytes, run.limits.memory_bytes))
        self._on_change()

    def _finish(self, run: WorkerRun, job: Job) -> Job:
        if run.round is not None:
            try:
                self._inboxes.finish_round(job.spec.name, self._store.job_dir(job.id), run.round)
            except OSError as error:
                self._records.report("inbox", key=job.spec.name, reason=str(error))
        if job.spec.federated:
            return job  # its result is the average, not what this device made of it
        return replace(job, result=run.out, result_checksum=run.out_checksum)

    def _finish_round(self, run: WorkerRun, job: Job) -> tuple[Job, WorkerOutcome, str]:
        """Record what the worker of a fine-tuning wrote for a federation, in a directory that it cannot access."""
        folder = self._store.job_dir(job.id) / FOLDER
        try:
            if has_round(folder):
                (folder / RESULT_PART_FILE).replace(folder / RESULT_FILE)
                return job, WorkerOutcome.FINISHED, ""
            (folder / MODEL_FILE).unlink()
        except OSError as error:
            return job, WorkerOutcome.FAILED, f"its result of the federation cannot be stored: {error}"
        return replace(job, result=run.out), WorkerOutcome.WRITTEN, f"the average is in {run.out}"

    def _settle(self, job: Job, outcome: WorkerOutcome, detail: str, ended: RunEnd | None = None) -> None:
        self._records.settle(job, outcome, detail, self._conditions.give_up_after, ended or RunEnd())


def _has_work(job: Job, folder: Path) -> bool:
    """Return whether a federated job has a round to train, or an average to turn into its result."""
    return has_round(folder) or (job.spec.kind is JobKind.FINETUNE and (folder / MODEL_FILE).exists())


def _memory(plan: PlanFigures, kind: str) -> str:
    beside = f", {format_bytes(plan.device_bytes)} on {kind}" if plan.device_bytes else ""
    return f"{format_bytes(plan.peak_bytes)}{beside}"


def _mac_cpu_s(pid: int) -> float:
    import psutil  # only here: on Linux the supervisor does not load it

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
