"""What a RAM budget leaves for tensors."""

import pytest

from agent.follow.memory import BudgetTooSmallError, ProcessBudget, WorkspaceMeter, resident_now
from agent.follow.storages import StorageTable


def test_the_rest_of_the_process_is_subtracted() -> None:
    process = ProcessBudget(resident_now() + (400 << 20), StorageTable(256))
    process.check()
    first = process.tensor_bytes()
    assert 200 << 20 < first < process.ram_bytes - (100 << 20)
    process.end_segment()
    assert process.tensor_bytes() >= first, "less is kept free for code once a segment has ended"


def test_a_budget_below_the_process_is_refused_with_numbers() -> None:
    with pytest.raises(BudgetTooSmallError, match=r"MiB before training, the budget is 8\.0 MiB; give at least"):
        ProcessBudget(8 << 20, StorageTable(256)).check()


def test_it_looks_again_after_some_operators_or_bytes() -> None:
    table = StorageTable(256)
    process = ProcessBudget(4 << 30, table)
    process.tensor_bytes()
    assert not process.due()
    table.resident_bytes += 64 << 20
    assert process.due()


def test_no_allocator_tells_no_workspace() -> None:
    meter = WorkspaceMeter(enabled=False)
    meter.begin()
    assert meter.end(0) == 0
