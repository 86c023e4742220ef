"""Measure how fast a medium writes once its cache is full.

Cards and sticks write the first hundreds of MiB to faster cells (pSLC), and become slower when those are full.
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from port_planner.base.direct_io import bypass_page_cache

WINDOW_BYTES = 64 << 20
"""Bytes written between two measurements of the speed."""
MAX_BYTES = 4 << 30
"""Bytes written in total: a five-thousandth of what a card of 20 TB endures."""
MAX_SECONDS = 120.0
KEPT_SHARE = 0.05
"""Share of the free space that is left free."""
_STEADY_WINDOWS = 4
_MIN_WINDOWS = 24
"""Least number of windows: 1.5 GiB, unless the speed drops before.

A card's cache may be larger than what was written until then.
"""
_STEADY_SPREAD = 0.15
_FALLEN = 1.3
"""Factor: a window that takes longer than the first one by this factor no longer ends in the cache."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SustainedWrite:
    """Bytes per second at first and at the end; `steady`: whether the speed had stopped dropping when writing ended."""

    burst_bytes_per_s: float
    sustained_bytes_per_s: float
    written_bytes: int
    steady: bool


def measure_sustained(
    directory: Path, *, max_bytes: int = MAX_BYTES, progress: Callable[[float], None] = lambda share: None
) -> SustainedWrite:
    """Write to an unlinked file in `directory`, bypassing the page cache, until the speed is steady.

    Raises OSError if that fails, also for a medium without space for two windows.
    """
    state = os.statvfs(directory)
    free_bytes = int(state.f_bavail * state.f_frsize * (1 - KEPT_SHARE))
    block = mmap.mmap(-1, _CHUNK_BYTES)  # page-aligned, as O_DIRECT requires
    block.write(os.urandom(_CHUNK_BYTES))  # a controller cannot compress it
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor = file.fileno()
        bypass_page_cache(descriptor)

        def write(count_bytes: int) -> float:
            began = time.perf_counter()
            for _ in range(count_bytes // _CHUNK_BYTES):
                os.write(descriptor, block)
            os.fsync(descriptor)
            return time.perf_counter() - began

        return until_steady(write, max_bytes=min(max_bytes, max(free_bytes, 2 * WINDOW_BYTES)), progress=progress)


def until_steady(
    write: Callable[[int], float], *, max_bytes: int, progress: Callable[[float], None] = lambda share: None
) -> SustainedWrite:
    """Return the speeds of `write`, which writes the given number of bytes and returns the seconds that it took.

    It ends when the last windows took equally long, at `max_bytes`, or after `MAX_SECONDS`.
    """
    seconds: list[float] = []
    while (len(seconds) + 1) * WINDOW_BYTES <= max_bytes and sum(seconds) < MAX_SECONDS and not is_steady(seconds):
        seconds.append(write(WINDOW_BYTES))
        progress(len(seconds) * WINDOW_BYTES / max_bytes)
    last = statistics.median(seconds[-_STEADY_WINDOWS:])
    return SustainedWrite(
        WINDOW_BYTES / seconds[0], WINDOW_BYTES / last, len(seconds) * WINDOW_BYTES, is_steady(seconds)
    )


def is_steady(seconds: Sequence[float]) -> bool:
    """Return whether the newest windows took equally long, so that the cache is full or absent."""
    newest = seconds[-_STEADY_WINDOWS:]
    if len(newest) < _STEADY_WINDOWS:
        return False
    pace = statistics.median(newest)
    full = len(seconds) >= _MIN_WINDOWS or min(newest) > _FALLEN * seconds[0]
    return full and max(newest) - min(newest) <= _STEADY_SPREAD * pace
