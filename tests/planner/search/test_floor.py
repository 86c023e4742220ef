"""No budget above a step's floor is refused; below it the refusal names what sets the floor and what lowers it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.floor import Floor, Holder, HolderKind, floor_of, floor_plans
from port_planner.search.pareto import Point, non_dominated, point_of
from port_planner.search.plan_step import plan_step
from port_planner.search.solve import Outcome
from port_planner.tiling import tiles
from port_planner.tiling.tilings import tile_fat
from tests.planner.estimated_steps import captured
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_step

BUDGETS = 20


class Attention(nn.Module):
    """Every tensor is smaller than what the planner usually decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        q, k, v = (t.view(*t.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        return self.out(functional.gelu(h + a))


def attention() -> tuple[StepGraph, CostTable]:
    torch.manual_seed(0)
    model, x = Attention(), torch.randint(50, (48, 8))
    loss = lambda m, x, y: functional.cross_entropy(m(x).flatten(0, 1), y.flatten())  # noqa: E731
    graph = capture_step(model, loss, torch.optim.AdamW(model.parameters()), (x, x.clone())).graphs["step"]
    return graph, costs_of(graph, base=1 << 20)


def steps(name: str) -> tuple[StepGraph, CostTable]:
    if name == "tiles":
        whole = language_step().graphs["step"]
        graph = tile_fat(whole, 140_000, 4).applied(whole).graph
        return graph, costs_of(graph, base=1 << 20)
    return attention() if name == "attention" else captured(name)


LONG = ("resnet18", "vgg16bn", "mobilenetv2", "tiles", "resnet50", "bert", "gpt2", "vit")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_no_budget_above_the_floor_is_refused_and_more_never_has_a_lower_peak(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    graph, costs = steps(name)
    least, most = floor_of(graph, costs).nbytes, lower(graph, costs, Plan()).peak_bytes
    points: list[Point] = []
    for k in range(BUDGETS):
        limit = least + (most - least) * k // (BUDGETS - 1)
        found = plan_step(graph, costs, ram_bytes=limit, strategy="greedy")
        assert found.plan is not None, (k, found.message)
        assert found.plan.peak_bytes <= limit
        points.append(point_of(graph, costs, found.plan))
    peaks = [point.peak_bytes for point in points]
    assert peaks == sorted(peaks)
    kept = non_dominated(points)
    assert [p.peak_bytes for p in kept] == sorted((p.peak_bytes for p in kept), reverse=True)
    assert kept[0].joules <= min(p.joules for p in points) * (1 + 1e-9)


@pytest.mark.slow
def test_another_order_that_makes_room_for_everything_is_found_within_what_it_needs() -> None:
    graph, costs = captured("resnet50")
    least, most = floor_of(graph, costs).nbytes, lower(graph, costs, Plan()).peak_bytes
    limits = (least + (most - least) * k // (BUDGETS - 1) for k in (18, 19))
    smaller, larger = (plan_step(graph, costs, ram_bytes=limit, strategy="greedy").plan for limit in limits)
    assert smaller is not None and larger is not None
    assert larger.peak_bytes < least + (most - least) * 18 // (BUDGETS - 1), "it fits the smaller budget"
    assert (smaller.peak_bytes, smaller.decisions) == (larger.peak_bytes, ())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["greedy", "milp"])
def test_a_step_of_small_tensors_is_planned_near_what_keeping_everything_takes(strategy: str) -> None:
    graph, costs = attention()
    keep, base = lower(graph, costs, Plan()).peak_bytes, costs.device.base_bytes
    for share in (0.95, 0.9, 0.8):
        limit = base + int((keep - base) * share)
        found = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=2.0)
        assert found.plan is not None and found.plan.peak_bytes <= limit, found.message


def test_below_the_floor_the_refusal_names_it_and_what_lowers_it() -> None:
    graph, costs = captured()
    floor = floor_of(graph, costs)
    found = plan_step(graph, costs, ram_bytes=floor.nbytes - 1)
    assert (found.outcome, found.plan, found.needed_bytes) == (Outcome.INFEASIBLE, None, floor.nbytes)
    assert f"op {floor.op} ({graph.operator_of_module(floor.op)})" in found.message
    assert floor.remedy in found.remedy
    assert str(floor.holders[0]) in str(floor) and floor.held in found.message


@pytest.mark.slow
def test_no_operator_needs_more_than_the_floor_and_one_needs_it() -> None:
    graph, costs = captured("vgg16bn")
    needed = [
        sum(graph.storages[s].nbytes for s in {*graph.reads[i], *graph.creates[i]}) + costs.ops[i].workspace_bytes
        for i in range(len(graph.ops))
    ]
    floor = floor_of(graph, costs)
    stays = {s for s, storage in enumerate(graph.storages) if storage.role in (Role.BATCH, Role.CONSTANT)} | graph.kept
    lasting = sum(graph.storages[s].nbytes for s in stays)
    assert max(needed) <= floor.nbytes - floor.base_bytes <= max(needed) + lasting
    *_, last = floor_plans(graph, floor.nbytes)
    assert lower(graph, costs, last).peak_bytes <= floor.nbytes


def test_what_lowers_it_is_what_takes_most() -> None:
    weight, product = Holder("head.weight", 600, HolderKind.WEIGHT, "head.weight"), Holder("mm output [4, 100]", 300)
    floor = Floor(1000, 3, "aten::mm", 0, 100, (weight, product))
    assert (
        floor.remedy == "make the layer head smaller: most of it is the weight head.weight, which is needed whole there"
    )
    assert replace(floor, holders=(replace(product, nbytes=900),)).remedy.startswith("a smaller batch (fewer samples")
    assert "scratch memory of the kernel of mm" in replace(floor, workspace_bytes=600).remedy
    block = Holder("head.weight#columns/9", 300, HolderKind.WEIGHT, "head.weight")
    state = Holder("head.weight/exp_avg#rows/9", 300, HolderKind.STATE, "head.weight")
    assert replace(floor, holders=(block, state)).remedy == (
        "freeze head.weight (requires_grad_(False)) or make the layer head smaller: most of it is a block of columns "
        "of the weight head.weight and a block of rows of the optimizer's exp_avg of head.weight, which are needed "
        "whole there"
    )


@pytest.mark.parametrize("wide", [8192, 1024])  # 8 MiB are updated in slices, 1 MiB is not
def test_a_floor_set_by_an_update_says_of_which_weight(wide: int) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, wide))
    optimizer = torch.optim.AdamW(model.parameters())
    graph = capture_step(model, mean_square, optimizer, (torch.randn(2, 64),)).graphs["step"]
    floor = floor_of(graph, costs_of(graph))
    assert (HolderKind.UPDATE, "1.weight") in {(held.kind, held.weight) for held in floor.holders}
    assert "the update of 1.weight" in floor.held
    assert floor.remedy.startswith(
        "freeze 1.weight (requires_grad_(False)) or make the layer 1 smaller: most of it is "
    )


def test_a_floor_set_by_a_gradient_says_of_which_weight() -> None:
    model = nn.Sequential(nn.Embedding(40_000, 128), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, mean_square, optimizer, (torch.arange(4),)).graphs["step"]
    floor = floor_of(graph, costs_of(graph))
    assert floor.holders[0].kind is HolderKind.GRADIENT and "most of it is the gradient of 0.weight" in floor.remedy


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_step_of_nothing_needs_nothing() -> None:
    graph, costs = captured()
    empty = replace(graph, ops=(), loss=graph.batch[0])
    assert floor_of(empty, replace(costs, ops=())).holders == ()
