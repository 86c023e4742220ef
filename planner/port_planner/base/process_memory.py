"""Resident memory of this process: the current value, the peak, and a peak that can be reset."""

import os
import re
import resource
import sys
from array import array
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

PAGE_BYTES: int = os.sysconf("SC_PAGE_SIZE")
"""Bytes of a memory page: 4 KiB; 16 KiB on a Raspberry Pi 5; 64 KiB on some Arm server distributions."""

_HUGE_PAGE_BYTES = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PRESENT = 63
"""The bit of a /proc/self/pagemap entry that marks a resident page (Documentation/admin-guide/mm/pagemap.rst)."""


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
    """Return the highest resident memory of this process or of any child that it waited for, in bytes.

    By getrusage(2), a child counts the memory that its parent had when it was started, so the children's own
    peak cannot be separated.
    """
    return max(peak_resident_bytes(), peak_of_children_bytes())


def peak_of_children_bytes() -> int:
    """Return the highest resident memory of any child that this process waited for, or of this process when it started
    one, in bytes.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts on Linux: private writable mappings, touched or not."""
    return _status("VmData")


def untouched_block_bytes() -> int:
    """Return the non-resident bytes of partly touched huge pages that were requested (Linux; 0 elsewhere).

    The kernel may complete partly touched huge pages at any time (khugepaged, Documentation/admin-guide/
    mm/transhuge.rst), so resident memory grows by up to this much without the process doing anything. It does not
    complete untouched ones, of which mimalloc, the allocator of torch's wheels for Arm, reserves a GiB.
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
    """Yield the first address and the end of each area for which huge pages were requested, from an smaps text."""
    bounds = (0, 0)
    for line in areas.splitlines():
        key, _, value = line.partition(":")
        if key == "VmFlags" and "hg" in value.split():
            yield bounds
        elif found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            bounds = int(found[1], 16), int(found[2], 16)


def _untouched(pagemap: FileIO, start: int, nbytes: int) -> int:
    """Return the non-resident bytes of a huge page; 0 if none of it is resident."""
    pages = array("Q", os.pread(pagemap.fileno(), nbytes // PAGE_BYTES * 8, start // PAGE_BYTES * 8))
    resident = sum(page >> _PRESENT for page in pages)
    return nbytes - resident * PAGE_BYTES if resident else 0


def reset_peak() -> None:
    """Reset `peak_resident_bytes` to the current resident memory.

    Raises OSError if the system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5")


def available_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much more memory this process can take, limited by the machine and by its cgroups (v2)."""
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
