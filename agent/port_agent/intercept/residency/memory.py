"""How many bytes of tensors a RAM budget leaves.

Resident memory of the whole process counts, Python and torch included.
"""

import os
import sys
import weakref
from collections import deque
from io import FileIO
from pathlib import Path

from port_agent.guard import GuardedMemory, active_guard
from port_agent.intercept.residency.storages import StorageTable
from port_agent.malloc import Allocator, active, release_free_memory
from port_agent.system.mounts import in_ram
from port_planner.base.code_pages import release_code_pages, release_shared_pages
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.process_memory import PAGE_BYTES, resident_bytes
from port_planner.base.units import format_bytes

_KEPT_FREE = 0.01
"""Share of the budget that is never planned with: kernel structures and small allocations between two looks."""

_KEPT_FREE_BYTES = 4 << 20
"""And this much: code that comes back from the page cache between two looks."""

_UNSEEN_CODE_BYTES = 88 << 20
_UNSEEN_CODE_SHARE = 0.75
"""Kept free, at most, until the first segment has ended: operators run for the first time bring their code in.

A first product of matrices takes 78 MiB where libraries lie in large folios (see `port_planner.base.code_pages`): 24 of code, 30
of MKL's own, and 22 while it runs.
"""

_LATER_CODE_BYTES = 24 << 20
"""Of that, what is kept free until the end of the segment whatever has come in: the backward pass brings its own."""

_LOOK_OPERATORS = 8
_LOOK_BYTES = 4 << 20
"""Resident memory is looked at after so many operators, or when the tensors changed by so much: 10 us a look."""

_MIN_TENSOR_BYTES = 1 << 20

_CODE_RELEASES = 6
"""Code pages are given back when following starts and after the first segments; from then on what runs is needed."""

_NEW_CODE_SEGMENTS = 4
"""So many bring code that did not run before: what is looked at before training, a backward pass, a step of an optimizer, and one more.
From then on what comes back is known from them."""

_SEGMENTS_REMEMBERED = 8
"""The most that the rest of the process took in so many segments counts, a step or two: code that was given back at a
segment's end comes back when the same operators run again."""

_FILES_GROWTH_BYTES = 16 << 20
"""So much more of files may be mapped in than when they were given back last: data sets that are read through numpy's memmap or
Arrow, of which any page may come, and code."""

_STATM = Path("/proc/self/statm")
_STATM_BYTES = 256
"""Seven numbers of at most 20 digits."""


class BudgetTooSmallError(PortError):
    """The process takes more than the budget before any tensor is resident, or where an operator may not exceed it."""

    exit_code = ExitCode.IMPOSSIBLE


