"""How many bytes of tensors a RAM budget allows; the resident memory of the whole process counts, Python and torch
included.
"""

import os
import sys
from collections import deque
from typing import Protocol

from port_agent.guard import GuardedMemory, active_guard
from port_agent.intercept.residency.storages import StorageTable
from port_agent.malloc import Allocator, active, release_free_memory
from port_agent.system.mounts import in_ram
from port_planner.base.code_pages import release_code_pages, release_shared_pages
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.process_memory import PAGE_BYTES, resident_bytes
from port_planner.base.units import format_bytes

_KEPT_FREE = 0.01
"""Share of the budget that is never used for tensors: kernel structures and small allocations between two checks."""

_KEPT_FREE_BYTES = 4 << 20
"""Additional headroom: code that comes back from the page cache between two checks."""

_UNSEEN_CODE_BYTES = 88 << 20
_UNSEEN_CODE_SHARE = 0.75
"""Largest headroom until the first segment has ended, because operators that run for the first time bring in their
code.

A first matrix product takes 78 MiB where libraries lie in large folios (see `port_planner.base.code_pages`): 24 of
code, 30 of MKL's own, and 22 while it runs.
"""

_LATER_CODE_BYTES = 24 << 20
"""Part of that headroom that stays until the end of the segment whatever has come in, because the backward pass brings
in its own code.
"""

_LOOP_OPERATORS = 2000
"""A segment longer than this many operators is a loop, such as a scan of 128 steps. What the process took lately is then what it needs: with
room for code that was not used for so long, it would wait for its pages thousands of times. Guarded memory yields to what comes back.
"""

_LOOK_OPERATORS = 8
_LOOK_BYTES = 4 << 20
"""Resident memory is checked after this many operators, or when tensors changed by this much; a check takes 10 us."""

_MIN_TENSOR_BYTES = 1 << 20

_CODE_RELEASES = 6
"""Code pages are released when interception starts and after the first segments; after that, what runs is needed."""

_NEW_CODE_SEGMENTS = 4
"""Number of first segments that bring in new code: the examination before training, a backward pass, an optimizer step,
and one more. Afterwards the growth is known from them.
"""

_SEGMENTS_REMEMBERED = 8
"""The largest size of the rest of the process over this many segments counts, a step or two: code that was released at
a segment's end comes back when the same operators run again.
"""

_FILES_GROWTH_BYTES = 16 << 20
"""Growth of mapped file pages since their last release, beyond which they are released again: data sets read through
numpy's memmap or Arrow, of which any page may come, and code.
"""

_STATM = "/proc/self/statm"
_STATM_BYTES = 256
"""Seven numbers of at most 20 digits."""


class BudgetTooSmallError(PortError):
    """The process exceeds the budget before any tensor is resident, or an operator that may not exceed it would."""

    exit_code = ExitCode.IMPOSSIBLE


class SharedDevice(Protocol):
    """A device that computes in the host's memory, of which it takes what a budget of RAM bounds."""

    def held_bytes(self) -> int:
        """Return the bytes that the process holds there now: tensors, context and libraries."""

    def seen_bytes(self) -> int:
        """Return the bytes of these that the kernel counts as resident memory of the process."""


