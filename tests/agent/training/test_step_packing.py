"""Storages that wait packed: they come back to the bit, and what does not fit goes to flash
instead of into the budget.
"""

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from port_agent import packing as packing_module
from port_agent.paging.pager import CorruptPageError, Pager
from port_agent.training.step_packing import Overflow, PackingStats, StepPacking
from port_agent.training.step_paging import Scratch, StepPaging
from port_agent.training.step_values import StepValues
from port_planner.base.errors import PortError
from port_planner.ir.costs import Codec, PackingCost
from port_planner.ir.graph import Role, Storage
from tests.agent.exactness import bits
from tests.agent.training.made_graph import COUNT, graph, numbers, program

T = 2


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()
    yield pager
    pager.close()


@pytest.fixture
def paging(pager: Pager, tmp_path: Path) -> Iterator[StepPaging]:
    scratch = Scratch(tmp_path)
    yield StepPaging(program(), StepValues(graph()), None, pager, (scratch,))
    scratch.close()


def sparse(first: float) -> torch.Tensor:
    """Return contents of which every other number is zero."""
    return numbers(first) * (torch.arange(COUNT) % 2)


HALF = PackingCost(T, 1, Codec.BITMAP, 4, 0.5, COUNT // 8 + 2 * COUNT + 8, 1e-3, 1e-3, 1e-3)


def test_a_packed_storage_comes_back_to_the_bit_and_nothing_is_written(paging: StepPaging, pager: Pager) -> None:
    packing, before = StepPacking((HALF, HALF), paging.values, paging), pager.stats.written_bytes
    for entry, first in enumerate((1.0, 5.0)):
        paging.values.bind(T, sparse(first))
        packing.pack(entry)
        paging.values.clear(T)
        packing.unpack(entry)
        assert bits(paging.values.value(T)) == bits(sparse(first))
        paging.values.clear(T)
    stats = packing.stats
    assert stats.source_bytes == 2 * 4 * COUNT and 0.5 < stats.packed_bytes / stats.source_bytes < 0.54
    assert not stats.overflows and not stats.spilled_bytes and pager.stats.written_bytes == before
    packing.begin()
    assert packing.stats == PackingStats()


def test_what_needs_more_than_was_reserved_goes_to_flash_and_comes_back(paging: StepPaging, pager: Pager) -> None:
    packing, before = StepPacking((HALF,), paging.values, paging), pager.stats.written_bytes
    paging.values.bind(T, numbers(1.0))
    packing.pack(0)
    paging.values.clear(T)
    assert packing.stats == PackingStats(4 * COUNT, 0, 4 * COUNT, [Overflow(T, 1, 8 * -(-COUNT // 64) + 4 * COUNT)])
    assert pager.stats.written_bytes == before + 4 * COUNT
    packing.unpack(0)
    assert bits(paging.values.value(T)) == bits(numbers(1.0))


def test_a_packed_form_that_is_paged_holds_no_memory_and_comes_back_to_the_bit(
    paging: StepPaging, pager: Pager
) -> None:
    placed = replace(program(), packings=(HALF, HALF))
    paging.program = placed
    packing, before = StepPacking((HALF, HALF), paging.values, paging), pager.stats.written_bytes
    for entry, first in enumerate((1.0, 5.0)):
        paging.values.bind(T, sparse(first))
        packing.pack(entry)
        paging.values.clear(T)
        packing.write(entry, 0)
        packing.finish_write(entry)
        assert not packing._packed and not packing._writes
        packing.read(entry)
        packing.land(entry)
        packing.unpack(entry)
        assert bits(paging.values.value(T)) == bits(sparse(first))
        paging.values.clear(T)
    assert 0.5 < (pager.stats.written_bytes - before) / (2 * 4 * COUNT) < 0.54


def test_what_did_not_fit_is_on_flash_already_and_its_packed_form_is_not_moved(
    paging: StepPaging, pager: Pager
) -> None:
    paging.program = replace(program(), packings=(HALF,))
    packing, before = StepPacking((HALF,), paging.values, paging), pager.stats.written_bytes
    paging.values.bind(T, numbers(1.0))
    packing.pack(0)
    paging.values.clear(T)
    for move in (lambda e: packing.write(e, 0), packing.finish_write, packing.read, packing.land):
        move(0)
    assert [o.storage for o in packing.stats.overflows] == [T] and pager.stats.written_bytes == before + 4 * COUNT
    packing.unpack(0)
    assert bits(paging.values.value(T)) == bits(numbers(1.0))


def test_a_packed_form_that_rots_on_flash_is_an_error(paging: StepPaging) -> None:
    paging.program = replace(program(), packings=(HALF,))
    packing = StepPacking((HALF,), paging.values, paging)
    paging.values.bind(T, sparse(1.0))
    packing.pack(0)
    packing.write(0, 0)
    packing.finish_write(0)
    slot = paging.packed_slot(0, 0)
    os.pwrite(slot.file.fd, mmap.mmap(-1, 4096), slot.offset)
    packing.read(0)
    with pytest.raises(CorruptPageError, match="not what was written"):
        packing.land(0)


def test_a_step_that_was_left_forgets_what_it_packed(paging: StepPaging) -> None:
    packing = StepPacking((HALF,), paging.values, paging)
    paging.values.bind(T, sparse(1.0))
    packing.pack(0)
    assert packing._packed
    packing.drop()
    assert not packing._packed


def test_packing_that_cannot_be_done_is_refused_before_the_first_step(
    paging: StepPaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(HALF, codec=Codec.NARROW, item_bytes=8)
    short = StepValues(replace(graph(), storages=(*graph().storages[:2], Storage(4 * COUNT + 4, Role.TEMPORARY, "t"))))
    with pytest.raises(PortError, match="not a multiple of 8, so it cannot be packed as narrow; plan the job again"):
        StepPacking((odd,), short, paging)
    with monkeypatch.context() as patched:
        patched.setattr(paging, "scratch", ())
        with pytest.raises(PortError, match="needs a directory for what does not fit; give --page-dir"):
            StepPacking((HALF,), paging.values, paging)
    monkeypatch.setattr(packing_module, "available", lambda: False)
    with pytest.raises(PortError, match="packing was not built here"):
        StepPacking((HALF,), paging.values, paging)
    StepPacking((), paging.values, paging)
