"""Query a source on a separate thread, so that one that hangs (a dead bus, a busy controller) blocks nothing.

The caller waits briefly, which is enough for kernel files and chips on I2C. A later answer is used at the next query; a
source that is silent for longer counts as broken until it answers, and no second thread is started for it.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from port_agent.energy.sources.power_source import PowerSource, SelfTest, SensorReading, SourceError, SourceInfo
from port_agent.facts.reader_thread import ReaderThread

WAIT_S = 0.05
"""Seconds to wait for a reading: half of what stopping a worker may take."""
DEADLINE_S = 2.0
"""Seconds of silence after which a source counts as broken; also the limit for opening and testing one."""

T = TypeVar("T")
_REMEDY = "check whether its bus or controller hangs (dmesg), or exclude the source with energy.disable"


class ReadThread:
    """The thread of one source, which handles one query at a time."""

    def __init__(self, name: str) -> None:
        self._reader = ReaderThread(f"power-{name}")
        self._unanswered: Future[object] | None = None
        self._asked_s = 0.0

    def ask(self, question: Callable[[], T], wait_s: float) -> T:
        """Return the answer.

        Raises TimeoutError if it, or that to an earlier query, is late; also raises whatever `question` raises.
        """
        if self._unanswered is not None and not self._unanswered.done():
            raise TimeoutError
        answer = self._reader.ask(question)
        self._unanswered, self._asked_s = answer, time.monotonic()  # type: ignore[assignment]  # read by `late` alone
        found = answer.exception(wait_s)
        self._unanswered = None
        if found is not None:
            raise found
        return answer.result()

    def late(self) -> "Future[object] | None":
        """Return a late answer, once; None if there is none."""
        if self._unanswered is None or not self._unanswered.done():
            return None
        late, self._unanswered = self._unanswered, None
        return late

    def silent_s(self) -> float:
        """Return how long the current query has waited for its answer."""
        return 0.0 if self._unanswered is None else time.monotonic() - self._asked_s

    def stop(self) -> None:
        """End the thread; one that hangs ends once its read returns. The next query starts another."""
        self._reader.stop()


class ReadThreads:
    """Threads by their sources' names: a reopened source is queried on the thread that it may still block."""

    def __init__(self) -> None:
        self._threads: dict[str, ReadThread] = {}

    def open(self, name: str, opener: Callable[[], PowerSource]) -> PowerSource:
        """Open a source with `opener`, to be queried on its thread, and return it; raises `SourceError`."""
        thread = self._threads.setdefault(name, ReadThread(name))
        thread.late()
        try:
            return TimelySource(thread.ask(opener, DEADLINE_S), thread)
        except TimeoutError as error:
            thread.stop()
            raise SourceError(name, f"has not answered for {thread.silent_s():.0f} s", _REMEDY) from error
        except SourceError:
            thread.stop()
            raise


class TimelySource:
    """A source that is queried on its thread."""

    def __init__(self, inner: PowerSource, thread: ReadThread, wait_s: float = WAIT_S) -> None:
        self._inner, self._thread, self._wait_s = inner, thread, wait_s
        self._newest: SensorReading | None = None

    @property
    def info(self) -> SourceInfo:
        """The description of the source itself."""
        return self._inner.info

    def read(self, now_s: float) -> SensorReading | None:
        """Return the reading at `now_s`, or the previous one if it is late; raise `SourceError` if the
        source is broken or silent.
        """
        late = self._thread.late()
        try:
            if late is None:
                self._newest = self._thread.ask(partial(self._inner.read, now_s), self._wait_s)
            else:
                self._newest = late.result()  # type: ignore[assignment]  # of this source's `read`
        except TimeoutError as error:
            silent_s = self._thread.silent_s()
            if self._newest is None or silent_s >= DEADLINE_S:
                raise SourceError(self.info.name, f"has not answered for {silent_s:.1f} s", _REMEDY) from error
        return self._newest

    def self_test(self, now_s: float) -> SelfTest:
        """Return the source's own test."""
        try:
            return self._thread.ask(partial(self._inner.self_test, now_s), DEADLINE_S)
        except TimeoutError:
            return SelfTest(False, f"has not answered for {self._thread.silent_s():.0f} s", _REMEDY)

    def close(self) -> None:
        """Close the source's files, unless a read of one hangs."""
        self._thread.late()
        if not self._thread.silent_s():
            self._inner.close()
        self._thread.stop()
