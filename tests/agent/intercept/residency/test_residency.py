"""Moving storages, without a dispatch mode: what leaves comes back, what stays says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent.intercept.decisions.rematerialization import remat_of
from port_agent.intercept.residency.backing import ResizedStorages
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import NEVER, Moving, Storage, StorageTable, allocated_bytes
from port_agent.intercept.residency.trace import AHEAD
from port_agent.paging.page_space import PageSpace
from port_agent.paging.pager import Pager, Slot

ROW = 64 << 10


@pytest.fixture
def residency(tmp_path: Path) -> Iterator[Residency]:
    pager, space = Pager(), PageSpace(tmp_path)
    made = Residency(StorageTable(256), ResizedStorages(space, pager), 2 * ROW)
    yield made
    made.limit_bytes = float("inf")
    made.restore()
    pager.close()
    space.close()


def rows(residency: Residency, count: int) -> tuple[list[torch.Tensor], list[Storage]]:
    """Return tensors of `ROW` bytes and their records, touched one after the other."""
    tensors = [torch.full((ROW // 4,), float(i)) for i in range(count)]
    records = []
    for clock, tensor in enumerate(tensors):
        record = residency.table.of(tensor)
        assert record is not None
        residency.eviction.touch(record, clock, None)
        records.append(record)
    return tensors, records


def test_the_least_recently_used_leave_and_come_back(residency: Residency) -> None:
    tensors, records = rows(residency, 4)
    residency.make_free(0)
    assert [r.resident for r in records] == [False, False, True, True]
    assert allocated_bytes(tensors[0].untyped_storage()) == 0 and residency.pressed
    residency.ensure_resident(records[:1])
    assert torch.equal(tensors[0], torch.zeros(ROW // 4))
    assert residency.table.resident_bytes <= 2 * ROW


def test_a_clean_one_leaves_without_a_write(residency: Residency) -> None:
    _, records = rows(residency, 3)
    residency.make_free(0)
    residency.ensure_resident(records[:1])
    written = residency.backing.stats.written_bytes
    residency.limit_bytes = 0
    records[1].pins = records[2].pins = 1
    residency.make_free(0)
    assert not records[0].resident and residency.backing.stats.written_bytes == written
    records[1].pins = records[2].pins = 0


def test_a_change_makes_its_page_void(residency: Residency) -> None:
    tensors, records = rows(residency, 3)
    residency.make_free(0)
    residency.ensure_resident(records[:1])
    residency.change(records[:1])
    tensors[0].fill_(9)
    residency.limit_bytes = 0
    residency.make_free(0)
    residency.ensure_resident(records[:1])
    assert float(tensors[0][7]) == 9.0 and records[0].version == 1


def test_what_is_pinned_or_shared_with_numpy_stays_and_is_counted(residency: Residency) -> None:
    tensors, records = rows(residency, 2)
    kept = tensors[0].numpy()
    records[1].pins = 1
    residency.limit_bytes = 0
    residency.make_free(0)
    assert all(r.resident for r in records) and residency.counters.over_bytes == 2 * ROW
    assert float(kept[0]) == 0.0
    records[1].pins = 0


def test_prefetch_waits_for_nothing(residency: Residency) -> None:
    tensors, records = rows(residency, 3)
    residency.make_free(0)
    assert not residency.prefetch(records[0], 0, 5), "dirty ones would have to be written first"
    residency.limit_bytes = 4 * ROW
    assert residency.prefetch(records[0], 0, 5) and records[0].reading
    residency.wait_read(records[0])
    assert torch.equal(tensors[0], torch.zeros(ROW // 4))


def test_the_dead_give_their_pages_back(residency: Residency) -> None:
    tensors, records = rows(residency, 3)
    residency.make_free(0)
    page = records[0].page
    assert isinstance(page, Slot)
    tensors.pop(0)
    residency.reclaim_dead()
    residency.empty()
    assert page.offset in [record.page.offset for record in records[1:] if isinstance(record.page, Slot)]


def widened(residency: Residency, next_use: int) -> tuple[torch.Tensor, torch.Tensor, Storage, Storage]:
    """Return a bfloat16 result that is used no more and its float32 copy that is, with their records."""
    narrow = torch.randn(ROW // 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    func, kwargs = torch.ops.aten._to_copy.default, {"dtype": torch.float32}
    wide = func(narrow, **kwargs)
    source, record = residency.table.of(narrow), residency.table.of(wide)
    assert source is not None and record is not None
    source.birth = (0, 0, 0)
    record.remat = remat_of(func, (narrow,), kwargs, [source], record, wide, residency.backing, workspace_bytes=0)
    residency.eviction.touch(source, 0, NEVER)
    residency.eviction.touch(record, 0, next_use)
    residency.trust_trace = True
    return narrow, wide, source, record


def test_a_smaller_source_that_is_given_up_is_kept_in_place_of_what_it_makes(residency: Residency) -> None:
    narrow, wide, source, record = widened(residency, next_use=AHEAD + 1)
    expected = narrow.float()
    residency.keep_smaller(record)
    assert not record.resident and source.next_use == source.awaited_at == AHEAD + 1
    del narrow
    residency.empty()
    residency.ensure_resident([record])
    assert torch.equal(wide, expected)
    assert residency.backing.stats.written_bytes <= ROW // 2, "the source alone was written"
    assert source.ref() is None and source.awaited_at == NEVER


def test_it_is_made_before_its_source_changes(residency: Residency) -> None:
    narrow, wide, source, record = widened(residency, next_use=AHEAD + 1)
    expected = narrow.float()
    residency.keep_smaller(record)
    residency.change([source])
    narrow.zero_()
    assert record.resident and torch.equal(wide, expected)


def test_what_is_needed_soon_stays(residency: Residency) -> None:
    _narrow, _wide, _, record = widened(residency, next_use=AHEAD)
    residency.keep_smaller(record)
    assert record.resident


def test_one_that_dies_while_it_is_written_is_gone(residency: Residency, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, records = rows(residency, 3)
    wait = residency.backing.wait

    def waiting(moving: Moving) -> None:
        wait(moving)
        tensors[0] = tensors[1]  # the program's last reference to what was written

    monkeypatch.setattr(residency.backing, "wait", waiting)
    assert residency.make_free(0)
    assert records[0].ref() is None and residency.table.resident_bytes == 2 * ROW
    assert residency.reclaim_dead() == records[:1] and residency.table.resident_bytes == 2 * ROW
