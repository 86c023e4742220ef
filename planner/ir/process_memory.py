"""Resident memory of this process: what it is now, its peak, and the peak measured anew."""

import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    if sys.platform == "linux":
        return _status("VmRSS")
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the highest resident memory since the process started or, on Linux, since `reset_peak`."""
    if sys.platform == "linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, getrusage(2)


def reset_peak() -> None:
    """Let `peak_resident_bytes` start again from what is resident now.

    OSError where the system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
