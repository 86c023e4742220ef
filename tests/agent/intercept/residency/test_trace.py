"""What a trace foresees: when a storage is needed next, and when the program gives it up."""

import pytest
import torch

from port_agent.intercept.residency import trace
from port_agent.intercept.residency.storages import NEVER, Storage, StorageTable
from port_agent.intercept.residency.trace import Entry, TraceBook, Use


class Program:
    """A loop over segments of operators on storages, as the follower would report them."""

    def __init__(self) -> None:
        self.book, self.clock = TraceBook(), 0
        self._table = StorageTable(smallest_bytes=0)
        self._alive: list[torch.Tensor] = []

    def storage(self) -> Storage:
        """Return a storage that was there before the program began."""
        self._alive.append(torch.empty(64))
        made = self._table.of(self._alive[-1])
        assert made is not None
        return made

    def runs(self, name: str, *inputs: Storage, makes: int = 0) -> tuple[Entry | None, list[Storage]]:
        """Run one operator; return what the trace said of it, and what it made."""
        fingerprint = hash(name)
        entry = self.book.expect(fingerprint)
        self.clock += 1
        made = [self.storage() for _ in range(makes)]
        for output, storage in enumerate(made):
            storage.birth = (self.book.segment, self.book.position, output)
        self.book.ran(fingerprint, inputs, made, 0)
        return entry, made

    def ends(self) -> bool:
        """End the segment."""
        return self.book.end_segment(self.clock + 1)


def test_the_end_of_a_storage_is_foreseen_in_its_own_segment() -> None:
    program = Program()
    weight = program.storage()
    for turn in range(3):
        _, (made,) = program.runs("make", weight, makes=1)
        entry, _ = program.runs("use", made)
        if turn > 0:
            assert entry is not None and entry.next_uses == (NEVER,)
            end = program.book.end_clock(made, entry.operands[0])
            assert end == program.clock + 3
        program.runs("other", weight)
        program.runs("another", weight)
        program.book.ended(made)
        program.runs("last", weight)
        program.ends()


def test_a_gradient_ends_where_the_next_segment_gives_it_up() -> None:
    program = Program()
    weight = program.storage()
    gradient: Storage | None = None
    for turn in range(4):
        program.runs("forward", weight)
        if gradient is not None:
            program.book.ended(gradient)
        _, (gradient,) = program.runs("backward", weight, makes=1)
        program.ends()
        entry, _ = program.runs("update", weight, gradient)
        if turn > 1:
            assert entry is not None
            assert program.book.end_clock(gradient, entry.operands[1]) == program.clock + 2
            assert program.book.end_clock(weight, entry.operands[0]) == NEVER
        program.ends()


def test_nothing_is_foreseen_of_a_program_that_is_not_known() -> None:
    program = Program()
    program.runs("first", weight := program.storage())
    assert program.book.end_clock(weight, 0) == NEVER


def test_what_left_the_last_time_is_forgotten_once_it_stayed() -> None:
    entry = Entry(0, 0, 0, (0, 1))
    use = Use(entry, 1)
    use.stayed()
    use.left()
    assert entry.leaving == {1}
    use.stayed()
    assert entry.leaving == set()


def test_segments_that_are_long_together_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without backward() is cut into segments that never repeat, and they took the budget's memory."""
    monkeypatch.setattr(trace, "OPERATORS_KEPT", 50)
    program = Program()
    weight = program.storage()
    for turn in range(8):
        for number in range(20):
            program.runs(f"{turn} {number}", weight)
        program.ends()
        assert sum(map(len, program.book.traces)) <= 50
    for number in range(60):
        program.runs(f"long {number}", weight)
    program.ends()
    assert [len(kept) for kept in program.book.traces] == [60]
    entry, _ = program.runs("long 0", weight)
    assert entry is not None
