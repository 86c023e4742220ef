"""Who is fetched, who begins to be written and who is made again, by a trace and by a plan."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from port_agent.intercept.decisions.prefetcher import Prefetcher
from port_agent.intercept.decisions.rematerialization import MAX_REMAT_SHARE
from port_agent.intercept.decisions.rematerialization import SMALLEST_BYTES as REMAT_BYTES
from port_agent.intercept.residency.eviction import LEAVES
from port_agent.intercept.residency.storages import Storage, StorageTable
from port_agent.intercept.residency.trace import SegmentPlan, TraceBook

SEGMENT = 8
"""Operators, of which each reads the same storage and one of its own."""


def repeated() -> tuple[TraceBook, StorageTable, list[torch.Tensor], list[Storage]]:
    """Return a program at the begin of a segment that it ran before, and the storages that it reads."""
    book, table = TraceBook(), StorageTable(smallest_bytes=0)
    tensors = [torch.zeros(REMAT_BYTES // 4) for _ in range(SEGMENT + 1)]
    storages = [storage for tensor in tensors if (storage := table.of(tensor)) is not None]
    for place in range(SEGMENT):
        book.expect(place)
        book.ran(place, (storages[0], storages[1 + place]), (), 0)
    book.end_segment(SEGMENT)
    assert book.expect(0) is not None
    return book, table, tensors, storages


def foresight_of(book: TraceBook, table: StorageTable, residency: Any) -> Prefetcher:
    planner: Any = SimpleNamespace(paging_seconds=lambda nbytes: 1.0)
    pools: Any = SimpleNamespace(host=residency, of=lambda storage: residency)
    return Prefetcher(table, pools, planner, book)


def test_the_operators_ahead_are_fetched_for_until_there_is_no_room_and_from_there_on_next_time() -> None:
    book, table, _tensors, storages = repeated()
    for storage in storages[1:]:
        storage.resident = False
    asked: list[Storage] = []

    def prefetch(storage: Storage, reserve_bytes: int, clock: int) -> bool:
        assert clock == SEGMENT + storages.index(storage) - 1
        asked.append(storage)
        storage.resident = len(asked) != 4
        return storage.resident

    prefetcher = foresight_of(book, table, SimpleNamespace(prefetch=prefetch))
    prefetcher.fetch_ahead()
    assert asked == storages[1:5] and prefetcher.fetched_to == 3
    prefetcher.fetch_ahead()
    assert asked[4:] == storages[4:] and prefetcher.fetched_to == SEGMENT


def test_what_a_plan_lets_leave_is_written_at_once_and_ranks_before_what_it_keeps() -> None:
    book, table, _tensors, storages = repeated()
    entry = book.expect(0)
    assert entry is not None and book.matched is not None
    residency = mock.Mock(clock=SEGMENT)
    prefetcher = foresight_of(book, table, residency)
    prefetcher.touch(entry, storages[:2])
    assert not residency.write_early.called
    book.matched.plan = SegmentPlan({0: {0: False, 1: True}})
    prefetcher.touch(entry, storages[:2])
    residency.write_early.assert_called_once_with(storages[0])
    assert all(call.args[3] >= LEAVES for call in residency.eviction.touch.call_args_list[2:])


def test_a_result_is_made_again_where_that_beats_paging_or_where_the_plan_says_so() -> None:
    book, table, _tensors, storages = repeated()
    entry, made = book.expect(0), storages[1]
    assert entry is not None and book.matched is not None
    prefetcher = foresight_of(book, table, SimpleNamespace())
    assert prefetcher.remade(entry, made, 0.9 * MAX_REMAT_SHARE) and not prefetcher.remade(
        entry, made, 1.1 * MAX_REMAT_SHARE
    )
    book.matched.plan = SegmentPlan(remade={0})
    assert prefetcher.remade(entry, made, 1.1 * MAX_REMAT_SHARE)
    book.matched.plan = SegmentPlan()
    assert not prefetcher.remade(entry, made, 0.9 * MAX_REMAT_SHARE)
