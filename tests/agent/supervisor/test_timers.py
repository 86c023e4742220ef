"""Borders of windows and deadlines wake the loop."""

import asyncio
from datetime import datetime, time

from agent.policy.decide import TimeWindow
from agent.supervisor.timers import Timers


def test_agenda_wakes_at_borders_and_never_drops_late_jobs() -> None:
    async def plan() -> dict[str, datetime]:
        timers = Timers(lambda: None)
        timers.start()
        timers.set_windows([TimeWindow(6, time(22), time(7)), TimeWindow(0, time(1, 30), time(2))])
        timers.set_deadline(4, datetime(2035, 1, 1).timestamp())
        timers.every(60.0, "chore", lambda: asyncio.sleep(0))
        times = timers.next_times()
        assert timers.has("chore")
        timers.clock_changed()
        for job in timers._scheduler.get_jobs():
            assert (job.misfire_grace_time, job.coalesce, job.max_instances) == (None, True, 1)
        timers.cancel("chore")
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


def test_a_deadline_in_the_past_wakes_at_once() -> None:
    async def wait() -> None:
        woken = asyncio.Event()
        timers = Timers(woken.set)
        timers.start()
        timers.set_deadline(1, 1_000_000.0)
        await asyncio.wait_for(woken.wait(), 10.0)
        timers.stop()

    asyncio.run(wait())
