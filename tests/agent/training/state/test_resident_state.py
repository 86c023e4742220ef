"""What is in RAM, what on flash, and what is not yet safe: after each move the present contents are the newest."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent.backend.cpu import CpuBackend
from port_agent.backend.host_copies import HostCopies
from port_agent.backend.staging import Staging
from port_agent.paging.pager import BURST, CHUNK, Pager
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.state.resident_state import Persistents, bundle_chunks, initial_contents
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import TensorLayout
from port_planner.ir.program import Program
from tests.agent.jobs_small import small_bundle
from tests.agent.training.made_graph import COUNT, KEYS, LAYOUTS, numbers, program, store

W, M = KEYS
AWAY = program(starts_on_flash=frozenset({1}))
HERE = program()


@pytest.fixture
def pager() -> Iterator[Pager]:
    pager = Pager()
    yield pager
    pager.close()


@pytest.fixture
def kept(tmp_path: Path, pager: Pager) -> Iterator[Persistents]:
    opened = store(tmp_path, pager)
    yield Persistents(opened, LAYOUTS)
    opened.close()


def now(kept: Persistents, key: str) -> torch.Tensor:
    """Return the present contents."""
    return kept.tensor(key).clone()


def step(kept: Persistents, first: float) -> None:
    """Give m new contents in RAM, as the step of `HERE` does."""
    kept.tensor(M).copy_(numbers(first))
    kept.stepped(HERE)


def test_what_the_program_starts_with_is_loaded_and_the_rest_left(kept: Persistents) -> None:
    kept.prepare(AWAY)
    assert set(kept.resident) == {W}
    assert torch.equal(now(kept, W), numbers(0.0)) and torch.equal(now(kept, M), numbers(0.5))
    kept.prepare(HERE)
    assert set(kept.resident) == {W, M} and torch.equal(now(kept, M), numbers(0.5))


def test_another_plan_takes_over_what_the_last_step_changed(kept: Persistents) -> None:
    kept.prepare(HERE)
    step(kept, 7.0)
    kept.prepare(AWAY)
    assert set(kept.resident) == {W} and torch.equal(now(kept, M), numbers(7.0))


def test_what_did_not_change_is_not_written_again(kept: Persistents, pager: Pager) -> None:
    kept.prepare(HERE)
    before = pager.stats.written_bytes
    kept.prepare(AWAY)
    assert pager.stats.written_bytes == before
    kept.prepare(HERE)
    step(kept, 7.0)
    kept.commit(1, {})
    assert pager.stats.written_bytes == before + 4 * COUNT, "m alone"
    kept.commit(2, {})
    assert pager.stats.written_bytes == before + 4 * COUNT


def test_a_commit_holds_what_was_only_in_ram(kept: Persistents, tmp_path: Path, pager: Pager) -> None:
    kept.prepare(HERE)
    step(kept, 7.0)
    kept.commit(3, {"seen": 12})
    step(kept, 9.0)  # and the power is cut
    again = StateStore(tmp_path, dict.fromkeys(KEYS, 4 * COUNT), pager, job="job")
    commit = again.open()
    assert commit is not None and (commit.step, commit.progress) == (3, {"seen": 12})
    assert torch.equal(Persistents(again, LAYOUTS).tensor(M), numbers(7.0))
    again.close()


def test_a_last_commit_leaves_nothing_in_ram(kept: Persistents, tmp_path: Path, pager: Pager) -> None:
    kept.prepare(HERE)
    step(kept, 7.0)
    assert kept.commit_and_free(1, {}).step == 1
    assert not kept.resident
    again = StateStore(tmp_path, dict.fromkeys(KEYS, 4 * COUNT), pager, job="job")
    assert again.open() is not None
    found = Persistents(again, LAYOUTS)
    assert torch.equal(found.tensor(M), numbers(7.0)) and torch.equal(found.tensor(W), numbers(0.0))
    again.close()


def test_forgetting_goes_back_to_the_last_commit(kept: Persistents) -> None:
    kept.prepare(HERE)
    step(kept, 7.0)
    kept.forget()
    assert torch.equal(now(kept, M), numbers(0.5))
    kept.prepare(HERE)
    kept.commit(1, {})
    assert torch.equal(now(kept, M), numbers(0.5)), "what was forgotten is not written later"


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        TensorLayout("float32", (COUNT,), (1,)),
        TensorLayout("float32", (100, 3000), (3000, 1)),
        TensorLayout("float32", (1, 3000, 1, 100), (7, 100, 9, 1)),
        TensorLayout("float32", (3000, 100), (1, 3000)),
        TensorLayout("float32", (100,), (1,), 5),
        TensorLayout("int64", (10,), (2,)),
        TensorLayout("float32", (), ()),
        TensorLayout("float32", (0, 4), (4, 1)),
    ],
)
def test_chunks_are_the_tensor_in_row_major_order_wherever_it_lies(
    kept: Persistents, layout: TensorLayout, resident: bool
) -> None:
    kept.prepare(HERE if resident else AWAY)
    kept.layouts = {M: layout}
    chunks = [bytes(chunk) for chunk in kept.chunks_of(M)]
    raw = numbers(0.5).view(getattr(torch, layout.dtype))
    expected = raw.as_strided(layout.shape, layout.stride, layout.offset).contiguous()
    assert b"".join(chunks) == expected.view(-1).view(torch.uint8).numpy().tobytes()
    assert len(chunks) == math.ceil(expected.nbytes / CHUNK)


def test_the_result_has_the_models_own_names(kept: Persistents) -> None:
    kept.prepare(AWAY)
    chunks = kept.chunks(["state/m", "parameter/w"])
    assert set(chunks) == {"m", "w"}
    assert b"".join(map(bytes, chunks["w"].chunks())) == numbers(0.0).view(torch.uint8).numpy().tobytes()


def test_a_job_begins_with_what_its_bundle_holds_or_with_one_value() -> None:
    bundle = Bundle(small_bundle())
    graph = bundle.graphs["step"]
    sizes = {s.key: s.nbytes for s in graph.storages if s.persistent}
    filled = {key for key in sizes if key in bundle.manifest.fills}
    assert filled and sizes.keys() - filled
    for key, nbytes in sizes.items():
        begun = torch.cat(list(initial_contents(bundle, key, nbytes)))
        assert begun.numel() == nbytes
        if key in filled:
            value = begun.view(getattr(torch, bundle.manifest.layouts[key].dtype))
            assert (value == bundle.manifest.fills[key]).all()
        else:
            assert begun.numpy().tobytes() == b"".join(map(bytes, bundle_chunks(bundle, key).chunks()))


# -- beside a device with its own memory, for which the CPU stands here

HOST = program(starts_on_host=frozenset({1}), host_copies=frozenset({1}))


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Persistents]:
    pager = Pager(staging=Staging(CpuBackend(), BURST))
    opened = store(tmp_path, pager)
    yield Persistents(opened, LAYOUTS)
    pager.close()
    opened.close()


def step_on_host(kept: Persistents, first: float) -> None:
    """Give m new contents in the host's copy, as a step of `HOST` does."""
    copies = copies_of(kept)
    copies.copy_of(M, 4 * COUNT).copy_(numbers(first).view(torch.uint8))
    copies.current.add(M)
    kept.stepped(HOST)


