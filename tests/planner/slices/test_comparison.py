"""What differs in a byte, or is laid out or called otherwise, is found; what is alike is run once."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture.step import capture_step
from planner.ir.graph import Ref, StepGraph
from planner.slices import comparison, pieces
from planner.slices.chains import find_chains
from planner.slices.comparison import (
    ComparisonRequest,
    Differing,
    differing,
    main,
    most_held_bytes,
    pack_request,
    read_differing,
)
from planner.slices.gradients import split_gradients
from planner.slices.pieces import cut_chains
from planner.slices.rewriting import Rewritten


def step() -> StepGraph:
    """Return a step with three equal convolutions whose input wants a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(4, 3, 9, 9),)).graphs["step"]


def turned(rewritten: Rewritten, which: int) -> Rewritten:
    """Return the same with one half that reads its weight's rows as columns: the right shape, the wrong bits."""
    graph = rewritten.graph
    place = rewritten.replacements[which].new[1]
    half = graph.ops[place]
    (weight,) = (a.value for a in half.args[1:2] if isinstance(a, Ref))
    value = graph.values[weight]
    wrong = replace(value, stride=(*value.stride[:2], value.stride[3], value.stride[2]))
    ops = list(graph.ops)
    ops[place] = replace(half, args=(half.args[0], Ref(len(graph.values)), *half.args[2:]))
    return replace(rewritten, graph=replace(graph, ops=tuple(ops), values=(*graph.values, wrong)))


def test_a_half_with_the_wrong_bits_is_found_with_where_it_differs() -> None:
    graph = step()
    (found,) = differing(graph, turned(split_gradients(graph), 1))
    assert found.replacement == split_gradients(graph).replacements[1]
    assert "differs in" in found.where and "bytes" in found.where


def test_a_call_that_torch_refuses_or_lays_out_otherwise_counts_as_differing() -> None:
    graph = step()
    rewritten = split_gradients(graph)
    place = rewritten.replacements[0].new[1]
    half = rewritten.graph.ops[place]
    for padding, words in (((2, 2), "aten::convolution gives"), ((-1, -1), "negative padding")):
        ops = list(rewritten.graph.ops)
        ops[place] = replace(half, args=(*half.args[:4], padding, *half.args[5:]))
        (found,) = differing(graph, replace(rewritten, graph=replace(rewritten.graph, ops=tuple(ops))))
        assert words in found.where


def test_no_tensor_stays_when_a_form_was_compared() -> None:
    """Planning keeps to the RAM that it plans for: nothing may wait for Python to look for cycles."""
    graph = step()
    rewritten = split_gradients(graph)
    differing(graph, rewritten)  # whatever torch keeps of its first calls
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        differing(graph, rewritten)
        assert sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()) == before
    finally:
        gc.enable()


def test_of_those_alike_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ran = step(), []
    run = comparison._run

    def counted(*arguments: object) -> object:
        ran.append(arguments)
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "_run", counted)
    assert differing(graph, split_gradients(graph)) == ()
    assert len(split_gradients(graph).replacements) == 3
    assert len(ran) == 2


def test_it_runs_as_a_process_would(tmp_path: Path) -> None:
    graph = step()
    source, target = tmp_path / "request", tmp_path / "found"
    pairs = [(graph, split_gradients(graph)), (graph, turned(split_gradients(graph), 0))]
    source.write_bytes(pack_request(pairs, 1))
    assert main([str(source), str(target)]) == 0
    same, other = read_differing(target)
    assert same == ()
    assert [type(one) for one in other] == [Differing]


def test_what_comparing_holds_at_once_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 1 << 10)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh(), nn.Linear(32, 1))
    deep = capture_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(256, 32),)
    ).graphs["step"]  # fmt: skip
    halved, chained = split_gradients(step()), cut_chains(deep, find_chains(deep, 1 << 10), 4)
    for graph, rewritten in ((step(), halved), (deep, chained)):
        assert rewritten.replacements
        for replacement in rewritten.replacements:
            alone, seen = replace(rewritten, replacements=(replacement,)), [0]
            watch(monkeypatch, seen)
            assert differing(graph, alone) == ()
            monkeypatch.undo()
            assert seen[0] == most_held_bytes(graph, alone)


@pytest.mark.parametrize(("width", "threads", "cut"), [(64, 2, True), (50, 1, True), (50, 2, False)])
def test_what_vectors_round_apart_is_cut_where_threads_shares_end_with_whole_ones(
    width: int, threads: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that are made up may happen to be rounded alike at the few places that lie in no vector."""
    monkeypatch.setattr(pieces, "SPLIT_BYTES", 1 << 10)
    model = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 1)).double()
    graph = capture_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(250, 8, dtype=torch.float64),),
    ).graphs["step"]  # fmt: skip
    rewritten = cut_chains(graph, find_chains(graph, 1 << 10), 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(comparison, "_made_up", lambda graph, s, *of: torch.zeros(graph.storages[s].nbytes).byte())
    try:
        found = differing(graph, rewritten)
    finally:
        torch.set_num_threads(before)
    assert rewritten.replacements and (not found) == cut
    assert all("silu rounds apart where a thread's share ends" in one.where for one in found)


def test_replacements_are_parted_by_the_room_that_they_need() -> None:
    graph = step()
    wrong = turned(split_gradients(graph), 1)
    needs = sorted(most_held_bytes(graph, replace(wrong, replacements=(one,))) for one in wrong.replacements)
    request = ComparisonRequest(pack_request([(graph, wrong), (graph, split_gradients(graph))], 1))
    for room, counts in ((needs[0] - 1, (0, 3)), (needs[-1], (3, 0))):
        parts = request.parted(room)
        assert tuple(len(part[0][1].replacements) for part in parts) == counts
        found = [request.differing(part) for part in parts]
        assert [first + second for first, second in zip(*found, strict=True)] == request.differing(request.pairs)
        assert len(found[0][0]) + len(found[1][0]) == 1


def watch(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    """Note in `seen[0]` the most bytes that distinct storages take after a call: given ones, results of the first run, what is held."""
    run, call = comparison._run, comparison._call
    around: list[torch.Tensor] = []

    def running(graph: StepGraph, ops: Any, given: dict[int, torch.Tensor], *more: Any) -> dict[int, torch.Tensor]:
        around.extend(given.values())
        found = run(graph, ops, given, *more)
        around.extend(found.values())
        return found

    def calling(graph: StepGraph, i: int, held: dict[int, torch.Tensor]) -> None:
        call(graph, i, held)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*around, *held.values())}
        seen[0] = max(seen[0], sum(storages.values()))

    monkeypatch.setattr(comparison, "_run", running)
    monkeypatch.setattr(comparison, "_call", calling)