class ProcessBudget:
    """Limits the resident memory of this process to `ram_bytes`: the rest of it is measured, and tensors get what is
    left.
    """

    def __init__(self, ram_bytes: int, table: StorageTable) -> None:
        self.ram_bytes, self._table = ram_bytes, table
        self.strict = False
        """Whether an operator that does not fit is rejected; otherwise it runs, is reported, and the budget is
        exceeded.
        """
        self.beside_bytes = 0
        """Memory of another process that counts against the budget meanwhile: the one that plans."""
        self.device: SharedDevice | None = None
        """The device that shares this budget, once it has held a tensor."""
        self.coming_bytes = 0
        """Bytes that this device is about to take."""
        self.together_bytes = 0
        """Bytes that fit on the host, as tensors, and on that device together, when last measured."""
        self._allocator: Allocator | None = active()
        self._guard = active_guard()
        self._of_files = 0
        """File pages when they were last released, without the followed weights."""
        self._looked_at = -_LOOK_BYTES
        self._cache_limit = ram_bytes
        """Limit for the allocator's blocks and the pages of files together."""
        self._skipped = 0
        self._rest_found = deque((0,), maxlen=_SEGMENTS_REMEMBERED)
        self._lately = _Lately()
        self._before_products: int | None = None
        """The rest of the process when a matrix product first ran; None: none has."""
        self._releases_left = _CODE_RELEASES
        release_code_pages()

    @property
    def _usable(self) -> int:
        return int(self.ram_bytes * (1 - _KEPT_FREE)) - _KEPT_FREE_BYTES - self.beside_bytes - self._on_device()

    def _on_device(self) -> int:
        """Return the bytes of the budget that a device that shares it takes now, or is about to."""
        return 0 if self.device is None else self.device.held_bytes() + self.coming_bytes

    def _seen(self) -> int:
        """Return how many bytes of resident memory belong to the device."""
        return 0 if self.device is None else self.device.seen_bytes()

    def _taken(self) -> int:
        """Return what the process takes now, on that device, too."""
        return resident_now() + (0 if self.device is None else self.device.held_bytes() - self.device.seen_bytes())

    @property
    def _coming_bytes(self) -> int:
        """Headroom that is not filled with freed memory for reuse: code that comes in between two checks."""
        return _LATER_CODE_BYTES if self._ended_segments < _NEW_CODE_SEGMENTS else 0

    @property
    def _ended_segments(self) -> int:
        """Segments that have ended, of the first `_CODE_RELEASES`."""
        return _CODE_RELEASES - self._releases_left

    def check(self) -> None:
        """Raise BudgetTooSmallError if the process alone fills the budget."""
        now = resident_now() - (0 if self._guard is None else self._guard.counters().resident_bytes)
        if now + _MIN_TENSOR_BYTES > self._usable:
            raise BudgetTooSmallError(
                f"this process takes {format_bytes(now)} before training, but the budget is {format_bytes(self.ram_bytes)}; "
                f"give at least {format_bytes(now * 1.1)}"
            )

    def held_bytes(self) -> int:
        """Return what the process takes now besides followed tensors.

        Memory kept for reuse and code that has run are released, and no longer expected.
        """
        self._give_back()
        release_code_pages()
        self._rest_found[-1] = 0
        return max(resident_now() - self._seen() - self._table.resident_bytes, 0)

    def lacking_bytes(self, nbytes: int) -> int:
        """Return by how much the process would exceed the budget with `nbytes` more, after releasing everything
        possible.
        """
        if (lacking := self._taken() + nbytes - self.ram_bytes) > -_KEPT_FREE_BYTES:
            self._give_back()
            release_code_pages()
            lacking = self._taken() + nbytes - self.ram_bytes
        return lacking

    def due(self) -> bool:
        """Return whether it is time for another check."""
        self._skipped += 1
        return self._skipped >= _LOOK_OPERATORS or abs(self._table.resident_bytes - self._looked_at) >= _LOOK_BYTES

    @property
    def settling(self) -> bool:
        """Whether code is still released at the ends of segments, because the program has only begun."""
        return self._releases_left > 0

    def end_segment(self) -> None:
        """Record that a segment of the program ended."""
        self._rest_found.append(0)
        self._lately = _Lately()
        if self.settling:
            self._releases_left -= 1
            release_code_pages()
            self._trim_allocator()

    def tensor_bytes(self) -> int:
        """Return how many bytes of tensors fit now, and tell the allocator how much freed memory it may keep.

        Blocks that were allocated but not yet written are not resident, so a single check may find the rest of the
        process too small; the largest recent value counts.
        """
        self._lately.operators += self._skipped
        self._skipped = 0
        self._looked_at = self._table.resident_bytes
        resident = self._look() if sys.platform == "linux" else resident_now()
        if self.strict and self._taken() + _KEPT_FREE_BYTES > self.ram_bytes:
            self.lacking_bytes(0)
            resident = resident_now()
        free_bytes = self._free_bytes(resident - self._seen())
        self.together_bytes = free_bytes + self._on_device()
        return max(free_bytes, _MIN_TENSOR_BYTES)

    def _free_bytes(self, resident: int) -> int:
        """Return how many bytes of the host's tensors fit, of whose side `resident` bytes are resident; negative if the rest takes too much."""
        mapped_bytes = self._table.mapped_bytes
        guarded_bytes = 0 if self._guard is None else self._guard.counters().resident_bytes
        if self._allocator is None and self._guard is not None:
            return self._guarded_bytes(self._guard, resident - guarded_bytes - mapped_bytes, 0)
        if self._allocator is None:
            return self._usable - self._rest(resident - self._table.resident_bytes)
        stats = self._allocator.stats()
        found = resident - stats.live_bytes - stats.cached_bytes - guarded_bytes - mapped_bytes
        rest = self._rest(found)
        self._cache_limit = self._usable - rest - guarded_bytes
        self._allocator.set_limit(max(self._cache_limit - self._coming_bytes - mapped_bytes, stats.live_bytes))
        if self._guard is not None:
            return self._guarded_bytes(self._guard, found, stats.live_bytes)
        foreign = max(stats.live_bytes - (self._table.resident_bytes - mapped_bytes), 0)
        return self._usable - rest - foreign

    def _guarded_bytes(self, guard: GuardedMemory, found_bytes: int, allocated_bytes: int) -> int:
        """Return how many bytes of the host's tensors fit alongside what the allocator has handed out, and the
        `found_bytes` of the rest.

        Guarded memory evicts blocks that no operator has used yet, and measures the rest by itself while an operator
        of the host runs, as the resident pages of mapped files. So in the first segment its limit is without headroom
        for growth of the rest. Afterwards that growth is known; while a device that shares the budget computes, nothing
        measures it.
        """
        rest, lately = self._rest(found_bytes), self._lately.most_bytes(found_bytes)
        if lately is not None:
            rest = min(rest, lately + _LATER_CODE_BYTES)
        left_bytes = self._usable - rest - allocated_bytes
        known = self.device is not None or self._ended_segments > 0
        held_bytes = left_bytes if known else self._usable - found_bytes - allocated_bytes
        guard.set_limit(max(held_bytes, _MIN_TENSOR_BYTES))
        return left_bytes

    def _look(self) -> int:
        """Return the resident bytes of the process, and release the growth of file pages: as much comes again until the
        next time.
        """
        found = _read_statm()
        if _of_files_in(found) - self._table.mapped_bytes > self._of_files + _FILES_GROWTH_BYTES:
            release_shared_pages(in_ram)
            self._of_files = _of_files_in(_read_statm()) - self._table.mapped_bytes
        return _resident_in(found)

    def expect_product(self) -> None:
        """Record that a matrix product is about to run: growth of the process from now on is its code."""
        if self._before_products is None:
            self._before_products = max(self._rest_found)

    def make_way(self, nbytes: int) -> None:
        """Make the allocator release what it keeps if `nbytes` of a file's pages are about to come in."""
        if self._allocator is not None:
            mapped_bytes = self._table.mapped_bytes + nbytes
            kept_bytes = self._cache_limit - self._coming_bytes - mapped_bytes
            self._allocator.set_limit(max(kept_bytes, self._allocator.live_bytes()))

    def _give_back(self) -> None:
        if self._guard is not None:
            self._guard.trim()
        self._trim_allocator()

    def _trim_allocator(self) -> None:
        """Release what is kept for reuse besides guarded memory, which gives back by itself what its limit does not hold."""
        if self._allocator is None:
            release_free_memory()
        else:
            self._allocator.trim()

    def _rest(self, found: int) -> int:
        self._rest_found[-1] = max(self._rest_found[-1], found)
        rest = max(self._rest_found)
        if self._ended_segments == 0:
            before = rest if self._before_products is None else self._before_products
            unseen = min(_UNSEEN_CODE_BYTES, int((self._usable - before) * _UNSEEN_CODE_SHARE))
            rest = max(rest + min(unseen, _LATER_CODE_BYTES), before + unseen)
        return rest


