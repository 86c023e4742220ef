"""Sensors are read by a thread: one that hangs (a dead bus, a FIFO, a file server that is gone) holds up nothing else.

A file that gives no answer in time is left out from then on, which its reader sees as ETIMEDOUT, and another thread goes on
without it; once it answers after all, it is read again.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from port_agent.facts.sysfs import ReadAbandonedError, ReadWatch, Tree

DEADLINE_S = 2.0
"""What one file may take; the slowest gauges, behind an embedded controller, take tenths of a second."""
MAX_HUNG = 8
"""So many threads may hang; past that nothing is read any more."""

T = TypeVar("T")
_Task = Callable[[], None]


class SensorThread:
    """Reads on a thread that is replaced where a file holds it up. Of one event loop."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._reader: _Reader | None = None
        self._hung: list[_Reader] = []

    async def read(self, tree: Tree, sensors: Callable[[], T]) -> T | None:
        """Return what `sensors` read of `tree`; None while `MAX_HUNG` of its files hang."""
        while True:
            self._hung = [reader for reader in self._hung if reader.is_alive()]
            if len(self._hung) >= MAX_HUNG:
                return None
            if self._reader is None:
                self._reader = _Reader()
            watch = tree.watch = ReadWatch()
            answer = self._reader.submit(sensors)
            while not answer.done():
                await asyncio.wait({answer}, timeout=self._deadline_s)
                if not answer.done() and time.monotonic() - watch.since_s >= self._deadline_s:
                    break
            if answer.done():
                return answer.result()
            tree.abandon(watch)
            answer.cancel()
            self._reader.close()
            self._hung.append(self._reader)
            self._reader = None

    def close(self) -> None:
        """Let the thread end; one that hangs ends with the process."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Reader(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="sensors", daemon=True)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        self._tasks.put(None)

    def submit(self, sensors: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(value: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]  # of `sensors`, where nothing was raised

        def task() -> None:
            value: T | None = None
            failure: Exception | None = None
            try:
                value = sensors()
            except ReadAbandonedError:
                return
            except Exception as error:  # it belongs to whoever waits for the answer
                failure = error
            loop.call_soon_threadsafe(tell, value, failure)

        self._tasks.put(task)
        return answer
