"""The clock of all metering: seconds that keep running while the machine is suspended."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux: CLOCK_BOOTTIME. On macOS CLOCK_MONOTONIC itself counts sleep (`time.monotonic` there does not)."""


def now_s() -> float:
    """Return seconds since boot, suspension included, so that a suspended hour shows as a gap of an hour."""
    return time.clock_gettime(_CLOCK)


def slept_s() -> float:
    """Return how many seconds this machine has been suspended since it booted."""
    # Linux: CLOCK_MONOTONIC stands still meanwhile. macOS: `time.monotonic` does.
    return now_s() - time.monotonic()