def copies_of(kept: Persistents) -> HostCopies:
    staging = kept.store.pager.staging
    assert staging is not None
    return staging.copies


@pytest.mark.parametrize("first", [HERE, AWAY, HOST])
@pytest.mark.parametrize("then", [HERE, AWAY, HOST])
def test_another_plan_finds_what_the_last_one_left_wherever_that_is(
    first: Program, then: Program, beside: Persistents
) -> None:
    beside.prepare(first)
    if first is HOST:
        step_on_host(beside, 7.0)
    elif first is HERE:
        step(beside, 7.0)
    changed = 0.5 if first is AWAY else 7.0
    beside.prepare(then)
    assert torch.equal(now(beside, M), numbers(changed)) and torch.equal(now(beside, W), numbers(0.0))
    assert set(beside.resident) == ({W, M} if then is HERE else {W})
    assert copies_of(beside).known() == ({M} if then is HOST else set()), "no copy that the plan has no room for"


def test_a_commit_holds_what_was_only_in_the_hosts_memory(beside: Persistents, tmp_path: Path) -> None:
    beside.prepare(HOST)
    step_on_host(beside, 7.0)
    assert beside.unwritten_bytes == 4 * COUNT
    beside.commit(3, {})
    assert beside.unwritten_bytes == 0
    step_on_host(beside, 9.0)  # and the power is cut
    again = StateStore(tmp_path, dict.fromkeys(KEYS, 4 * COUNT), beside.store.pager, job="job")
    found = again.open()
    assert found is not None and found.step == 3
    assert torch.equal(again.load(M)[: 4 * COUNT].view(torch.float32), numbers(7.0))
    again.close()
    beside.forget()
    beside.store.open()
    beside.prepare(HOST)
    assert torch.equal(now(beside, M), numbers(7.0)), "what was not committed is forgotten"


def test_the_last_commit_leaves_no_copy_behind(beside: Persistents) -> None:
    beside.prepare(HOST)
    step_on_host(beside, 7.0)
    beside.commit_and_free(4, {})
    assert not copies_of(beside).known() and torch.equal(now(beside, M), numbers(7.0))


def test_pruning_changes_the_hosts_copy_where_that_is_the_weight(beside: Persistents) -> None:
    beside.prepare(HOST)

    def clear(chunk: torch.Tensor) -> None:
        chunk.zero_()

    beside.for_each_chunk(M, clear, changes=True)
    assert not now(beside, M).any()


def test_a_plan_with_copies_beside_the_cpu_is_refused(kept: Persistents) -> None:
    with pytest.raises(PortError, match="runs on the CPU"):
        kept.prepare(HOST)
