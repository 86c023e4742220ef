"""Read sensors on a thread, so that one that hangs (a dead bus, a FIFO, a file server that is down) blocks nothing
else.

A file that does not answer in time is skipped from then on, which its reader sees as ETIMEDOUT, and another thread
continues without it; once it answers, it is read again.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from port_agent.facts.reader_thread import ReaderThread
from port_agent.facts.sysfs import ReadWatch, Tree

DEADLINE_S = 2.0
"""Seconds allowed for one file; the slowest gauges, behind an embedded controller, take tenths of a second."""
MAX_HUNG = 8
"""Number of threads that may hang; beyond this, nothing is read."""

T = TypeVar("T")


class SensorThread:
    """Reads on a thread that is replaced if a file blocks it. Belongs to one event loop."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._reader = ReaderThread("sensors")
        self._hung: list[ReaderThread] = []

    async def read(self, tree: Tree, sensors: Callable[[], T]) -> T | None:
        """Return what `sensors` read from `tree`; None while `MAX_HUNG` of its files hang."""
        while True:
            self._hung = [reader for reader in self._hung if reader.is_alive()]
            if len(self._hung) >= MAX_HUNG:
                return None
            watch = tree.watch = ReadWatch()
            answer = asyncio.wrap_future(self._reader.ask(sensors))
            while not answer.done():
                await asyncio.wait({answer}, timeout=self._deadline_s)
                if not answer.done() and time.monotonic() - watch.since_s >= self._deadline_s:
                    break
            if answer.done():
                return answer.result()
            tree.abandon(watch)
            answer.cancel()
            self._reader.stop()
            self._hung.append(self._reader)
            self._reader = ReaderThread("sensors")

    def close(self) -> None:
        """End the thread; one that hangs ends with the process."""
        self._reader.stop()
