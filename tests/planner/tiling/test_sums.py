"""Sums over rows and samples in tiles: in another order where that is allowed, close to the whole's,
marked, and never otherwise.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.bundle.codec import pack_graph, unpack_graph
from port_planner.ir.graph import StepGraph, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.operators import base_name
from port_planner.search.floor import floor_of
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains
from port_planner.tiling.gradients import split_gradients
from port_planner.tiling.rewriting import RewrittenGraph, compacted
from port_planner.tiling.sums import dimensions, sums_of
from port_planner.tiling.tiles import tile_chains
from tests.agent.exactness import OPTIMIZERS, plain, planned, random_plan
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_batch, language_loss, language_model, language_step

FAT_BYTES = 200_000


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


def cut(*, sums: bool) -> tuple[StepGraph, RewrittenGraph]:
    graph = language_step().graphs["step"]
    return graph, tile_chains(graph, find_chains(graph, FAT_BYTES, sums=sums), 4)


def summed(graph: StepGraph, *, sums: bool = True) -> set[str]:
    """Return the operators that are cut although they sum over what is cut."""
    found = ((op, dimensions(graph, op, sums=sums)) for op in graph.ops)
    return {base_name(op.name) for op, dims in found if dims is not None and sums_of(op, dims)}


def test_gradients_of_weights_biases_and_norms_are_sums_where_that_is_allowed() -> None:
    graph = language_step().graphs["step"]
    assert summed(graph) == {"mm", "sum", "native_layer_norm_backward"}
    assert summed(graph, sums=False) == set()
    for op in graph.ops:
        dims = dimensions(graph, op, sums=True)
        if base_name(op.name) == "native_layer_norm_backward" and dims is not None:
            assert [v in dims for v in op.outputs] == [True, False, False]  # of the input, of both factors


def test_a_gradient_in_bfloat16_is_no_sum_of_parts() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    x = torch.randn(128, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x).float().square().mean(), optimizer, (x,)).graphs["step"]
    assert "mm" in {base_name(op.name) for op in graph.ops}
    assert summed(graph) == set()


def test_chains_go_on_through_sums_and_say_which_operators_are_reordered() -> None:
    _, exact = cut(sums=False)
    graph, rewritten = cut(sums=True)
    assert not any(tile.reordered for tile in exact.graph.tiles)
    assert any(tile.reordered for tile in rewritten.graph.tiles)
    verify_graph(rewritten.graph)
    verify_operands(rewritten.graph)
    reordered = {base_name(op.name) for op in rewritten.graph.ops if op.tile is not None and op.tile.reordered}
    assert reordered == {"mm", "sum", "native_layer_norm_backward", "add_"}
    assert unpack_graph(pack_graph(rewritten.graph)) == rewritten.graph
    most = max(len(r.old) for r in exact.replacements)
    assert max(len(r.old) for r in rewritten.replacements) > most
    assert {graph.label(s) for r in rewritten.replacements for s in r.sums}


def test_the_sums_are_close_and_everything_else_has_its_bits() -> None:
    graph, rewritten = cut(sums=True)
    assert differing(graph, rewritten) == ()
    strict = replace(rewritten, replacements=tuple(replace(r, sums=()) for r in rewritten.replacements))
    found = differing(graph, strict)
    assert found and all(d.replacement.old for d in found), "they are other bits, which is why that has to be allowed"


def test_what_only_sums_read_need_not_exist_whole() -> None:
    graph, rewritten = cut(sums=True)
    _, exact = cut(sums=False)
    floors = [floor_of(g, costs_of(g)).nbytes for g in (rewritten.graph, exact.graph, graph)]
    assert floors == sorted(floors) and floors[0] < floors[1]


@pytest.mark.slow
def test_they_train_nearly_as_plain_pytorch_does(tmp_path: Path) -> None:
    make, batches = OPTIMIZERS["sgd"], [language_batch(i) for i in range(2)]
    expected = plain(language_model(), language_loss, make, batches)
    model = language_model()
    capture = capture_step(model, language_loss, make(model.parameters()), batches[0])
    step = capture.graphs["step"]
    graph = compacted(tile_chains(step, find_chains(step, FAT_BYTES, sums=True), 4).graph)
    actual = planned(replace(capture, graphs={"step": graph}), {"step": random_plan(graph, 1)}, batches, tmp_path)
    assert [float(loss) for loss in actual.losses] == pytest.approx([float(loss) for loss in expected.losses], rel=1e-5)


def test_a_convolutions_gradient_is_a_sum_over_samples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(8, 3, 32, 32),)).graphs[
        "step"
    ]
    graph = compacted(split_gradients(whole).graph)
    assert "convolution_backward" in summed(graph)
    chains = find_chains(graph, 10_000, sums=True)
    rewritten = tile_chains(graph, chains, 4)
    assert {"convolution_backward", "convolution"} <= {base_name(graph.ops[i].name) for c in chains for i in c.cut}
    assert rewritten.replacements and differing(graph, rewritten) == ()


def test_a_part_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    part_of_sum: Callable[..., int] = tiles._TileRewriter._tile_of_sum

    def twice(made: tiles._TileRewriter, v: int, tile: int) -> int:
        """Let the last tile begin the sum anew."""
        return part_of_sum(made, v, 0 if tile == len(made.bounds) - 1 else tile)

    monkeypatch.setattr(tiles._TileRewriter, "_tile_of_sum", twice)
    graph, rewritten = cut(sums=True)
    assert differing(graph, rewritten)
