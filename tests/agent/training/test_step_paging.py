"""Storages on their way to flash and back: what lands is what left, also from one step to the
next, and errors are kept.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent.paging.pager import CorruptPageError, PageError, Pager
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.step_paging import Scratch, StepPaging
from port_agent.training.step_values import GraphChangedError, StepValues
from port_planner.base.direct_io import BLOCK
from port_planner.base.errors import PortError
from port_planner.ir.program import Code, Instruction
from tests.agent.training.made_graph import COUNT, graph, numbers, program, store

W, M, T = 0, 1, 2
PAGES = program(instructions=(Instruction(Code.WRITE, T), Instruction(Code.WRITE, M)), cross_step=frozenset({M}))


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()
    yield pager
    pager.close()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path)
    yield made
    made.close()


@pytest.fixture
def kept(tmp_path: Path, pager: Pager) -> Iterator[StateStore]:
    opened = store(tmp_path, pager)
    yield opened
    opened.close()


@pytest.fixture
def paging(pager: Pager, scratch: Scratch, kept: StateStore) -> StepPaging:
    return StepPaging(PAGES, StepValues(graph()), kept, pager, (scratch,))


def size(scratch: Scratch) -> int:
    """Return the bytes of the page file."""
    return os.fstat(scratch.file.fd).st_size


@pytest.mark.parametrize("s", [M, T])
def test_what_lands_is_what_left_even_if_its_memory_was_let_go_of(paging: StepPaging, s: int) -> None:
    for first in (3.0, 8.0):
        paging.values.bind(s, numbers(first))
        paging.write(s)
        paging.values.clear(s)
        paging.finish_write(s)
        paging.read(s)
        with pytest.raises(PortError, match="not resident"):
            paging.values.value(s)
        paging.land(s)
        assert torch.equal(paging.values.value(s), numbers(first))
        paging.values.clear(s)


def test_each_paging_target_has_a_page_file_of_its_own(pager: Pager, scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    further = Scratch(tmp_path / "second")
    both = program(instructions=(Instruction(Code.WRITE, T), Instruction(Code.WRITE, T, target=1)))
    paging = StepPaging(both, StepValues(graph()), None, pager, (scratch, further))
    assert size(scratch) == size(further) > 0
    for target in (1, 0, 1):
        paging.values.bind(T, numbers(2.0 + target))
        paging.write(T, target)
        paging.finish_write(T)
        assert paging.slot(T).file is (scratch, further)[target].file
        paging.read(T)
        paging.land(T)
        assert torch.equal(paging.values.value(T), numbers(2.0 + target))
    further.close()
    with pytest.raises(PortError, match="pages to 2 directories, but 1 were given"):
        StepPaging(both, StepValues(graph()), None, pager, (scratch,))


def test_the_first_step_waits_for_no_step_before(paging: StepPaging, pager: Pager) -> None:
    before = pager.stats.stall_seconds
    paging.take_writes()
    for s in (M, T):
        paging.finish_write(s)
    assert pager.stats.stall_seconds == before


def test_new_contents_of_a_weight_leave_the_committed_ones_alone(paging: StepPaging, kept: StateStore) -> None:
    before = paging.slot(M)
    assert paging.target(M) is not before and paging.target(T) is paging.slot(T)
    paging.values.bind(M, numbers(9.0))
    paging.write(M)
    paging.finish_write(M)
    assert paging.slot(M) is paging.target(M) is not before, "from now on this is the present one"
    again = kept.open()
    assert again is not None and paging.slot(M) is before


def test_the_next_step_waits_for_what_this_one_left_under_way(
    paging: StepPaging, pager: Pager, scratch: Scratch, kept: StateStore
) -> None:
    paging.values.bind(M, numbers(9.0))
    paging.write(M)
    paging.leave_writes()
    assert set(kept.pending) == {"state/m"}
    following = StepPaging(PAGES, StepValues(graph()), kept, pager, (scratch,))
    following.take_writes()
    assert not kept.pending
    following.finish_write(M)
    following.read(M)
    following.land(M)
    assert torch.equal(following.values.value(M), numbers(9.0))


def test_a_storage_that_is_shorter_than_recorded_is_refused(paging: StepPaging) -> None:
    paging.values.base[T] = torch.zeros(COUNT - 1)
    with pytest.raises(
        GraphChangedError, match=rf"storage 2 \(t\) has {4 * COUNT - 4} bytes, but {4 * COUNT} were recorded"
    ):
        paging.write(T)


def test_weights_on_flash_need_a_place(pager: Pager, scratch: Scratch) -> None:
    paging = StepPaging(PAGES, StepValues(graph()), None, pager, (scratch,))
    paging.take_writes()
    paging.leave_writes()
    with pytest.raises(PortError, match="keeps weights on flash, but no state directory was given; pass --page-dir"):
        paging.read(M)


def test_the_page_files_space_is_taken_before_the_first_step(pager: Pager, scratch: Scratch, kept: StateStore) -> None:
    assert size(scratch) == 0
    StepPaging(PAGES, StepValues(graph()), kept, pager, (scratch,))
    assert size(scratch) >= 4 * COUNT


def break_writes(paging: StepPaging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the medium take nothing any more."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize(("s", "lost"), [(T, False), (M, True)])
def test_a_failed_write_is_lost_state_only_where_it_lasts(
    paging: StepPaging, monkeypatch: pytest.MonkeyPatch, s: int, lost: bool
) -> None:
    assert paging.failed_write() is None
    break_writes(paging, monkeypatch)
    paging.values.bind(s, numbers(1.0))
    paging.write(s)
    failed = paging.failed_write()
    assert isinstance(failed, PageError) and failed.errno == errno.ENOSPC and "choose another --page-dir" in str(failed)
    with pytest.raises(PageError):
        paging.finish_write(s)
    assert paging.drop() is lost
    assert paging.failed_write() is None and paging.drop() is False, "it is forgotten"


def test_a_step_that_fails_waits_for_its_reads(paging: StepPaging) -> None:
    """They would land in memory that is somebody else's by then."""
    paging.values.bind(T, numbers(1.0))
    paging.write(T)
    paging.read(T)
    transfers = [*paging._writes.values(), *(transfer for transfer, _ in paging._reads.values())]
    assert paging.drop() is False
    assert all(transfer.done() and transfer.keep is None for transfer in transfers)


