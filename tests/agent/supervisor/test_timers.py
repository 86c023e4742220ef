"""Borders of windows and deadlines wake the loop."""

import asyncio
import subprocess
import sys
from datetime import datetime, time

import pytest
import tzlocal

from port_agent.policy.decide import TimeWindow
from port_agent.supervisor.timers import Timers


def test_agenda_wakes_at_borders_and_never_drops_late_jobs() -> None:
    async def plan() -> dict[str, datetime]:
        timers = Timers(lambda: None)
        timers.set_windows([TimeWindow(6, time(22), time(7)), TimeWindow(0, time(1, 30), time(2))])
        timers.set_deadline(4, datetime(2035, 1, 1).timestamp())
        times = timers.next_times()
        assert timers.has("deadline-4") and timers._scheduler is not None
        timers.clock_changed()
        for job in timers._scheduler.get_jobs():
            assert (job.misfire_grace_time, job.coalesce, job.max_instances) == (None, True, 1)
        timers.set_deadline(4, None)
        timers.set_windows([])
        assert timers.next_times() == {}
        timers.stop()
        return times

    times = asyncio.run(plan())
    assert {f"{at:%a %H:%M}" for name, at in times.items() if name.startswith("window-")} == {
        "Sun 22:00",
        "Mon 07:00",
        "Mon 01:30",
        "Mon 02:00",
    }
    assert times["deadline-4"].year == 2035


def test_windows_open_by_the_zone_that_the_machine_is_in_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def offsets() -> list[float]:
        timers, found = Timers(lambda: None), []
        windows = [TimeWindow(day, time(22), time(7)) for day in range(7)]
        timers.zone_changed(windows)
        assert timers.next_times() == {}, "nothing is planned, nothing to work out again"
        for zone in ("Asia/Kathmandu", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", zone)
            timers.set_windows(windows)
            timers.zone_changed(windows)
            (offset,) = {at.utcoffset() for at in timers.next_times().values()}
            found.append(offset.total_seconds() / 3600 if offset else 0.0)
        timers.stop()
        return found

    try:
        assert asyncio.run(offsets()) == [5.75, 9.0]
    finally:
        monkeypatch.undo()
        tzlocal.reload_localzone()


def test_a_deadline_in_the_past_wakes_at_once() -> None:
    async def wait() -> None:
        woken = asyncio.Event()
        timers = Timers(woken.set)
        timers.set_deadline(1, 1_000_000.0)
        await asyncio.wait_for(woken.wait(), 10.0)
        timers.stop()

    asyncio.run(wait())


def test_a_periodic_task_comes_again_though_it_failed_until_it_is_cancelled() -> None:
    told: list[str] = []

    async def wait() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
        timers, third, runs = Timers(lambda: None), asyncio.Event(), 0

        async def task() -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                raise OSError("no disk")
            if runs == 3:
                third.set()

        timers.every(0.01, "chore", task)
        assert timers.has("chore")
        await asyncio.wait_for(third.wait(), 10.0)
        timers.cancel("chore")
        assert not timers.has("chore")
        done, others, later = runs, 0, asyncio.Event()

        async def another() -> None:
            nonlocal others
            others += 1
            if others == 3:
                later.set()

        timers.every(0.01, "another", another)
        await asyncio.wait_for(later.wait(), 10.0)
        assert runs == done
        timers.stop()

    asyncio.run(wait())
    assert told == ["periodic task chore failed"]


@pytest.mark.process
def test_without_a_window_or_a_deadline_the_calendar_is_not_loaded() -> None:
    program = (
        "import asyncio, sys\nfrom port_agent.supervisor.timers import Timers\n"
        "async def idle():\n"
        "    timers = Timers(lambda: None)\n"
        "    timers.set_windows([]); timers.set_deadline(1, None); timers.clock_changed(); timers.stop()\n"
        "asyncio.run(idle())\nprint('apscheduler' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
