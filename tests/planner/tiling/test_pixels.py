"""Convolutions of single pixels as products of matrices: the same bits, tiles by samples, a slip found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import Capture, capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.graph import Ref, StepGraph, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains
from port_planner.tiling.gradients import CONVOLUTION, split_gradients
from port_planner.tiling.pixels import PRODUCTS, as_products
from port_planner.tiling.rewriting import compacted
from port_planner.tiling.tiles import tile_chains
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan


class Pixels(nn.Module):
    """Single pixels between larger windows, with a stride, a bias, groups, and along one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 32, 1, bias=False), nn.ReLU(),
            nn.Conv2d(32, 16, 1, bias=False), nn.Conv2d(16, 16, 1, stride=2, bias=False), nn.Conv2d(16, 16, 1, groups=4, bias=False),
            nn.Conv2d(16, 8, 1), nn.Flatten(2), nn.Conv1d(8, 4, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def captured() -> tuple[Pixels, Capture, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    model = Pixels()
    batches: list[tuple[torch.Tensor, ...]] = [(torch.randn(8, 3, 22, 22),) for _ in range(2)]
    capture = capture_step(model, lambda m, x: m(x), OPTIMIZERS["sgd"](model.parameters()), batches[0])
    halves = compacted(split_gradients(capture.graphs["step"]).graph)
    return model, replace(capture, graphs={"step": halves}), batches


def count(graph: StepGraph, name: str) -> int:
    return sum(op.name == name for op in graph.ops)


def test_those_of_all_channels_that_move_by_pixels_are_products_and_the_graph_stays_one() -> None:
    graph = captured()[1].graphs["step"]
    rewritten = as_products(graph)
    verify_graph(rewritten.graph)
    verify_operands(rewritten.graph)
    made = count(rewritten.graph, PRODUCTS) - count(graph, PRODUCTS)
    assert made == len(rewritten.replacements) == 3 + 4  # forward without a bias; gradients of four inputs
    assert count(graph, CONVOLUTION) - count(rewritten.graph, CONVOLUTION) == made
    assert len(rewritten.graph.ops) == len(graph.ops) and rewritten.graph.storages == graph.storages
    some = frozenset(r.old[0] for r in rewritten.replacements[:2])
    assert {r.old[0] for r in as_products(graph, some).replacements}.isdisjoint(some)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_they_have_the_bits_of_the_convolutions(threads: int) -> None:
    graph = captured()[1].graphs["step"]
    torch.set_num_threads(threads)
    try:
        found = differing(graph, as_products(graph))
    finally:
        torch.set_num_threads(1)
    assert found == () or threads > 1  # which is why each is compared with the threads that it will have


def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    model, capture, batches = captured()
    expected = plain(model, lambda m, x: m(x), OPTIMIZERS["sgd"], batches)
    graph = compacted(as_products(capture.graphs["step"]).graph)
    for seed in range(2):
        plans = {"step": random_plan(graph, seed)}
        assert not differences(
            expected, planned(replace(capture, graphs={"step": graph}), plans, batches, tmp_path / str(seed))
        )


def test_chains_cut_products_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 10_000)
    graph = compacted(as_products(captured()[1].graphs["step"]).graph)
    chains = [c for c in find_chains(graph, 100_000) if any(graph.ops[i].name == PRODUCTS for i in c.cut)]
    assert chains
    rewritten = tile_chains(graph, chains, 4)
    products = [
        op
        for op in rewritten.graph.ops
        if op.name == PRODUCTS and op.tile is not None and "products" not in op.tile.what
    ]
    shapes = {rewritten.graph.values[a.value].shape[0] for op in products for a in op.args if isinstance(a, Ref)}
    assert 2 in shapes and differing(graph, rewritten) == ()


def test_a_matrix_taken_the_other_way_round_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 1, bias=False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graph = capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(4, 8, 6, 6),)).graphs["step"]
    rewritten = as_products(graph)
    assert rewritten.replacements and differing(graph, rewritten) == ()
    values = tuple(replace(v, stride=(0, 1, 8)) if v.stride == (0, 8, 1) else v for v in rewritten.graph.values)
    assert differing(graph, replace(rewritten, graph=replace(rewritten.graph, values=values)))