def test_a_bit_that_flips_on_the_way_is_noticed_when_it_lands(paging: StepPaging, scratch: Scratch) -> None:
    paging.values.bind(T, numbers(1.0))
    paging.write(T)
    paging.finish_write(T)
    with open(f"/dev/fd/{scratch.file.fd}", "r+b") as file:
        file.seek(paging.slot(T).offset + 4321)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    paging.read(T)
    with pytest.raises(CorruptPageError):
        paging.land(T)


def test_slots_of_the_page_file_lie_on_whole_blocks_one_behind_the_other(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    slots = [scratch.slot(s, nbytes) for s, nbytes in enumerate((1, BLOCK, BLOCK + 1))]
    assert [slot.offset for slot in slots] == [0, BLOCK, 2 * BLOCK]
    assert scratch.slot(0, 1) is slots[0] and size(scratch) == 4 * BLOCK
    scratch.close()
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_weight_that_no_step_changes_is_written_only_where_flash_has_an_older_one(
    pager: Pager, scratch: Scratch, kept: StateStore
) -> None:
    newer = {"parameter/w", "state/m"}
    paging = StepPaging(program(), StepValues(graph()), kept, pager, (scratch,), newer)
    for first, written in ((7.0, True), (7.0, False)):
        before = pager.stats.written_bytes
        paging.values.bind(W, numbers(first))
        paging.write(W)
        paging.finish_write(W)
        assert (pager.stats.written_bytes > before) is written and newer == {"state/m"}
        paging.values.clear(W)
        paging.read(W)
        paging.land(W)
        assert torch.equal(paging.values.value(W), numbers(first))
        paging.values.clear(W)
    for first in (1.0, 2.0):  # the step changes it
        paging.values.bind(M, numbers(first))
        paging.write(M)
        paging.finish_write(M)
        paging.values.clear(M)
        paging.read(M)
        paging.land(M)
        assert torch.equal(paging.values.value(M), numbers(first)) and newer == {"state/m"}
        paging.values.clear(M)
