"""Reordered steps: no constraint is broken, and the numbers stay those of plain PyTorch, to the bit."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import workload
from port_planner.capture.step import capture_step
from port_planner.ir.graph import Phase, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.problem.problem import Problem
from port_planner.problem.reorder import dependencies, peak_bytes, reorder, respects
from port_planner.search import plan_step as plan_step_module
from port_planner.search import solve
from port_planner.search.greedy.search import Greedy, greedy
from port_planner.search.plan_step import best_order, plan_step
from tests.agent.exactness import OPTIMIZERS, differences, flat_costs, plain, planned
from tests.planner.estimated_steps import captured


def shuffled(graph: StepGraph, seed: int) -> tuple[int, ...]:
    """Return a random order that breaks no dependency."""
    rng = random.Random(seed)
    before = dependencies(graph)
    followers: list[list[int]] = [[] for _ in graph.ops]
    waiting = [len(found) for found in before]
    for i, found in enumerate(before):
        for j in found:
            followers[j].append(i)
    ready = [i for i, count in enumerate(waiting) if not count]
    order = []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(i)
        for j in followers[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return tuple(order)


def updates_last(graph: StepGraph) -> tuple[int, ...]:
    """Return the order of plain PyTorch: all updates after the backward phase."""
    updates = [i for i, op in enumerate(graph.ops) if op.phase is Phase.UPDATE]
    return (*(i for i, op in enumerate(graph.ops) if op.phase is not Phase.UPDATE), *updates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("resnet18", "sgd"),
        pytest.param("bert", "adamw", marks=pytest.mark.long),
        pytest.param("mobilenetv2", "adamw", marks=pytest.mark.long),
    ],
)
def test_any_allowed_order_gives_the_same_bits(name: str, optimizer: str, tmp_path: Path) -> None:
    made, make = workload(name, small=True), OPTIMIZERS[optimizer]
    data = [made.batch(i) for i in range(2)]
    expected = plain(made.model, made.loss_fn, make, data)
    capture = capture_step(made.model, made.loss_fn, make(made.model.parameters()), data[0])
    graph = capture.graphs["step"]
    orders = [shuffled(graph, 1), shuffled(graph, 2), updates_last(graph)]
    assert len(set(orders)) == 3
    for k, order in enumerate(orders):
        assert respects(graph, order)
        actual = planned(capture, {"step": Plan(order=order)}, data, tmp_path / str(k))
        assert not differences(expected, actual), k


@pytest.mark.slow
def test_the_planner_reorders_where_that_saves_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose updates come last holds every gradient; a budget that only another order keeps without paging."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))
    make = OPTIMIZERS["sgd"]
    data = [(torch.randn(4, 256), torch.randn(4, 256)) for _ in range(2)]

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(m(x), y)

    expected = plain(model, loss, make, data)
    capture = capture_step(model, loss, make(model.parameters()), data[0])
    graph = capture.graphs["step"]
    late = graph.reordered(updates_last(graph))
    costs = flat_costs(late)
    better = reorder(late)
    assert peak_bytes(late.reordered(better)) < peak_bytes(late)
    budget = lower(late, costs, Plan(order=better)).peak_bytes
    assert budget < lower(late, costs, Plan()).peak_bytes
    order = best_order(late, costs, budget)
    assert order == better and respects(late, order)
    plan = plan_step(late, costs, ram_bytes=budget, time_limit_s=2.0).plan
    assert plan is not None and plan.order == order and plan.peak_bytes <= budget
    searched = list[Problem]()

    def counted(problem: Problem) -> Greedy:
        searched.append(problem)
        return greedy(problem)

    monkeypatch.setattr(plan_step_module, "greedy", counted)
    monkeypatch.setattr(solve, "greedy", counted)
    monkeypatch.setattr(plan_step_module, "DECIDED_SHARE", 1.0)  # as in a step of some megabytes
    bare = replace(costs, packings=())
    quick = plan_step(late, bare, ram_bytes=budget, strategy="greedy").plan
    assert quick is not None and quick.order == order and len(searched) == 2, "once in each order"
    actual = planned(replace(capture, graphs={"step": late}), {"step": plan}, data, tmp_path)
    assert not differences(expected, actual)


def test_reordering_breaks_no_constraint_and_does_not_raise_the_peak() -> None:
    graph, _ = captured()
    late = _updates_last(graph)
    order = reorder(late)
    assert order and respects(late, order)
    assert peak_bytes(late.reordered(order)) < peak_bytes(late)
    assert not respects(late, tuple(reversed(range(len(late.ops)))))


def _updates_last(graph: StepGraph) -> StepGraph:
    from port_planner.ir.graph import Phase

    first = [i for i, op in enumerate(graph.ops) if op.phase is not Phase.UPDATE]
    return graph.reordered((*first, *(i for i, op in enumerate(graph.ops) if op.phase is Phase.UPDATE)))
