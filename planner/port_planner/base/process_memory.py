"""Resident memory of this process: what it is now, its peak, and the peak measured anew."""

import os
import re
import resource
import sys
from array import array
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

PAGE_BYTES: int = os.sysconf("SC_PAGE_SIZE")
"""Of memory: 4 KiB, on a Raspberry Pi 5 16 KiB, 64 KiB where a distribution for Arm servers has it."""

_HUGE_PAGE_BYTES = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PRESENT = 63
"""The bit of an entry of /proc/self/pagemap that says that a page is resident (Documentation/admin-guide/mm/pagemap.rst)."""


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


def peak_with_children_bytes() -> int:
    """Return the highest resident memory of this process or of one that it has waited for, whichever was larger.

    getrusage(2): a child counts what its parent had when it was started, so children alone are not told.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return max(peak_resident_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)


def data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process on Linux: private writable mappings, touched or not."""
    return _status("VmData")


def untouched_block_bytes() -> int:
    """Return what is not resident of the huge pages that are touched in part, where they were asked for, on Linux; else 0.

    The kernel makes huge pages of what is touched in part whenever it comes to it (khugepaged, Documentation/admin-guide/
    mm/transhuge.rst), so resident memory grows by up to this much without the process doing anything. Where no page is touched it makes
    none: mimalloc, which torch's wheels for Arm allocate with, reserves a GiB.
    """
    if sys.platform != "linux" or not _HUGE_PAGE_BYTES.exists():
        return 0
    huge = int(_HUGE_PAGE_BYTES.read_text())
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        return sum(
            _untouched(pagemap, start, huge)
            for low, high in _hinted_areas(Path("/proc/self/smaps").read_text())
            for start in range(-(-low // huge) * huge, high - huge + 1, huge)
        )


def _hinted_areas(areas: str) -> Iterator[tuple[int, int]]:
    """Yield first address and end of each area for which huge pages were asked, of the text of smaps."""
    bounds = (0, 0)
    for line in areas.splitlines():
        key, _, value = line.partition(":")
        if key == "VmFlags" and "hg" in value.split():
            yield bounds
        elif found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            bounds = int(found[1], 16), int(found[2], 16)


def _untouched(pagemap: FileIO, start: int, nbytes: int) -> int:
    """Return the bytes that are not resident of a huge page; 0 where none of it is."""
    pages = array("Q", os.pread(pagemap.fileno(), nbytes // PAGE_BYTES * 8, start // PAGE_BYTES * 8))
    resident = sum(page >> _PRESENT for page in pages)
    return nbytes - resident * PAGE_BYTES if resident else 0


def reset_peak() -> None:
    """Let `peak_resident_bytes` start again from what is resident now.

    OSError where the system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5")


def available_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much more memory this process can take, of the machine and of its groups (cgroup v2)."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().available)
    described = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(described["MemAvailable"].split()[0]) * 1024]
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "0::/")
    group = groups / own.removeprefix("0::").lstrip("/")
    for level in (group, *group.parents):
        limit = level / "memory.max"
        if level.is_relative_to(groups) and limit.exists() and (most := limit.read_text().strip()) != "max":
            files = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
            taken = (
                int((level / "memory.current").read_text()) - int(files["active_file"]) - int(files["inactive_file"])
            )
            free.append(max(int(most) - taken, 0))
    return min(free)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
