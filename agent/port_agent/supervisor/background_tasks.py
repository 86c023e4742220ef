"""Work that must not block the event loop: writing to disk, slow sensors, inboxes, cleaning up."""

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

from port_agent.jobs.job import Job, JobState
from port_agent.jobs.store import StoreError
from port_agent.supervisor.context import DaemonContext

_HOUSEKEEPING_S = 600.0
_STALE_UPLOAD_S = 3600.0
_SHOWN_A_DAY_S = 86400.0
_IDLE_REFRESH_FACTOR = 10
"""Factor by which the interval of slow sensors grows while there are no jobs."""


class BackgroundTasks:
    """The background work of one supervisor."""

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self.pending = asyncio.Event()
        """Set when the store has something to write."""
        self.looked = asyncio.Event()
        """Set after the first reading of the sensors, which shows what need not be asked."""
        self.sensors_changed = asyncio.Event()
        """Set when a different set of sensors must be read."""

    def plan(self) -> None:
        """Schedule the periodic work."""
        self._context.timers.every(_HOUSEKEEPING_S, "housekeeping", self.keep_house)

    def plan_inbox_scans(self, alive: list[Job]) -> None:
        """Scan inboxes only while some job waits for data, because each scan is a wake-up."""
        timers = self._context.timers
        wanted = any(job.spec.waits_for_data for job in alive)
        if wanted and not timers.has("inbox"):
            timers.every(self._context.seams.inbox_scan_s, "inbox", self.scan_inboxes)
        elif not wanted and timers.has("inbox"):
            timers.cancel("inbox")

    async def scan_inboxes(self) -> None:
        """Scan the inboxes of all jobs that wait for data."""
        context = self._context
        for job in context.store.all():
            if job.state.is_over or not job.spec.waits_for_data:
                continue
            state = context.inboxes.scan(job.spec.name, context.store.job_dir(job.id))
            now_s, wall_s = context.clock.monotonic_s(), context.clock.wall_s()
            if state.forgotten:
                context.health.report(
                    "inbox-forgotten",
                    now_s,
                    wall_s,
                    key=job.spec.name,
                    lasts_s=_SHOWN_A_DAY_S,
                    job=job.label,
                    reason=state.forgotten,
                )
            if state.error:
                context.health.report("inbox", now_s, wall_s, key=job.spec.name, reason=state.error)
            else:
                context.health.clear("inbox", job.spec.name)
            if state.new and job.state is JobState.WAITING_DATA:
                context.wake.set()

    async def flush_when_pending(self) -> None:
        """Write jobs and history in a thread forever: an fsync can take half a second on an SD card."""
        store, loop = self._context.store, asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.pending.set)

        store.on_pending = wake
        while True:
            await self.pending.wait()
            self.pending.clear()
            had_trouble = store.trouble is not None
            await asyncio.to_thread(self._flush)
            if (store.trouble is not None) is not had_trouble:
                self._context.wake.set()

    def _flush(self) -> None:
        self._context.store.flush()
        with contextlib.suppress(StoreError):  # the same disk: the store reports it, and both are tried again
            self._context.pause.flush()
        with contextlib.suppress(OSError):
            self._context.timeline.flush(self._context.clock.wall_s())

    async def refresh_slow_sensors(self) -> None:
        """Poll the sensors that are external commands, until cancelled."""
        context = self._context
        await self.looked.wait()
        while True:
            await context.admission.platform.refresh()
            busy = bool(context.runners.busy()) or any(not job.state.is_over for job in context.store.all())
            rest_s = context.admission.platform.refresh_every_s * (1 if busy else _IDLE_REFRESH_FACTOR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self.sensors_changed.wait()
            self.sensors_changed.clear()

    async def keep_house(self) -> None:
        """Delete the scratch files of ended jobs, jobs beyond the history's limits, and forgotten uploads."""
        context = self._context
        done = (JobState.FINISHED, JobState.CANCELLED)
        idle = [job for job in context.store.all() if job.state in done and self._is_at_rest(job)]
        await asyncio.to_thread(_shed_scratch, [context.store.job_dir(job.id) for job in idle])
        over = sorted(filter(self._is_at_rest, context.store.all()), key=lambda job: job.finished_at or 0.0)
        sizes = await asyncio.to_thread(_sizes, {job.id: context.store.job_dir(job.id) for job in over})
        for job_id in too_old(over, sizes, context.config.options.keep_jobs, context.config.options.keep_results_bytes):
            if self._is_at_rest(context.store.get(job_id)):  # a failed job may have been resumed meanwhile
                context.store.forget(job_id)
        await asyncio.to_thread(_clean_uploads, context.settings.state_dir / "uploads")

    def _is_at_rest(self, job: Job) -> bool:
        """Return whether a job has ended, its worker is gone, and no other device waits for it or has files of it."""
        at_home = job.away is None and job.spec.guest is None
        return job.state.is_over and at_home and self._context.runners.of_job(job.id) is None


def too_old(over: list[Job], sizes: dict[int, int], keep_jobs: int, keep_bytes: int) -> list[int]:
    """Return the ids of the oldest jobs that exceed the allowed count or size.

    `over` begins with the oldest.
    """
    removed = []
    kept_bytes = sum(sizes[job.id] for job in over)
    for kept, job in zip(range(len(over), 0, -1), over, strict=True):
        if kept <= keep_jobs and kept_bytes <= keep_bytes:
            break
        kept_bytes -= sizes[job.id]
        removed.append(job.id)
    return removed


def _shed_scratch(directories: list[Path]) -> None:
    """Delete checkpoints and rounds; result, log and manifest stay."""
    for directory in directories:
        shutil.rmtree(directory / "state", ignore_errors=True)
        shutil.rmtree(directory / "rounds", ignore_errors=True)


def _sizes(directories: dict[int, Path]) -> dict[int, int]:
    return {job_id: _tree_bytes(directory) for job_id, directory in directories.items()}


def _tree_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total


def _clean_uploads(directory: Path) -> None:
    """Delete uploads that never became a job."""
    end = time.time() - _STALE_UPLOAD_S
    for path in directory.glob("*"):
        try:
            if path.stat().st_mtime < end:
                path.unlink()
        except OSError:
            continue
