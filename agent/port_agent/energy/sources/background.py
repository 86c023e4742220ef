"""Read a slow source in a separate thread, so that a network meter never blocks the supervisor."""

import threading
from collections.abc import Callable
from dataclasses import replace

from port_agent.energy.sources.power_source import PowerSource, SelfTest, SensorReading, SourceError, SourceInfo
from port_agent.system.clock import now_s as clock_now_s

PLUGIN_FAILURES = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of third-party code that count as failures. A plug-in must not stop the agent."""

_STALE_PERIODS = 5


class BackgroundSource:
    """The newest reading of another source, which a thread takes once per period."""

    def __init__(self, inner: PowerSource, clock: Callable[[], float] = clock_now_s) -> None:
        self._inner = inner
        self._clock = clock
        self.info: SourceInfo = inner.info
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: SensorReading | None = None
        self._newest_s = self._clock()
        self._error: SourceError | None = None
        self._thread = threading.Thread(target=self._run, name=f"power-{inner.info.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            reading, error = self._attempt()
            with self._lock:
                self._newest, self._error, self._newest_s = reading, error, self._clock()
            self._stop.wait(self.info.period_s)

    def _attempt(self) -> tuple[SensorReading | None, SourceError | None]:
        try:
            return self._inner.read(self._clock()), None
        except SourceError as error:
            return None, error
        except PLUGIN_FAILURES as error:
            return None, SourceError(
                self.info.name, f"failed with {type(error).__name__}: {error}", "report it to the plug-in's author"
            )

    def read(self, now_s: float) -> SensorReading | None:
        """Return the newest reading with the time when it was taken; raise `SourceError` if it failed or is stale."""
        with self._lock:
            newest, error, taken_s = self._newest, self._error, self._newest_s
        if error is not None:
            raise error
        age_s = self._clock() - taken_s
        if age_s > _STALE_PERIODS * self.info.period_s + 5.0:
            raise SourceError(self.info.name, f"no answer for {age_s:.0f} s", "check that the meter is reachable")
        # The caller may count on another clock than this thread.
        return None if newest is None else replace(newest, time_s=now_s - age_s)

    def self_test(self, now_s: float) -> SelfTest:
        """Return the inner source's own test."""
        return self._inner.self_test(now_s)

    def close(self) -> None:
        """Stop the thread and close the inner source."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._inner.close()
