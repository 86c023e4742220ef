"""Calendar times: windows that open and close, deadlines, and periodic tasks, by APScheduler.

Only the calendar lives here. APScheduler uses the wall clock, so `clock_changed` must be called after a jump; all
gating and the watchdog run on the monotonic clock elsewhere. Late jobs are never dropped
(`misfire_grace_time=None`), pile-ups become one run (`coalesce`), and no job overlaps itself.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from agent.policy.decide import DAYS, TimeWindow

_WINDOW_PREFIX, _DEADLINE_PREFIX = "window-", "deadline-"


class Timers:
    """What is to happen when. `wake` is called at every window border and deadline."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._scheduler = AsyncIOScheduler(
            jobstores={"default": MemoryJobStore()},
            executors={"default": AsyncIOExecutor()},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._scheduler.start()

    def stop(self) -> None:
        """End without waiting for a task."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def set_windows(self, windows: Iterable[TimeWindow]) -> None:
        """Be woken when a window opens or closes."""
        self._remove(_WINDOW_PREFIX)
        for number, window in enumerate(windows):
            for border, moment in (("open", window.start), ("close", window.end)):
                overnight = border == "close" and window.end <= window.start
                day = DAYS[(window.weekday + overnight) % 7]
                trigger = CronTrigger(day_of_week=day, hour=moment.hour, minute=moment.minute, second=0)
                self._add(f"{_WINDOW_PREFIX}{number}-{border}", trigger, self._call_wake)

    def set_deadline(self, job_id: int, at: float | None) -> None:
        """Be woken at a job's deadline; None forgets it."""
        name = f"{_DEADLINE_PREFIX}{job_id}"
        if at is None:
            self._remove(name)
        else:
            self._add(name, DateTrigger(run_date=datetime.fromtimestamp(at).astimezone()), self._call_wake)

    def every(self, seconds: float, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Do a task periodically."""
        self._add(name, IntervalTrigger(seconds=seconds), task)

    def cancel(self, name: str) -> None:
        """Stop a periodic task."""
        self._remove(name)

    def has(self, name: str) -> bool:
        """Return whether something of that name is planned."""
        return self._scheduler.get_job(name) is not None

    def next_times(self) -> dict[str, datetime]:
        """Return when everything happens next, for `doctor` and tests."""
        jobs = self._scheduler.get_jobs()
        return {job.id: job.next_run_time for job in jobs if getattr(job, "next_run_time", None) is not None}

    def clock_changed(self) -> None:
        """Work out all times again after the wall clock was set."""
        for job in self._scheduler.get_jobs():
            if not job.id.startswith(_DEADLINE_PREFIX):
                job.reschedule(job.trigger)
        self._scheduler.wakeup()

    def _add(self, name: str, trigger: object, action: Callable[[], Awaitable[None]]) -> None:
        self._scheduler.add_job(action, trigger, id=name, replace_existing=True)

    def _remove(self, prefix: str) -> None:
        for job in self._scheduler.get_jobs():
            if job.id == prefix or (prefix.endswith("-") and job.id.startswith(prefix)):
                try:
                    self._scheduler.remove_job(job.id)
                except JobLookupError:
                    continue  # a deadline that passed at this very moment

    async def _call_wake(self) -> None:
        self._wake()
