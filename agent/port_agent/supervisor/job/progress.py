"""Transfer a worker's reports to its job: progress, checkpoints, plan, result."""

from dataclasses import replace

from port_agent.jobs.job import Job
from port_agent.jobs.store import JobStore
from port_agent.supervisor.job.bookkeeping import JobRecords
from port_agent.supervisor.job.run_state import WorkerRun
from port_agent.system.clock import Clock
from port_agent.worker.protocol import (
    CheckpointWritten,
    DeviceInterrupted,
    EvaluationDone,
    Event,
    MemoryReleased,
    PlanSwitched,
    StateRecovered,
    StepDone,
    TrainingFailed,
    TrainingFinished,
    WorkerLeaving,
    WorkerPaused,
    WorkerReady,
)
from port_planner.base.units import format_bytes, format_seconds

PROGRESS_FLUSH_S = 60.0
"""Seconds between writes of progress to the database; after a power cut, only the worker's own checkpoints matter."""
_STEP_SMOOTHING = 0.2
LONG_OPERATOR_S = 0.1
"""Seconds after which an operator of an attached program is named: the program stops only between two operators."""
_LONG_OPERATOR_SHOWN_S = 3600.0
_OVERFLOW_SHOWN_S = 3600.0
"""Seconds for which the condition stays: longer than any step, so it stays while tensors overflow in each."""
_DAMAGE_SHOWN_S = 7 * 86400.0


class ProgressRecorder:
    """Keeps a job's record consistent with its worker's reports."""

    def __init__(self, store: JobStore, records: JobRecords, clock: Clock) -> None:
        self._store, self._records, self._clock = store, records, clock
        self._written_bytes = 0

    def take_written_bytes(self) -> int:
        """Return the flash writes that workers reported since the last call."""
        written, self._written_bytes = self._written_bytes, 0
        return written

    def take(self, run: WorkerRun, event: Event) -> None:
        """Handle one event."""
        job = self._store.get(run.job_id)
        match event:
            case StepDone():
                self._on_step(run, job, event)
            case WorkerReady():
                run.waits_for = run.waits_since_s = None
                peak = max(event.start_peak_bytes or 0, job.measured.peak_rss_bytes or 0) or None
                measured = replace(job.measured, peak_rss_bytes=peak)
                self._store.keep_in_memory(
                    replace(job, reason="", step=event.step, total_steps=event.total_steps, measured=measured)
                )
            case CheckpointWritten():
                self._on_checkpoint(run, job, event)
            case StateRecovered():
                self._on_recovery(job, event)
            case PlanSwitched():
                self._on_plan(run, job, event)
            case EvaluationDone():
                self._store.keep_in_memory(self._wrote(job, event.paged_out_bytes - event.unworn_bytes))
                best = ", the best so far" if event.best else ""
                self._log(run, f"evaluated at step {event.step}: loss {event.loss}{best}")
            case DeviceInterrupted():
                self._on_interruption(run, job, event)
            case WorkerPaused() if event.operator is not None and event.waited_s > LONG_OPERATOR_S:
                waited, label = format_seconds(event.waited_s), job.label
                self._records.report(
                    "long-operator",
                    key=str(job.id),
                    lasts_s=_LONG_OPERATOR_SHOWN_S,
                    job=label,
                    operator=event.operator,
                    waited=waited,
                )
            case WorkerLeaving():
                self._log(run, f"stopped after step {event.step}")
            case MemoryReleased():
                self._store.keep_in_memory(self._wrote(job, event.paged_out_bytes - event.unworn_bytes))
            case TrainingFinished():
                run.out, run.out_checksum = event.out, event.out_checksum
            case TrainingFailed():
                self._log(run, f"failed: {event.code}: {event.message}")

    def _on_step(self, run: WorkerRun, job: Job, event: StepDone) -> None:
        if event.packing_overflows:
            self._records.report(
                "packing-overflow",
                key=str(job.id),
                lasts_s=_OVERFLOW_SHOWN_S,
                job=job.label,
                step=str(event.step),
                count=str(event.packing_overflows),
            )
        if event.device_excess_bytes:
            self._records.report(
                "device-over-plan",
                key=str(job.id),
                lasts_s=_OVERFLOW_SHOWN_S,
                job=job.label,
                step=str(event.step),
                excess=format_bytes(event.device_excess_bytes),
            )
        now_s = self._clock.monotonic_s()
        since_s, run.last_step_s = None if run.last_step_s is None else now_s - run.last_step_s, now_s
        steps = max(event.step - job.step, 1)  # an attached program reports short ones together
        pace_s = max(event.wall_s, since_s or 0.0) / steps  # reports and checkpoints take time, too
        known = job.measured.step_s
        step_s = pace_s if known is None else known + _STEP_SMOOTHING * (pace_s - known)
        peak = max(event.peak_rss_bytes or 0, job.measured.peak_rss_bytes or 0) or None
        on_device = max(event.device_peak_bytes or 0, job.measured.device_peak_bytes or 0) or None
        joules = event.planned_joules
        job = replace(
            self._wrote(job, event.paged_out_bytes - event.unworn_bytes),
            step=event.step,
            total_steps=event.total_steps or job.total_steps,
            loss=event.loss,
            trained_s=job.trained_s + event.wall_s,
            planned_joules=job.planned_joules if joules is None else (job.planned_joules or 0.0) + joules,
            measured=replace(job.measured, step_s=step_s, peak_rss_bytes=peak, device_peak_bytes=on_device),
        )
        self._store.keep_in_memory(job)
        if now_s - run.last_flush_s >= PROGRESS_FLUSH_S:
            run.last_flush_s = now_s
            self._store.save(job, manifest=False)

    def _on_checkpoint(self, run: WorkerRun, job: Job, event: CheckpointWritten) -> None:
        run.last_checkpoint_s = self._clock.monotonic_s()
        measured = replace(job.measured, checkpoint_s=event.wall_s, checkpoint_bytes=event.bytes)
        self._store.keep_in_memory(replace(self._wrote(job, event.bytes), measured=measured))

    def _on_recovery(self, job: Job, event: StateRecovered) -> None:
        self._store.save(replace(job, step=event.step))
        lost = (
            "the lost part is trained again"
            if event.lost_steps is None
            else f"{event.lost_steps} steps are trained again"
        )
        self._records.report(
            "state-damaged",
            key=str(job.id),
            lasts_s=_DAMAGE_SHOWN_S,
            job=job.label,
            step=event.step,
            lost=lost,
            reason=event.reason,
        )
        self._records.note(job.id, "recovered", f"{event.reason}; continues from step {event.step}, {lost}")

    def _on_plan(self, run: WorkerRun, job: Job, event: PlanSwitched) -> None:
        run.plan = event.plan
        self._store.save(replace(job, plan=event.plan))
        self._records.note(job.id, "plan", f"plan {event.plan} ({format_bytes(run.peak_bytes)}): {event.reason}")

    def _on_interruption(self, run: WorkerRun, job: Job, event: DeviceInterrupted) -> None:
        """Report why a job with a living worker does not continue; the worker repeats the event while it waits."""
        waits_for = event.reason if event.step is None else None
        run.last_step_s = None  # the time that passed meanwhile is not part of a step
        if waits_for == run.waits_for and waits_for is not None:
            return
        if waits_for is None or run.waits_for is None:
            run.waits_since_s = None if waits_for is None else self._clock.monotonic_s()
        run.waits_for = waits_for
        self._store.keep_in_memory(replace(job, reason=waits_for or ""))
        self._records.note(job.id, "interrupted" if waits_for else "continued", event.reason)

    def _wrote(self, job: Job, count_bytes: int) -> Job:
        """Count what a worker wrote to flash, for the day and for the job; return the job."""
        self._written_bytes += count_bytes
        return replace(job, written_bytes=job.written_bytes + count_bytes)

    def _log(self, run: WorkerRun, text: str) -> None:
        run.log.note(text, self._clock.wall_s())
