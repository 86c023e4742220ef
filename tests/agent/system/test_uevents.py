"""Kernel events of power supplies, over a real socket."""

import asyncio
import socket

from port_agent.system.uevents import UeventListener


def test_a_kernel_event_of_a_plug_wakes_the_loop() -> None:
    async def listen() -> list[str]:
        heard: list[str] = []
        ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        listener = UeventListener(ours, lambda: heard.append("power"))
        with kernel:
            kernel.send(b"change@/devices/x\0ACTION=change\0SUBSYSTEM=net\0")
            kernel.send(b"change@/devices/ACAD\0ACTION=change\0SUBSYSTEM=power_supply\0SEQNUM=1\0")
            for _ in range(5):
                await asyncio.sleep(0)
        listener.close()
        return heard

    assert asyncio.run(listen()) == ["power"]
