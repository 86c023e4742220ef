"""What a RAM budget leaves for tensors."""

from types import SimpleNamespace

import pytest

from port_agent.intercept.residency import memory
from port_agent.intercept.residency.memory import BudgetTooSmallError, ProcessBudget, WorkspaceMeter, min_ram_for
from port_agent.intercept.residency.storages import StorageTable


@pytest.mark.slow
def test_the_rest_of_the_process_is_subtracted(held_bytes: int) -> None:
    process = ProcessBudget(held_bytes + (400 << 20), StorageTable(256))
    process.check()
    first = process.tensor_bytes()
    assert 200 << 20 < first < process.ram_bytes - (100 << 20)
    process.end_segment()
    assert process.tensor_bytes() >= first, "less is kept free for code once a segment has ended"


def test_what_code_took_already_is_not_kept_free_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    found = {"now": 200 * mib}
    monkeypatch.setattr(memory, "active", lambda: None)
    monkeypatch.setattr(memory, "_resident_in", lambda statm: found["now"])
    process = ProcessBudget(1000 * mib, StorageTable(256))
    usable = process._usable
    assert process.tensor_bytes() == usable - 288 * mib
    found["now"] = 300 * mib
    assert process.tensor_bytes() == usable - 388 * mib, "libraries that the program imports are none of it"
    process.expect_product()
    for now, kept_free in ((340, 48), (380, 24), (500, 24)):
        found["now"] = now * mib
        assert process.tensor_bytes() == usable - (now + kept_free) * mib
    process.end_segment()
    assert process.tensor_bytes() == usable - 500 * mib


