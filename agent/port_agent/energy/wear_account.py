"""Count what the agent itself wrote to flash, by local date.

The budget, `status` and the report all use this count.
"""

import time
from collections.abc import Callable
from typing import Protocol

from port_agent.system.clock import day_left_s, day_of

DAY_S = 86400.0


class WearJournal(Protocol):
    """Where the account is stored."""

    def written_on(self, day: str) -> int:
        """Return the bytes written on the local date `day` (YYYY-MM-DD)."""

    def add_wear(self, day: str, count_bytes: int) -> None:
        """Add to the bytes written on `day`."""


class MemoryJournal:
    """A journal that ends with the process."""

    def __init__(self) -> None:
        self._days: dict[str, int] = {}

    def written_on(self, day: str) -> int:
        """Return the bytes written on `day`."""
        return self._days.get(day, 0)

    def add_wear(self, day: str, count_bytes: int) -> None:
        """Add to the bytes written on `day`."""
        self._days[day] = self.written_on(day) + count_bytes


class WearAccount:
    """Counts what workers and the agent wrote; a day ends at local midnight, when the budget starts again."""

    def __init__(self, wall_s: Callable[[], float] = time.time, journal: WearJournal | None = None) -> None:
        self._wall_s = wall_s
        self._journal = journal or MemoryJournal()
        self._listeners: list[Callable[[float, int], None]] = []

    def add(self, count_bytes: int) -> None:
        """Count bytes that were written just now."""
        if count_bytes <= 0:
            return
        now_s = self._wall_s()
        self._journal.add_wear(day_of(now_s), count_bytes)
        for listener in self._listeners:
            listener(now_s, count_bytes)

    def today_bytes(self) -> int:
        """Return the bytes written since local midnight."""
        return self._journal.written_on(day_of(self._wall_s()))

    def daily_bytes(self) -> float:
        """Return the bytes written per day: the mean since yesterday began, or today's so far if
        nothing was written yesterday.
        """
        now_s = self._wall_s()
        before = self._journal.written_on(day_of(now_s - DAY_S))
        days = 1.0 + (1.0 - day_left_s(now_s) / DAY_S if before else 0.0)
        return (before + self.today_bytes()) / days

    def subscribe(self, listener: Callable[[float, int], None]) -> None:
        """Call `listener` with Unix time and bytes whenever something is counted."""
        self._listeners.append(listener)
