"""Calendar times (windows and deadlines) by APScheduler, and periodic tasks.

APScheduler uses the wall clock, so `clock_changed` must be called after a jump; all gating and the watchdog run on the
monotonic clock elsewhere. Late jobs are never dropped (`misfire_grace_time=None`), and pile-ups become one run
(`coalesce`). It is loaded with the first window or deadline, to save memory before. Periodic tasks are tasks of the
loop; none overlaps itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from port_agent.policy.decide import DAYS, TimeWindow

if TYPE_CHECKING:
    from apscheduler.schedulers.asyncio import AsyncIOScheduler

_WINDOW_PREFIX, _DEADLINE_PREFIX = "window-", "deadline-"


class Timers:
    """The schedule of future events. `wake` is called at every window border and deadline."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._scheduler: AsyncIOScheduler | None = None
        self._periodic: dict[str, asyncio.Task[None]] = {}

    def stop(self) -> None:
        """End without waiting for a task."""
        if self._scheduler is not None:
            self._scheduler.shutdown(wait=False)
            self._scheduler = None
        for name in [*self._periodic]:
            self.cancel(name)

    def set_windows(self, windows: Iterable[TimeWindow]) -> None:
        """Wake the daemon when a window opens or closes; needs a running event loop."""
        self._remove(_WINDOW_PREFIX)
        for number, window in enumerate(windows):
            from apscheduler.triggers.cron import CronTrigger

            for border, moment in (("open", window.start), ("close", window.end)):
                overnight = border == "close" and window.end <= window.start
                day = DAYS[(window.weekday + overnight) % 7]
                trigger = CronTrigger(day_of_week=day, hour=moment.hour, minute=moment.minute, second=0)
                self._add(f"{_WINDOW_PREFIX}{number}-{border}", trigger)

    def set_deadline(self, job_id: int, at: float | None) -> None:
        """Wake the daemon at a job's deadline; None forgets it. Needs a running event loop."""
        name = f"{_DEADLINE_PREFIX}{job_id}"
        if at is None:
            self._remove(name)
        else:
            from apscheduler.triggers.date import DateTrigger

            self._add(name, DateTrigger(run_date=datetime.fromtimestamp(at).astimezone()))

    def every(self, seconds: float, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Do a task periodically; needs a running event loop."""
        self.cancel(name)
        self._periodic[name] = asyncio.get_running_loop().create_task(_repeat(seconds, name, task))

    def cancel(self, name: str) -> None:
        """Stop a periodic task."""
        periodic = self._periodic.pop(name, None)
        if periodic is not None:
            periodic.cancel()

    def has(self, name: str) -> bool:
        """Return whether something of that name is planned."""
        return name in self._periodic or (self._scheduler is not None and self._scheduler.get_job(name) is not None)

    def next_times(self) -> dict[str, datetime]:
        """Return when windows and deadlines come next, for tests."""
        jobs = self._scheduler.get_jobs() if self._scheduler is not None else []
        return {job.id: job.next_run_time for job in jobs if getattr(job, "next_run_time", None) is not None}

    def clock_changed(self) -> None:
        """Recompute all times after the wall clock was set."""
        if self._scheduler is None:
            return
        for job in self._scheduler.get_jobs():
            if not job.id.startswith(_DEADLINE_PREFIX):
                job.reschedule(job.trigger)
        self._scheduler.wakeup()

    def zone_changed(self, windows: Iterable[TimeWindow]) -> None:
        """Recompute the windows' borders in another time zone; needs a running event loop."""
        if self._scheduler is not None:
            import tzlocal

            tzlocal.reload_localzone()
            self.set_windows(windows)

    def _add(self, name: str, trigger: object) -> None:
        if self._scheduler is None:
            self._scheduler = _started_scheduler()
        self._scheduler.add_job(self._call_wake, trigger, id=name, replace_existing=True)

    def _remove(self, prefix: str) -> None:
        if self._scheduler is None:
            return
        from apscheduler.jobstores.base import JobLookupError

        for job in self._scheduler.get_jobs():
            if job.id == prefix or (prefix.endswith("-") and job.id.startswith(prefix)):
                try:
                    self._scheduler.remove_job(job.id)
                except JobLookupError:
                    continue  # a deadline that passed at this very moment

    async def _call_wake(self) -> None:
        self._wake()


def _started_scheduler() -> "AsyncIOScheduler":
    """Return APScheduler on the running event loop."""
    from apscheduler.executors.asyncio import AsyncIOExecutor
    from apscheduler.jobstores.memory import MemoryJobStore
    from apscheduler.schedulers.asyncio import AsyncIOScheduler

    scheduler = AsyncIOScheduler(
        jobstores={"default": MemoryJobStore()},
        executors={"default": AsyncIOExecutor()},
        job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
    )
    scheduler.start()
    return scheduler


async def _repeat(seconds: float, name: str, task: Callable[[], Awaitable[None]]) -> None:
    """Run a task repeatedly; if it fails, report that to the loop and continue."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(seconds)
        done = asyncio.ensure_future(task())
        await asyncio.wait({done})
        if not done.cancelled() and (error := done.exception()) is not None:
            loop.call_exception_handler({"message": f"periodic task {name} failed", "exception": error})