class _Lately:
    """The most that the process took besides tensors while the last operators of a long segment ran."""

    def __init__(self) -> None:
        self.operators = 0
        """Operators of this segment."""
        self._period, self._before, self._now = 0, 0, 0

    def most_bytes(self, found_bytes: int) -> int | None:
        """Return the most in the last `_LOOP_OPERATORS` to twice as many, `found_bytes` included; None in the first so many."""
        period = self.operators // _LOOP_OPERATORS
        if period != self._period:
            self._period, self._before, self._now = period, self._now, 0
        self._now = max(self._now, found_bytes)
        return max(self._before, self._now) if period else None


def min_ram_for(nbytes: int) -> int:
    """Return the smallest budget, in bytes, that holds a whole process of `nbytes`."""
    return int((nbytes + _KEPT_FREE_BYTES) / (1 - _KEPT_FREE)) + 1


class WorkspaceMeter:
    """Measures what an operator allocates besides its results; 0 if the process's allocator does not report it.

    Not `enabled` if the budget is for tensors alone.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._allocator = active() if enabled else None
        self._guard = active_guard()
        self._before = 0

    def begin(self) -> None:
        """Start measuring, before an operator runs."""
        if self._allocator is not None:
            self._allocator.reset_peak()
            self._before = self._allocator.live_bytes()
            if self._guard is not None:
                self._before += self._guard.measure_live_bytes()

    def end(self, made_bytes: int) -> int:
        """Return the bytes at the operator's peak besides its operands and its results of `made_bytes`."""
        if self._allocator is None:
            return 0
        peak_bytes = self._allocator.peak_live_bytes()
        if self._guard is not None:
            peak_bytes += self._guard.peak_live_bytes()
        return max(peak_bytes - self._before - made_bytes, 0)


def resident_now() -> int:
    """Return the resident memory of this process in bytes; on Linux this takes one short read."""
    if sys.platform != "linux":
        return resident_bytes()
    return _resident_in(_read_statm())


def _read_statm() -> bytes:
    """Return what the kernel tells about this process's memory; no descriptor stays open, which a program might close."""
    file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _STATM_BYTES)
    finally:
        os.close(file)


def _resident_in(statm: bytes) -> int:
    return int(statm.split(None, 2)[1]) * PAGE_BYTES


def _of_files_in(statm: bytes) -> int:
    """Return the resident bytes of files and of shared memory."""
    return int(statm.split(None, 3)[2]) * PAGE_BYTES
