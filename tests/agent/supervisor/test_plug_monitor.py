"""The tripwire: only a change calls."""

import asyncio

from port_agent.supervisor.plug_monitor import PlugMonitor


def test_only_a_change_is_heard_and_only_once() -> None:
    async def watch() -> int:
        heard, changed, plugs, reads = 0, asyncio.Event(), [("online",)], 0

        def read() -> tuple[str, ...]:
            nonlocal reads
            reads += 1
            if reads == 4:
                plugs[0] = ("offline",)
            return plugs[0]

        def on_change() -> None:
            nonlocal heard
            heard += 1
            changed.set()

        wire = PlugMonitor(read, on_change)
        wire.arm()
        async with asyncio.timeout(30.0):
            await changed.wait()
        assert reads == 4
        wire.arm()
        wire.disarm()
        return heard

    assert asyncio.run(watch()) == 1
