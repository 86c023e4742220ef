"""Gradients of convolutions in halves: what differs left whole and named, costs measured anew;
single pixels as products.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from port_agent.prepare.tiling import comparing
from port_agent.prepare.tiling import split_gradients as halves_of
from port_agent.prepare.tiling.split_gradients import with_products, with_split_gradients
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob
from port_planner import make_bundle
from port_planner.exactness.replacements import Difference
from port_planner.ir.costs import OpCost
from port_planner.ir.graph import StepGraph
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.gradients import CONVOLUTION, CONVOLUTION_BACKWARD, WHAT
from port_planner.tiling.pixels import PRODUCTS
from port_planner.tiling.rewriting import RewrittenGraph
from tests.agent.prepare.tiling.small_jobs import ROOM, whole


@pytest.mark.long
def test_a_job_with_a_convolution_is_halved_and_measured_again(
    split: tuple[make_bundle.CapturedJob, MeasuredCosts, TiledJob],
) -> None:
    captured, _, tiled = split
    assert tiled.left_whole == ()
    assert tiled.measured.base_bytes == 100
    for (name, graph), ops in zip(tiled.captured.graphs.items(), tiled.measured.ops, strict=True):
        before = captured.graphs[name]
        presplit = sum(op.name == CONVOLUTION_BACKWARD and len(op.outputs) == 3 for op in before.ops)
        assert len(ops) == len(graph.ops) == len(before.ops) + presplit
        assert presplit == (0 if name.startswith("eval") else 1)
        assert all(cost.seconds > 0 for cost in ops)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_of_convolutions_of_single_pixels_those_are_products_that_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Tanh(), nn.Conv2d(8, 8, 1, bias=False), nn.Tanh())
    job = TrainingJob(
        model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(8, 3, 9, 9)], 4
    )
    made = make_bundle.prepare(job)
    (graph,) = made.graphs.values()
    first, *others = (i for i, op in enumerate(graph.ops) if op.name == "aten::convolution")

    def costs(made: dict[str, StepGraph], before: MeasuredCosts, *_: Any) -> MeasuredCosts:
        """Let the first be expensive as products, the others cheap."""
        (ops,) = (one.ops for one in made.values())
        table = tuple(
            OpCost(1e-4, 7, 2e-4 if i == first else 0.5e-4) if op.name == PRODUCTS else OpCost(1e-4, 0, 1e-4)
            for i, op in enumerate(ops)
        )
        return replace(before, ops=(table,))

    monkeypatch.setattr(halves_of, "costs_of_rewritten", costs)
    whole = TiledJob(made, MeasuredCosts((tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops),), 5, 0), ("something",))
    found = with_products(whole, ROOM, 2.0, lambda *_: None)
    (chosen,) = found.captured.graphs.values()
    products = [i for i, op in enumerate(chosen.ops) if op.name == PRODUCTS]
    assert others and products == others and found.left_whole == ("something",)
    assert [found.measured.ops[0][i].workspace_bytes for i in (first, *others)] == [0] + [7] * len(others)
    assert found.measured.base_bytes == 5


@pytest.mark.slow
def test_where_a_convolution_differs_from_the_backward_pass_halves_are_both_that_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Arm: what would be a convolution has other bits there."""
    captured, measured = whole()

    def odd(pairs: list[tuple[StepGraph, RewrittenGraph]], _: ComparisonLimits) -> tuple[tuple[Difference, ...], ...]:
        return tuple(
            tuple(
                Difference(r, "the third byte differs")
                for r in new.replacements
                if any(new.graph.ops[i].name == CONVOLUTION for i in r.new)
            )
            for _, new in pairs
        )

    monkeypatch.setattr(comparing, "compared", odd)
    monkeypatch.setattr(halves_of, "costs_of_rewritten", lambda *_: measured)
    monkeypatch.setattr(halves_of, "with_products", lambda tiled, *_: tiled)
    tiled = with_split_gradients(captured, measured, ROOM, 2.0, lambda *_: None)
    assert tiled.left_whole == ()
    for name, graph in tiled.captured.graphs.items():
        masks = [op.args[-1] for op in graph.ops if op.name == CONVOLUTION_BACKWARD]
        assert ((True, False, False) in masks) is not name.startswith("eval")


@pytest.mark.slow
def test_what_differs_here_is_left_whole_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, measured = whole()

    def odd(pairs: list[tuple[StepGraph, RewrittenGraph]], _: ComparisonLimits) -> tuple[tuple[Difference, ...], ...]:
        return tuple(tuple(Difference(r, "the third byte differs") for r in new.replacements) for _, new in pairs)

    monkeypatch.setattr(comparing, "compared", odd)
    tiled = with_split_gradients(captured, measured, ROOM, 2.0, lambda *_: None)
    assert tiled.captured.graphs == captured.graphs
    assert tiled.measured == measured
    assert {f"{WHAT}: the third byte differs", "relu in place: the third byte differs"} <= set(tiled.left_whole)
