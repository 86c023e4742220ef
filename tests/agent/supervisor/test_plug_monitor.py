"""The tripwire: only a change calls."""

import asyncio
import threading

from port_agent.supervisor.plug_monitor import PlugMonitor


def test_only_a_change_is_heard_and_only_once() -> None:
    async def watch() -> int:
        heard, changed, seen, reads = 0, asyncio.Event(), asyncio.Event(), 0
        loop = asyncio.get_running_loop()

        def read() -> tuple[str, ...]:
            nonlocal reads
            reads += 1
            if reads == 8:
                loop.call_soon_threadsafe(seen.set)
            return ("online",) if reads < 4 else ("offline",)

        def on_change() -> None:
            nonlocal heard
            heard += 1
            changed.set()

        monitor = PlugMonitor(read, on_change)
        monitor.arm()
        async with asyncio.timeout(30.0):
            await changed.wait()
            monitor.arm()  # goes on from what it saw
            await seen.wait()
        monitor.disarm()
        monitor.close()
        return heard

    assert asyncio.run(watch()) == 1


def test_a_read_that_gives_no_answer_is_said_and_the_loop_goes_on() -> None:
    async def watch() -> None:
        asked, answer = threading.Event(), threading.Event()

        def read() -> tuple[str, ...]:
            asked.set()
            answer.wait()
            return ()

        monitor = PlugMonitor(read, lambda: None)
        assert monitor.silent_s() == 0.0
        monitor.arm()
        await asyncio.to_thread(asked.wait, 30.0)
        assert monitor.silent_s() > 0.0
        answer.set()
        monitor.close()

    asyncio.run(watch())
