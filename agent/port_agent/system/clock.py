"""The clocks of the supervisor, which tests can replace, and the clock of all metering, which keeps running while
the machine is suspended.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

CLOCK_SET_AFTER_S = 1735689600.0
"""2025-01-01 in Unix time. This program is younger, so an earlier date means that the clock is not set."""

LONGEST_PAUSE_S = 366 * 86400.0
"""Longest requested time, in seconds, of a pause or of training now; a longer request has no end."""

_SLEEPLESS = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux: CLOCK_BOOTTIME. On macOS CLOCK_MONOTONIC itself counts sleep (`time.monotonic` there does not)."""


class Clock(Protocol):
    """Spans are measured on `monotonic_s`; only calendars and messages use `wall_s` (Unix time)."""

    def monotonic_s(self) -> float:
        """Return seconds that never jump."""

    def wall_s(self) -> float:
        """Return Unix time, which NTP or a person may set at any moment."""

    def uptime_s(self) -> float:
        """Return seconds that never jump and continue while the machine sleeps."""


class SystemClock:
    """The clocks of this machine."""

    def monotonic_s(self) -> float:
        """Return CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return CLOCK_REALTIME."""
        return time.time()

    def uptime_s(self) -> float:
        """Return CLOCK_BOOTTIME, or on a Mac CLOCK_MONOTONIC, which counts sleep there."""
        return now_s()


def now_s() -> float:
    """Return seconds since boot, suspension included.

    Metering uses this clock, so a suspended hour shows as a gap of an hour.
    """
    return time.clock_gettime(_SLEEPLESS)


def slept_s() -> float:
    """Return how many seconds this machine has been suspended since it booted."""
    # Linux: CLOCK_MONOTONIC stops meanwhile. macOS: `time.monotonic` does.
    return now_s() - time.monotonic()


def zone_changed() -> bool:
    """Return whether the time zone changed since the last call. The C library checks only on request."""
    before = (time.timezone, time.altzone, time.tzname)
    time.tzset()
    return before != (time.timezone, time.altzone, time.tzname)


def local_time(wall_s: float) -> datetime:
    """Return naive local time, which is what people mean by windows."""
    return datetime.fromtimestamp(wall_s)


def day_of(wall_s: float) -> str:
    """Return the local date as YYYY-MM-DD; written bytes are counted per local day."""
    return local_time(wall_s).strftime("%Y-%m-%d")


def day_left_s(wall_s: float) -> float:
    """Return the seconds until local midnight, when a new day of `day_of` begins."""
    now = local_time(wall_s)
    return (datetime.combine(now + timedelta(days=1), datetime.min.time()) - now).total_seconds()


def day_start_s(wall_s: float) -> float:
    """Return when the local day of `wall_s` began, in Unix time; days on which clocks are
    changed last 23 or 25 hours.
    """
    return datetime.combine(local_time(wall_s), datetime.min.time()).timestamp()


def local_clock_s(wall_s: float) -> int:
    """Return the local wall time in seconds, as if it were UTC, so that midnights are multiples of a day."""
    return int(local_time(wall_s).replace(microsecond=0, tzinfo=UTC).timestamp())