@pytest.mark.parametrize("seen", [False, True])
def test_what_a_device_takes_of_the_hosts_memory_is_subtracted_once(
    seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    device = SimpleNamespace(held_bytes=lambda: 70 * mib, seen_bytes=lambda: 60 * mib if seen else 0)
    found = {"now": 200 * mib}
    monkeypatch.setattr(memory, "active", lambda: None)
    monkeypatch.setattr(memory, "_resident_in", lambda statm: found["now"])
    process = ProcessBudget(1000 * mib, StorageTable(256))
    alone = process.tensor_bytes()
    process.device = device
    found["now"] += device.seen_bytes()
    assert process.tensor_bytes() == alone - 70 * mib and process.together_bytes == alone
    process.coming_bytes = 5 * mib
    assert process.tensor_bytes() == alone - 75 * mib and process.together_bytes == alone


def test_a_budget_below_the_process_is_refused_with_numbers() -> None:
    with pytest.raises(BudgetTooSmallError, match=r"MiB before training, but the budget is 8\.0 MiB; give at least"):
        ProcessBudget(8 << 20, StorageTable(256)).check()


def test_it_looks_again_after_some_operators_or_bytes() -> None:
    table = StorageTable(256)
    process = ProcessBudget(4 << 30, table)
    process.tensor_bytes()
    assert not process.due()
    table.resident_bytes += 64 << 20
    assert process.due()


class _Blocks:
    """An allocator that holds nothing live and keeps `cached_bytes` for reuse."""

    def __init__(self) -> None:
        self.live_bytes_now, self.limits = 0, list[int]()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(live_bytes=self.live_bytes_now, cached_bytes=0)

    def live_bytes(self) -> int:
        return self.live_bytes_now

    def set_limit(self, limit_bytes: int) -> None:
        self.limits.append(limit_bytes)

    def trim(self) -> None:
        self.limits.append(self.live_bytes_now)


@pytest.mark.slow
def test_pages_of_files_are_tensors_and_not_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    resident_bytes, ram_bytes, mapped_bytes = 100 << 20, 1 << 30, 40 << 20
    blocks = _Blocks()
    monkeypatch.setattr(memory, "active", lambda: blocks)
    monkeypatch.setattr(memory, "_resident_in", lambda statm: resident_bytes)
    monkeypatch.setattr(memory, "resident_now", lambda: resident_bytes)
    table = StorageTable(256)
    process = ProcessBudget(ram_bytes, table)
    process.end_segment()
    without = process.tensor_bytes()
    table.resident_bytes = table.mapped_bytes = mapped_bytes
    resident_bytes += mapped_bytes
    for _ in range(memory._SEGMENTS_REMEMBERED):
        process.end_segment()
    assert process.tensor_bytes() == without
    kept = blocks.limits[-1]
    process.make_way(8 << 20)
    assert blocks.limits[-1] == kept - (8 << 20), "what is kept for reuse makes way for pages that come"
    table.mapped_bytes -= 8 << 20
    process.make_way(8 << 20)
    assert blocks.limits[-1] == kept, "and comes in place of pages that went"


@pytest.mark.slow
def test_freed_memory_makes_way_for_code_while_the_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for reuse up to the limit, it left 8 MiB of 400 for the code of a first backward pass, which brought 10."""
    blocks = _Blocks()
    monkeypatch.setattr(memory, "active", lambda: blocks)
    monkeypatch.setattr(memory, "_resident_in", lambda statm: 300 << 20)
    process = ProcessBudget(400 << 20, StorageTable(256))
    kept: list[int] = []
    while process.settling:
        process.end_segment()
        tensors_bytes = process.tensor_bytes()
        kept.append(tensors_bytes - blocks.limits[-1])
    assert kept[:3] == [memory._LATER_CODE_BYTES] * 3 and len(kept) > 4
    assert kept[3:] == [0] * len(kept[3:]), (
        "what a second update runs is counted by then, and fresh pages cost a fault each"
    )


@pytest.mark.slow
def test_what_is_lacking_is_counted_without_what_is_kept_for_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, mib = _Blocks(), 1 << 20
    monkeypatch.setattr(memory, "active", lambda: blocks)
    monkeypatch.setattr(memory, "resident_now", lambda: (100 if blocks.limits else 150) * mib)
    process = ProcessBudget(120 * mib, StorageTable(256))
    assert process.lacking_bytes(30 * mib) == 10 * mib and process.held_bytes() == 100 * mib
    least = min_ram_for(100 * mib)
    assert ProcessBudget(least, StorageTable(256))._usable in (100 * mib, 100 * mib + 1)


def test_what_was_given_back_before_training_is_room_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that loading a model had run, 45 MiB, counted as taken until eight segments had ended."""
    blocks, resident = _Blocks(), [300 << 20]
    monkeypatch.setattr(memory, "active", lambda: blocks)
    monkeypatch.setattr(memory, "resident_now", lambda: resident[0])
    monkeypatch.setattr(memory, "_resident_in", lambda statm: resident[0])
    monkeypatch.setattr(memory, "release_code_pages", lambda: None)
    process = ProcessBudget(500 << 20, StorageTable(256))
    before = process.tensor_bytes()
    resident[0] -= 45 << 20
    assert process.tensor_bytes() == before, "it may come back"
    process.held_bytes()
    assert process.tensor_bytes() > before


def test_no_allocator_tells_no_workspace() -> None:
    meter = WorkspaceMeter(enabled=False)
    meter.begin()
    assert meter.end(0) == 0


def test_code_that_a_long_loop_does_not_use_leaves_its_memory_to_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of 128 steps kept 9 MiB of tensors and wrote 9.2 GiB in one step, while 40 MiB waited for code."""
    mib = 1 << 20
    found = {"now": 300 * mib}
    limits: list[int] = []
    guard = SimpleNamespace(
        counters=lambda: SimpleNamespace(resident_bytes=0), set_limit=limits.append, trim=lambda: None
    )
    monkeypatch.setattr(memory, "active", lambda: None)
    monkeypatch.setattr(memory, "active_guard", lambda: guard)
    monkeypatch.setattr(memory, "_resident_in", lambda statm: found["now"])
    process = ProcessBudget(1000 * mib, StorageTable(256))

    def after(operators: int) -> int:
        for _ in range(operators):
            if process.due():
                process.tensor_bytes()
        return process.tensor_bytes()

    first = after(1)
    found["now"] = 260 * mib
    assert after(memory._LOOP_OPERATORS // 2) == first, "what was released may come back"
    assert after(2 * memory._LOOP_OPERATORS) == process._usable - 260 * mib - memory._LATER_CODE_BYTES
    found["now"] = 290 * mib
    assert after(8) == process._usable - 290 * mib - memory._LATER_CODE_BYTES, "what comes back counts at once"
    process.end_segment()
    assert after(8) == process._usable - 300 * mib, "the next segment may use the code of the first"
    assert limits[-1] == process._usable - 300 * mib, "guarded memory leaves room for it, too"
