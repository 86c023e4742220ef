"""Pointwise operators in place: the bits of new tensors, only over what nobody needs any more; a slip is found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import Capture, capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.graph import Role, StepGraph, verify_graph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.plan import Plan
from port_planner.operators import operator_of
from port_planner.tiling import in_place
from port_planner.tiling.chains import find_chains
from port_planner.tiling.in_place import write_in_place
from port_planner.tiling.rewriting import compacted
from port_planner.tiling.tiles import tile_chains
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_step

WIDTH, ROWS = 64, 96


class Pointwise(nn.Module):
    """Activations, residual sums, dropout, a difference whose second operand dies, and a
    tensor that two operators need.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = self.layers
        h = torch.tanh(a(x))
        h = h + torch.sigmoid(b(h))
        h = h * self.drop(torch.relu(c(h)))
        h = 1.5 - torch.exp(-d(h))
        return (h - e(h)) / (1 + h.square())


def captured() -> tuple[Pointwise, Capture, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    model = Pointwise()
    batches: list[tuple[torch.Tensor, ...]] = [(torch.randn(ROWS, WIDTH),) for _ in range(2)]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return model, capture_step(model, lambda m, x: m(x).square().mean(), optimizer, batches[0]), batches


def step() -> StepGraph:
    return captured()[1].graphs["step"]


def names(graph: StepGraph) -> list[str]:
    return [op.name.removeprefix("aten::") for op in graph.ops]


def test_results_lie_where_an_operand_lay_and_the_graph_stays_one() -> None:
    graph = step()
    rewritten = write_in_place(graph)
    small = compacted(rewritten.graph)
    verify_graph(small)
    verify_operands(small)
    found = set(names(small)) - set(names(graph))
    assert {"tanh_", "sigmoid_", "relu_", "exp_", "neg_"} <= found
    assert names(small).count("add_.Tensor") > names(graph).count("add_.Tensor")
    temporary = [sum(s.role is Role.TEMPORARY for s in g.storages) for g in (compacted(graph), small)]
    assert temporary[0] - temporary[1] == len(rewritten.replacements) > 8
    assert len(small.ops) == len(graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_they_have_the_bits_of_new_tensors(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        for graph in (step(), language_step().graphs["step"]):
            assert differing(graph, write_in_place(graph)) == ()
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    model, capture, batches = captured()
    expected = plain(model, lambda m, x: m(x).square().mean(), OPTIMIZERS["sgd"], batches)
    graph = compacted(write_in_place(capture.graphs["step"]).graph)
    for seed in range(4):
        plan = random_plan(graph, seed, pack=0.2)
        actual = planned(replace(capture, graphs={"step": graph}), {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, actual), seed


def test_a_step_that_keeps_everything_takes_less() -> None:
    graph = step()
    small = compacted(write_in_place(graph).graph)

    def peak(of: StepGraph) -> int:
        return lower(of, costs_of(of), Plan()).peak_bytes

    assert peak(small) < peak(graph)


def test_what_is_read_again_is_not_overwritten() -> None:
    graph = step()
    rewritten = write_in_place(graph)
    for replacement in rewritten.replacements:
        (i,) = replacement.old
        (target,) = rewritten.graph.ops[replacement.new[0]].writes
        lie_there = {s for s in range(len(graph.storages)) if rewritten.moved.get(s, s) == target}
        gone = [s for s in lie_there if graph.uses[s] and graph.uses[s][0] < i]
        assert gone and all(graph.uses[s][-1] <= i for s in gone)


def test_updates_stay_as_they_stream() -> None:
    graph = step()
    small = write_in_place(graph).graph
    updates = [[op.name for op in g.ops if op.phase.name == "UPDATE"] for g in (graph, small)]
    assert updates[0] == updates[1]


def test_tiles_are_cut_of_what_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_planner.tiling.tiles.SPLIT_BYTES", 50_000)
    graph = compacted(write_in_place(language_step().graphs["step"]).graph)
    rewritten = tile_chains(graph, find_chains(graph, 200_000), 4)
    verify_operands(rewritten.graph)
    assert rewritten.replacements and differing(graph, rewritten) == ()


# -- slips that must be found


def test_an_operand_that_is_still_needed_is_missed_by_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(in_place, "is_last_reader", lambda graph, i, s: graph.storages[s].role is Role.TEMPORARY)
    model, capture, batches = captured()
    expected = plain(model, lambda m, x: m(x).square().mean(), OPTIMIZERS["sgd"], batches)
    graph = compacted(write_in_place(capture.graphs["step"]).graph)
    actual = planned(replace(capture, graphs={"step": graph}), {"step": Plan()}, batches, tmp_path)
    assert differences(expected, actual)


@pytest.mark.slow
def test_operands_the_other_way_round_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `h - e(h)`, only the subtracted tensor is dead afterwards."""
    assert differing(step(), write_in_place(step())) == ()
    monkeypatch.setattr(
        in_place,
        "operator_of",
        lambda name: (
            replace(operator_of(name), commutes=("Tensor",)) if name == "aten::sub.Tensor" else operator_of(name)
        ),
    )
    assert {d.replacement.what for d in differing(step(), write_in_place(step()))} == {"sub in place"}


def test_what_is_to_be_left_as_it_is_is() -> None:
    graph = step()
    first = write_in_place(graph).replacements[0]
    again = write_in_place(graph, frozenset(first.old))
    assert first.old not in {r.old for r in again.replacements}
    assert differing(graph, again) == ()


def test_a_tensor_of_another_layout_is_not_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, ROWS))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax((model(x).t() + torch.ones(ROWS, ROWS)), -1).square().sum()

    graph = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(ROWS, WIDTH),)).graphs[
        "step"
    ]
    rewritten = write_in_place(graph)
    verify_graph(rewritten.graph)
    assert differing(graph, rewritten) == ()
