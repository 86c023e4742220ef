"""How many bytes of tensors a RAM budget leaves: resident memory of the whole process counts, Python and torch included."""

import os
import sys
from pathlib import Path

from agent.follow.storages import StorageTable
from agent.malloc import Allocator, active
from planner.ir.code_pages import release_code_pages
from planner.ir.errors import ExitCode, PortError
from planner.ir.process_memory import resident_bytes
from planner.ir.units import format_bytes

_KEPT_FREE = 0.01
"""Share of the budget that is never planned with: kernel structures and small allocations between two looks."""

_LOOK_OPERATORS = 16
_LOOK_BYTES = 4 << 20
"""Resident memory is looked at after so many operators, or when the tensors changed by so much: 10 us a look."""

_LEAST_TENSOR_BYTES = 1 << 20

_CODE_RELEASES = 6
"""Code pages are given back when following starts and after the first segments; from then on what runs is needed."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BudgetTooSmallError(PortError):
    """The process takes more than the budget before any tensor is resident."""

    exit_code = ExitCode.IMPOSSIBLE


class ProcessBudget:
    """Bounds the resident memory of this process at `ram_bytes`: the rest of it is measured, tensors get what is left."""

    def __init__(self, ram_bytes: int, table: StorageTable) -> None:
        self.ram_bytes, self._table = ram_bytes, table
        self._usable = int(ram_bytes * (1 - _KEPT_FREE))
        self._allocator: Allocator | None = active()
        self._looked_at = -_LOOK_BYTES
        self._skipped = 0
        self.peak_bytes = 0
        self._releases_left = _CODE_RELEASES
        self.release_code()

    def release_code(self) -> None:
        """Give back code that was run once, after the first segments: importing and the first operators touch most."""
        if self._releases_left > 0:
            self._releases_left -= 1
            release_code_pages()

    def check(self) -> None:
        """Raise BudgetTooSmallError where the process alone fills the budget."""
        now = resident_now()
        if now + _LEAST_TENSOR_BYTES > self._usable:
            raise BudgetTooSmallError(
                f"this process takes {format_bytes(now)} before training, the budget is {format_bytes(self.ram_bytes)}; "
                f"give at least {format_bytes(now * 1.1)}"
            )

    def due(self) -> bool:
        """Tell whether it is time to look again."""
        self._skipped += 1
        return self._skipped >= _LOOK_OPERATORS or abs(self._table.resident_bytes - self._looked_at) >= _LOOK_BYTES

    def tensor_bytes(self) -> int:
        """Return how many bytes of tensors fit now; also tells the allocator how much freed memory it may keep."""
        self._skipped = 0
        self._looked_at = self._table.resident_bytes
        resident = resident_now()
        self.peak_bytes = max(self.peak_bytes, resident)
        cached = 0
        if self._allocator is not None:
            stats = self._allocator.stats()
            cached = stats.cached_bytes
            rest = resident - stats.live_bytes - stats.cached_bytes
            self._allocator.set_limit(max(self._usable - rest, stats.live_bytes))
        others = resident - cached - self._table.resident_bytes
        return max(self._usable - others, _LEAST_TENSOR_BYTES)


class WorkspaceMeter:
    """Measures what an operator allocates besides its results; 0 where the process has no allocator that tells.

    Not `enabled` where the budget is for tensors alone.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._allocator = active() if enabled else None
        self._before = 0

    def begin(self) -> None:
        """Start measuring: an operator is about to run."""
        if self._allocator is not None:
            self._allocator.reset_peak()
            self._before = self._allocator.live_bytes()

    def end(self, made_bytes: int) -> int:
        """Return the bytes at the operator's peak besides what was there and the `made_bytes` that it returned."""
        if self._allocator is None:
            return 0
        return max(self._allocator.peak_live_bytes() - self._before - made_bytes, 0)


def resident_now() -> int:
    """Return the resident memory of this process; on Linux at the price of one short read."""
    if sys.platform != "linux":
        return resident_bytes()
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES
