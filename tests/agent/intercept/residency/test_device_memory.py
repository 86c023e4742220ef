"""What a budget of a device's memory leaves for tensors."""

from typing import cast

import pytest

from port_agent.backend.base import Backend
from port_agent.intercept.residency.device_memory import DeviceBudget, DeviceMeter, outside_within
from port_agent.intercept.residency.memory import BudgetTooSmallError
from port_agent.intercept.residency.storages import StorageTable

MIB = 1 << 20


class _Counts:
    """A backend that only counts."""

    def __init__(self) -> None:
        self.outside, self.allocated, self.peak, self.limited = 300 * MIB, 0, 0, 0

    def outside_bytes(self) -> int:
        return self.outside

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def limit(self, nbytes: int) -> None:
        self.limited = nbytes


def test_context_libraries_and_what_is_not_followed_are_part_of_the_budget() -> None:
    counts, table = _Counts(), StorageTable(256)
    backend = cast("Backend", counts)
    bounds = DeviceBudget(1324 * MIB, outside_within(1324 * MIB, backend), backend, table)
    assert counts.limited == 1024 * MIB and bounds.tensor_bytes() == 1008 * MIB
    counts.allocated, table.resident_bytes = 100 * MIB, 60 * MIB
    assert bounds.tensor_bytes() == 968 * MIB and bounds.lacking_bytes(1000 * MIB) == 76 * MIB
    counts.outside = 500 * MIB
    bounds.end_segment()
    assert counts.limited == 824 * MIB and [bounds.due() for _ in range(8)] == 7 * [False] + [True]


def test_a_budget_that_the_context_fills_is_refused() -> None:
    counts = _Counts()
    with pytest.raises(BudgetTooSmallError, match=r"300\.0 MiB .* give at least 301\.0 MiB"):
        outside_within(300 * MIB, cast("Backend", counts))
    assert counts.limited == 0


def test_a_meter_keeps_the_peak_that_it_measures_past() -> None:
    counts = _Counts()
    meter = DeviceMeter(cast("Backend", counts))
    counts.allocated = counts.peak = 50
    meter.begin()
    counts.allocated, counts.peak = 60, 90
    assert meter.end(10) == 30 and meter.peak_bytes == 90
    counts.allocated = 0
    meter.begin()
    assert counts.peak == 0 and meter.peak_bytes == 90
