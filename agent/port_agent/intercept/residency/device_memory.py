"""How many bytes of tensors a budget of a device's memory leaves: context, libraries and what
is not followed count, too.
"""

from typing import Protocol

from port_agent.backend.base import Backend
from port_agent.intercept.residency.memory import BudgetTooSmallError
from port_agent.intercept.residency.storages import StorageTable
from port_planner.base.units import format_bytes

_KEPT_FREE = 1 / 64
"""Share of the budget that no tensor is planned into: what tensors are rounded up to, and
sums over those that leave.
"""

_LOOK_OPERATORS = 8
_MIN_TENSOR_BYTES = 1 << 20
_LOOKS_OUTSIDE = 3
"""The first segments bring libraries that did not run before: what the process takes besides
tensors is asked for after each.
"""


class DeviceBudget:
    """Bounds what this process takes of a device's memory at `ram_bytes`."""

    def __init__(self, ram_bytes: int, outside_bytes: int, backend: Backend, table: StorageTable) -> None:
        """`outside_bytes`: as `outside_within` returned it."""
        self.ram_bytes, self._backend, self._table = ram_bytes, backend, table
        self.strict = False
        """An operator that does not fit is tried: the device itself refuses what is beyond the budget."""
        self._skipped = 0
        self._looks_left = _LOOKS_OUTSIDE
        self.outside_bytes = outside_bytes
        self.enforce()

    @property
    def _usable(self) -> int:
        return max(self.ram_bytes - self.outside_bytes, 0)

    def due(self) -> bool:
        """Return whether it is time to look again at what fits."""
        self._skipped += 1
        return self._skipped >= _LOOK_OPERATORS

    def tensor_bytes(self) -> int:
        """Return how many bytes of tensors fit now."""
        self._skipped = 0
        foreign = max(self._backend.allocated_bytes() - self._table.resident_bytes, 0)
        return max(int(self._usable * (1 - _KEPT_FREE)) - foreign, _MIN_TENSOR_BYTES)

    def end_segment(self) -> None:
        """Called at the end of each segment of the program, which may have loaded libraries."""
        if self._looks_left:
            self._looks_left -= 1
            self.outside_bytes = max(self.outside_bytes, self._backend.outside_bytes())
            self.enforce()

    def enforce(self) -> None:
        """Make the device refuse allocations beyond the budget."""
        self._backend.limit(self._usable)

    def expect_product(self) -> None:
        """Called before a product of matrices, whose library the next measurement counts."""

    def lacking_bytes(self, nbytes: int) -> int:
        """Return by how many bytes the budget would be exceeded with `nbytes` more."""
        return self._backend.allocated_bytes() + nbytes - self._usable


def outside_within(ram_bytes: int, backend: Backend) -> int:
    """Return what this process takes of a device besides tensors.

    Raises BudgetTooSmallError where that alone fills `ram_bytes`.
    """
    outside_bytes = backend.outside_bytes()
    if ram_bytes - outside_bytes < _MIN_TENSOR_BYTES:
        raise BudgetTooSmallError(
            f"this process takes {format_bytes(outside_bytes)} of the device's memory before its first tensor, --gpu-ram is "
            f"{format_bytes(ram_bytes)}; give at least {format_bytes(outside_bytes + _MIN_TENSOR_BYTES)}"
        )
    return outside_bytes


class OperatorMeter(Protocol):
    """Measures what an operator allocates besides its results."""

    def begin(self) -> None:
        """Start measuring: an operator is about to run."""

    def end(self, made_bytes: int) -> int:
        """Return the bytes at the operator's peak besides what was there and the `made_bytes` of its results."""


class DeviceMeter:
    """An `OperatorMeter` for a device's memory."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._before, self._peak = backend, 0, 0
        backend.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The most that tensors have held since this was made."""
        return max(self._peak, self._backend.peak_bytes())

    def begin(self) -> None:
        self._peak = self.peak_bytes
        self._backend.reset_peak()
        self._before = self._backend.allocated_bytes()

    def end(self, made_bytes: int) -> int:
        return max(self._backend.peak_bytes() - self._before - made_bytes, 0)
