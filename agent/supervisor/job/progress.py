"""What a worker reports, taken over into its job: progress, checkpoints, plan, result."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent.jobs.model import Job
from agent.jobs.store import JobStore
from agent.supervisor.job.bookkeeping import JobRecords
from agent.supervisor.job.run_state import Run
from agent.system.clock import Clock
from planner.ir.units import format_bytes

PROGRESS_FLUSH_S = 60.0
"""Progress goes to the database this often: the worker's own checkpoints are what counts after a power cut."""
_STEP_SMOOTHING = 0.2


class ProgressRecorder:
    """Keeps a job's record in step with what its worker says."""

    def __init__(self, store: JobStore, records: JobRecords, clock: Clock) -> None:
        self._store, self._records, self._clock = store, records, clock
        self._written_bytes = 0

    def take_written_bytes(self) -> int:
        """Return the flash writes that workers reported since the last call."""
        written, self._written_bytes = self._written_bytes, 0
        return written

    def take(self, run: Run, event: Mapping[str, Any]) -> None:
        """Take over one event."""
        job = self._store.get(run.job_id)
        match event["event"]:
            case "step":
                self._on_step(run, job, event)
            case "ready":
                job = replace(job, step=_count(event, "step") or 0, total_steps=_count(event, "total_steps"))
                self._store.keep_in_memory(job)
            case "checkpoint":
                self._on_checkpoint(run, job, event)
            case "plan":
                self._on_plan(run, job, event)
            case "eval":
                self._written_bytes += _count(event, "paged_out_bytes") or 0
                best = ", the best so far" if event.get("best") else ""
                self._log(run, f"evaluated at step {event.get('step')}: loss {event.get('loss')}{best}")
            case "finished":
                out = event.get("out")
                run.out = out if isinstance(out, str) else None
            case "failed":
                self._log(run, f"failed: {event.get('code')}: {event.get('message')}")

    def _on_step(self, run: Run, job: Job, event: Mapping[str, Any]) -> None:
        now_s, wall_s = self._clock.monotonic_s(), _number(event, "wall_s") or 0.0
        since_s, run.last_step_s = None if run.last_step_s is None else now_s - run.last_step_s, now_s
        pace_s = wall_s if since_s is None else max(wall_s, since_s)  # reporting and checkpoints take time as well
        known = job.measured.step_s
        step_s = pace_s if known is None else known + _STEP_SMOOTHING * (pace_s - known)
        peak = max(_count(event, "peak_rss_bytes") or 0, job.measured.peak_rss_bytes or 0) or None
        joules = _number(event, "planned_joules")
        total = job.planned_joules if joules is None else (job.planned_joules or 0.0) + joules
        self._written_bytes += _count(event, "paged_out_bytes") or 0
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

    def _on_checkpoint(self, run: Run, job: Job, event: Mapping[str, Any]) -> None:
        written = _count(event, "bytes")
        self._written_bytes += written or 0
        run.last_checkpoint_s = self._clock.monotonic_s()
        measured = replace(job.measured, checkpoint_s=_number(event, "wall_s"), checkpoint_bytes=written)
        self._store.keep_in_memory(replace(job, measured=measured))

    def _on_plan(self, run: Run, job: Job, event: Mapping[str, Any]) -> None:
        index = _count(event, "plan")
        if index is None:
            return
        run.plan = index
        self._store.save(replace(job, plan=index))
        self._records.note(job.id, "plan", f"plan {index} ({format_bytes(run.peak_bytes)}): {event.get('reason', '')}")

    def _log(self, run: Run, text: str) -> None:
        run.log.note(text, self._clock.wall_s())


def _count(event: Mapping[str, Any], name: str) -> int | None:
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
