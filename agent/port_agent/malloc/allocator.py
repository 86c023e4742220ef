"""Read and steer the preloaded allocator of this process, or make glibc's use less memory where none is preloaded."""

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Self

SMALLEST_BLOCK_BYTES = 64 << 10
"""Requests from this size on are blocks of the allocator, smaller ones are glibc's (THRESHOLD in budget_malloc.c)."""

INTERFACE_VERSION = 2
"""INTERFACE_VERSION in budget_malloc.c."""
_UNLIMITED = 2**64 - 1

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """The allocator's counters, in whole pages.

    Exact for blocks of 64 KiB and more, which are all it sees.
    """

    live_bytes: int
    """Handed out and not freed."""
    cached_bytes: int
    """Freed, still mapped, ready for reuse."""
    peak_live_bytes: int
    """Highest `live_bytes` since the last `reset_peak`."""
    peak_mapped_bytes: int
    """Highest `live_bytes + cached_bytes` since the last `reset_peak`."""
    limit_bytes: int | None
    """The cache is trimmed to keep live + cached blocks below this; None: no limit."""
    hard_limit_bytes: int | None
    """Requests that would lift `live_bytes` above this fail; None: no limit."""
    live_blocks: int
    cached_blocks: int
    maps: int
    """Requests served by fresh zero pages alone."""
    reuses: int
    """Requests served from the cache."""
    splits: int
    """Number of them that took a part of a larger block."""
    assemblies: int
    """Requests served by moving pages of cached blocks together."""
    moved_bytes: int
    """Pages moved for them, in total."""
    evicted_bytes: int
    """Unmapped to stay below the limit or on trim, in total."""
    refusals: int
    """Requests that found no memory."""
    metadata_bytes: int
    """Mapped for bookkeeping, in no other figure here."""


class _RawStats(ctypes.Structure):
    """struct block_cache_stats of block_cache.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in AllocatorStats.__dataclass_fields__)


class Allocator:
    """The budget-aware allocator that this process was started with; see `active`."""

    def __init__(self, process: ctypes.PyDLL, process_without_gil: ctypes.CDLL) -> None:
        # calls of a microsecond keep the GIL; those that unmap memory take milliseconds and release it
        self._read = process.port_malloc_stats
        self._read_live = process.port_malloc_live_bytes
        self._read_live.restype = ctypes.c_uint64
        self._read_peak_live = process.port_malloc_peak_live_bytes
        self._read_peak_live.restype = ctypes.c_uint64
        self._reset_peak = process.port_malloc_reset_peak
        self._set_limit = process_without_gil.port_malloc_set_limit
        self._set_limit.argtypes = [ctypes.c_size_t]
        self._set_hard_limit = process_without_gil.port_malloc_set_hard_limit
        self._set_hard_limit.argtypes = [ctypes.c_size_t]
        self._trim = process_without_gil.port_malloc_trim
        self._trim.argtypes, self._trim.restype = [ctypes.c_size_t], ctypes.c_size_t
        self._close_code = getattr(process, "port_malloc_close_code", None)
        if self._close_code is not None:
            self._close_code.restype = ctypes.c_size_t
        self._trim_glibc = process_without_gil.malloc_trim
        self._trim_glibc.argtypes = [ctypes.c_size_t]
        self._process = process

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return the allocator if it was preloaded into this process in a version that this code knows."""
        if sys.platform != "linux":
            return None
        process = ctypes.PyDLL(None)
        if not hasattr(process, "port_malloc_version") or process.port_malloc_version() != INTERFACE_VERSION:
            return None
        return cls(process, ctypes.CDLL(None))

    def stats(self) -> AllocatorStats:
        """Return all counters, read at one instant."""
        raw = _RawStats()
        self._read(ctypes.byref(raw))
        values = {name: getattr(raw, name) for name in AllocatorStats.__dataclass_fields__}
        for name in ("limit_bytes", "hard_limit_bytes"):
            values[name] = None if values[name] == _UNLIMITED else values[name]
        return AllocatorStats(**values)

    def live_bytes(self) -> int:
        """Return the bytes handed out and not freed; cheaper than `stats()`."""
        return int(self._read_live())

    def peak_live_bytes(self) -> int:
        """Return the highest `live_bytes` since the last `reset_peak`; cheaper than `stats()`."""
        return int(self._read_peak_live())

    def reset_peak(self) -> None:
        """Restart both peaks at what is live and mapped now."""
        self._reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Keep live + cached blocks below `limit_bytes` from now on, releasing any excess at once."""
        self._set_limit(_UNLIMITED if limit_bytes is None else limit_bytes)

    def set_hard_limit(self, limit_bytes: int | None) -> None:
        """Fail requests (MemoryError, torch's RuntimeError) that would lift live blocks above `limit_bytes`."""
        self._set_hard_limit(_UNLIMITED if limit_bytes is None else limit_bytes)

    def trim(self, keep_bytes: int = 0) -> int:
        """Release cached blocks to the system until `keep_bytes` of them are left; return the bytes released.

        Memory that glibc holds for small allocations is released as well, and not counted in the result.
        """
        given_back = int(self._trim(keep_bytes))
        self._trim_glibc(0)
        return given_back

    def close_code(self) -> int:
        """Make code that libraries generated read-only, so that RLIMIT_DATA does not count its memory.

        Returns the bytes; 0 if the library was built before this existed. Call it only while no library writes code.
        """
        return 0 if self._close_code is None else int(self._close_code())

    def allow_reservations(self) -> bool:
        """Count reserved address space (MAP_NORESERVE) against RLIMIT_DATA only as far as it is touched.

        The soft limit must be below the hard one. A process that touches more than its limit is killed. Returns False
        if the library was built before this existed.
        """
        if not hasattr(self._process, "port_malloc_allow_reservations"):
            return False
        self._process.port_malloc_allow_reservations()
        return True

    def widen_data_limit(self, nbytes: int) -> None:
        """Raise (or lower, `nbytes` negative) the soft RLIMIT_DATA, as far as the hard one allows."""
        self._process.port_malloc_widen_data_limit(ctypes.c_ssize_t(nbytes))


@cache
def active() -> Allocator | None:
    """Return the budget-aware allocator if this process runs on it, otherwise None."""
    return Allocator.of_this_process()


def thrifty_glibc() -> bool:
    """Make glibc release freed blocks of 64 KiB and more to the system; return False if that is impossible.

    For a process that is already running, such as a notebook with `agent.budget`: from now on RSS follows what is
    allocated, and every page of a new block costs a page fault. Free memory that glibc holds now is released. Does
    nothing with the preloaded allocator, which is more frugal already (the result is then True).
    """
    if active() is not None:
        return True
    if sys.platform != "linux":
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "mallopt") or not hasattr(process, "malloc_trim"):
        return False
    done = process.mallopt(_M_MMAP_THRESHOLD, SMALLEST_BLOCK_BYTES)
    done &= process.mallopt(_M_TRIM_THRESHOLD, SMALLEST_BLOCK_BYTES)
    process.malloc_trim(ctypes.c_size_t(0))
    return bool(done)


def release_free_memory() -> None:
    """Release unused memory of this process's malloc, as far as the platform can."""
    allocator = active()
    if allocator is not None:
        allocator.trim()
        return
    if sys.platform not in ("linux", "darwin"):
        return
    process = ctypes.CDLL(None)
    if hasattr(process, "malloc_trim"):
        process.malloc_trim(ctypes.c_size_t(0))
    elif hasattr(process, "malloc_zone_pressure_relief"):  # <malloc/malloc.h> of macOS: all zones, as much as possible
        process.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
