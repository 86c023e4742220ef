"""A memory cgroup and the kernel's swap, for measurements as root: what people do today when memory is short."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_ZRAM = Path("/sys/block/zram0")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def obstacle() -> str:
    """Return why swap cannot be measured here, or ""."""
    if os.geteuid() != 0:
        return "needs root (cgroup, swapon)"
    if any(shutil.which(tool) is None for tool in ("mkswap", "swapon", "swapoff")):
        return "mkswap, swapon or swapoff is missing"
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        return "swap is on already; it would be measured, too (swapoff -a first)"
    return group_obstacle()


def group_obstacle() -> str:
    """Return why no memory cgroup can be made here, or ""."""
    try:
        with memory_group(1 << 30):
            return ""
    except OSError as error:
        return f"no memory cgroup can be made: {error}"


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Callable[[int], None]]:
    """Make a group of at most `limit_bytes`, swappiness 100; gives a function that moves a process in by its id."""
    old = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if old else _V2) / f"port-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_bytes))
        if old:
            (group / "memory.swappiness").write_text("100")
        yield lambda process: _join(group, process)
    finally:
        group.rmdir()


def _join(group: Path, process: int) -> None:
    (group / "cgroup.procs").write_text(str(process))


@contextlib.contextmanager
def swap_file(folder: Path, size_bytes: int) -> Iterator[None]:
    """Swap to a file in `folder` inside the block."""
    path = folder / "swapfile"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    path.chmod(0o600)
    try:
        with _swapping(path):
            yield
    finally:
        path.unlink()


def zram_obstacle() -> str:
    """Return why the kernel cannot swap to compressed RAM here, or ""."""
    return "" if _ZRAM.is_dir() and Path("/dev/zram0").exists() else "no zram device"


@contextlib.contextmanager
def zram(size_bytes: int) -> Iterator[None]:
    """Swap to compressed RAM inside the block."""
    (_ZRAM / "disksize").write_text(str(size_bytes))
    try:
        with _swapping(Path("/dev/zram0")):
            yield
    finally:
        (_ZRAM / "reset").write_text("1")


@contextlib.contextmanager
def _swapping(path: Path) -> Iterator[None]:
    subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
    subprocess.run(["swapon", str(path)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=True, capture_output=True)


def swapped_bytes() -> tuple[int, int]:
    """Return the bytes swapped in and out since boot, by the whole machine."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["pswpin"]) * _PAGE, int(counts["pswpout"]) * _PAGE