class ProcessBudget:
    """Bounds the resident memory of this process at `ram_bytes`.

    The rest of it is measured, tensors get what is left.
    """

    def __init__(self, ram_bytes: int, table: StorageTable) -> None:
        self.ram_bytes, self._table = ram_bytes, table
        self.strict = False
        """Whether an operator that does not fit is refused; else it runs, is named, and the budget exceeded."""
        self.beside_bytes = 0
        """What another process takes of the budget meanwhile: the one that plans."""
        self._allocator: Allocator | None = active()
        self._guard = active_guard()
        self._statm: FileIO | None = None
        if sys.platform == "linux":
            self._statm = FileIO(_STATM)
            weakref.finalize(self, self._statm.close).atexit = False  # the end of the program is accounted for, too
        self._of_files = 0
        """What files took when they were given back last, weights left out that are followed."""
        self._looked_at = -_LOOK_BYTES
        self._cache_limit = ram_bytes
        """What the allocator's blocks and the pages of files may take together."""
        self._skipped = 0
        self._rest_found = deque((0,), maxlen=_SEGMENTS_REMEMBERED)
        self._before_products: int | None = None
        """The rest of the process when a product of matrices ran for the first time; None: none did."""
        self._releases_left = _CODE_RELEASES
        release_code_pages()

    @property
    def _usable(self) -> int:
        return int(self.ram_bytes * (1 - _KEPT_FREE)) - _KEPT_FREE_BYTES - self.beside_bytes

    @property
    def _coming_bytes(self) -> int:
        """What of the room is not filled with freed memory for reuse: code that comes in between two looks."""
        ended = _CODE_RELEASES - self._releases_left
        return _LATER_CODE_BYTES if ended < _NEW_CODE_SEGMENTS else 0

    def check(self) -> None:
        """Raise BudgetTooSmallError where the process alone fills the budget."""
        now = resident_now()
        if now + _MIN_TENSOR_BYTES > self._usable:
            raise BudgetTooSmallError(
                f"this process takes {format_bytes(now)} before training, the budget is {format_bytes(self.ram_bytes)}; "
                f"give at least {format_bytes(now * 1.1)}"
            )

    def held_bytes(self) -> int:
        """Return what the process takes now besides the tensors that are followed.

        What is kept for reuse, and code that has run, is given back, and no longer expected to be there.
        """
        self._give_back()
        release_code_pages()
        self._rest_found[-1] = 0
        return max(resident_now() - self._table.resident_bytes, 0)

    def lacking_bytes(self, nbytes: int) -> int:
        """Return by how much the process would exceed the budget with so much more, all that can be given back being so."""
        if (lacking := resident_now() + nbytes - self.ram_bytes) > -_KEPT_FREE_BYTES:
            self._give_back()
            release_code_pages()
            lacking = resident_now() + nbytes - self.ram_bytes
        return lacking

    def due(self) -> bool:
        """Return whether it is time to look again."""
        self._skipped += 1
        return self._skipped >= _LOOK_OPERATORS or abs(self._table.resident_bytes - self._looked_at) >= _LOOK_BYTES

    @property
    def settling(self) -> bool:
        """Whether code is still given back at the ends of segments: the program has only begun."""
        return self._releases_left > 0

    def end_segment(self) -> None:
        """Take note that a segment of the program ended."""
        self._rest_found.append(0)
        if self.settling:
            self._releases_left -= 1
            release_code_pages()
            self._give_back()

    def tensor_bytes(self) -> int:
        """Return how many bytes of tensors fit now.

        Also tells the allocator how much freed memory it may keep.

        Blocks that were allocated and not yet written are not resident, so one look may find the rest of the process
        too small: the most that was found lately counts.
        """
        self._skipped = 0
        self._looked_at = self._table.resident_bytes
        resident = resident_now() if self._statm is None else self._look(self._statm)
        if self.strict and resident + _KEPT_FREE_BYTES > self.ram_bytes:
            resident = self.lacking_bytes(0) + self.ram_bytes
        if self._allocator is None:
            return max(self._usable - self._rest(resident - self._table.resident_bytes), _MIN_TENSOR_BYTES)
        stats, mapped_bytes = self._allocator.stats(), self._table.mapped_bytes
        guarded_bytes = 0 if self._guard is None else self._guard.counters().resident_bytes
        rest = self._rest(resident - stats.live_bytes - stats.cached_bytes - guarded_bytes - mapped_bytes)
        self._cache_limit = self._usable - rest - guarded_bytes
        self._allocator.set_limit(max(self._cache_limit - self._coming_bytes - mapped_bytes, stats.live_bytes))
        if self._guard is not None:
            return self._guarded_bytes(self._guard, rest, stats.live_bytes)
        foreign = max(stats.live_bytes - (self._table.resident_bytes - mapped_bytes), 0)
        return max(self._usable - rest - foreign, _MIN_TENSOR_BYTES)

    def _guarded_bytes(self, guard: GuardedMemory, rest_bytes: int, allocated_bytes: int) -> int:
        """Return how many bytes of tensors fit beside what the allocator has handed out.

        Guarded memory keeps to it, too, and lets those leave that no operator has used yet.
        """
        room_bytes = max(self._usable - rest_bytes - allocated_bytes, _MIN_TENSOR_BYTES)
        guard.set_limit(max(room_bytes - self._table.mapped_bytes, _MIN_TENSOR_BYTES))
        return room_bytes

    def _look(self, statm: FileIO) -> int:
        """Return the resident bytes of the process, and give back what files grew by: as much comes again until the next time."""
        found = os.pread(statm.fileno(), _STATM_BYTES, 0)
        if _of_files_in(found) - self._table.mapped_bytes > self._of_files + _FILES_GROWTH_BYTES:
            release_shared_pages(in_ram)
            self._of_files = _of_files_in(os.pread(statm.fileno(), _STATM_BYTES, 0)) - self._table.mapped_bytes
        return _resident_in(found)

    def expect_product(self) -> None:
        """Take note that a product of matrices is about to run: what the process grows by from now on is its code."""
        if self._before_products is None:
            self._before_products = max(self._rest_found)

    def make_way(self, nbytes: int) -> None:
        """Have the allocator give back what it keeps where `nbytes` of a file's pages are about to come."""
        if self._allocator is not None:
            mapped_bytes = self._table.mapped_bytes + nbytes
            kept_bytes = self._cache_limit - self._coming_bytes - mapped_bytes
            self._allocator.set_limit(max(kept_bytes, self._allocator.live_bytes()))

    def _give_back(self) -> None:
        if self._guard is not None:
            self._guard.trim()
        if self._allocator is None:
            release_free_memory()
        else:
            self._allocator.trim()

    def _rest(self, found: int) -> int:
        self._rest_found[-1] = max(self._rest_found[-1], found)
        rest = max(self._rest_found)
        if self._releases_left == _CODE_RELEASES:
            before = rest if self._before_products is None else self._before_products
            unseen = min(_UNSEEN_CODE_BYTES, int((self._usable - before) * _UNSEEN_CODE_SHARE))
            rest = max(rest + min(unseen, _LATER_CODE_BYTES), before + unseen)
        return rest


def min_ram_for(nbytes: int) -> int:
    """Return the smallest budget, of bytes, in which so much of a whole process fits."""
    return int((nbytes + _KEPT_FREE_BYTES) / (1 - _KEPT_FREE)) + 1


class WorkspaceMeter:
    """Measures what an operator allocates besides its results.

    0 where the process has no allocator that tells.

    Not `enabled` where the budget is for tensors alone.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._allocator = active() if enabled else None
        self._guard = active_guard()
        self._before = 0

    def begin(self) -> None:
        """Start measuring: an operator is about to run."""
        if self._allocator is not None:
            self._allocator.reset_peak()
            self._before = self._allocator.live_bytes()
            if self._guard is not None:
                self._before += self._guard.measure_live_bytes()

    def end(self, made_bytes: int) -> int:
        """Return the bytes at the operator's peak besides what was there and its results.

        The `made_bytes` that it returned.
        """
        if self._allocator is None:
            return 0
        peak_bytes = self._allocator.peak_live_bytes()
        if self._guard is not None:
            peak_bytes += self._guard.peak_live_bytes()
        return max(peak_bytes - self._before - made_bytes, 0)


def resident_now() -> int:
    """Return the resident memory of this process; on Linux at the price of one short read."""
    if sys.platform != "linux":
        return resident_bytes()
    return _resident_in(_STATM.read_bytes())


def _resident_in(statm: bytes) -> int:
    return int(statm.split(None, 2)[1]) * PAGE_BYTES


def _of_files_in(statm: bytes) -> int:
    """Return the resident bytes of files and of shared memory."""
    return int(statm.split(None, 3)[2]) * PAGE_BYTES
