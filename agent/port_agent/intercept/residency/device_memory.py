"""How many bytes of tensors a budget of a device's memory leaves: context, libraries and what
is not followed count, too.
"""

from typing import Protocol

from port_agent.backend.base import Backend
from port_agent.intercept.residency.memory import BudgetTooSmallError, ProcessBudget, resident_now
from port_agent.intercept.residency.storages import StorageTable
from port_planner.base.units import format_bytes

_KEPT_FREE = 1 / 64
"""Share of the budget that no tensor is planned into: what tensors are rounded up to, and
sums over those that leave.
"""

_HOST_SHARE = 1 / 8
"""Share of the memory that host and device have together, for tensors of the host and for those on their way to the disk."""

_TRIED_BYTES = 4 << 20

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


class SharedDeviceBudget(DeviceBudget):
    """A device's part of the budget of RAM, where it computes in the host's memory. It shares `process` with the host's tensors.

    The device's tensors stay where the host's can leave; a share of what both may take is left for those on their way.
    """

    def __init__(self, process: ProcessBudget, backend: Backend, table: StorageTable) -> None:
        """Call without interception: whether the kernel counts the device's memory as resident is tried.

        Raises BudgetTooSmallError where what the process takes besides tensors fills the budget.
        """
        self._process, self._backend, self.outside_bytes = process, backend, backend.outside_bytes()
        self._seen = counted_as_resident(backend)
        process.device = self
        process.tensor_bytes()
        lacking_bytes = _MIN_TENSOR_BYTES - (process.together_bytes - self.outside_bytes)
        if lacking_bytes > 0:
            process.device = None
            raise BudgetTooSmallError(
                f"this process takes {format_bytes(self.outside_bytes)} of the memory that {backend.kind} shares with the host before its "
                f"first tensor there, and --ram is {format_bytes(process.ram_bytes)}; give at least "
                f"{format_bytes(process.ram_bytes + lacking_bytes)}"
            )
        super().__init__(process.ram_bytes, self.outside_bytes, backend, table)

    def held_bytes(self) -> int:
        """Return the bytes that the process holds on the device now: tensors, context and libraries."""
        return self._backend.allocated_bytes() + self.outside_bytes

    def seen_bytes(self) -> int:
        """Return the bytes of these that the kernel counts as resident memory of the process."""
        return self._backend.allocated_bytes() if self._seen else 0

    @property
    def unseen_peak_bytes(self) -> int:
        """The most that the kernel did not count of what the device took."""
        return self.outside_bytes + (0 if self._seen else self._backend.peak_bytes())

    @property
    def _usable(self) -> int:
        return max(self._process.together_bytes - self.outside_bytes, _MIN_TENSOR_BYTES)

    def tensor_bytes(self) -> int:
        """Return how many bytes of tensors fit on the device now, beside what the host's side needs at least."""
        self._skipped = 0
        self._process.tensor_bytes()
        self.enforce()
        foreign = max(self._backend.allocated_bytes() - self._table.resident_bytes, 0)
        return max(int(self._usable * (1 - _HOST_SHARE)) - foreign, _MIN_TENSOR_BYTES)

    def lacking_bytes(self, nbytes: int) -> int:
        """Return by how many bytes the budget would be exceeded with `nbytes` more."""
        return self._process.lacking_bytes(nbytes)


def counted_as_resident(backend: Backend) -> bool:
    """Return whether the kernel counts a device's memory as resident memory of this process; tried with a tensor, for systems differ."""
    backend.allocate(1).fill_(0)  # which brings in the code of the kernel
    backend.synchronize()
    before = resident_now()
    tried = backend.allocate(_TRIED_BYTES).fill_(1)
    backend.synchronize()
    return resident_now() - before >= tried.nbytes // 2


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
