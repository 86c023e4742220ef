"""Chains in tiles: the bits of the whole, under random plans too; a slip in a boundary, a start or a mask is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.bundle.codec import pack_graph, unpack_graph
from port_planner.ir.graph import RESERVED, Op, Ref, StepGraph, Tile, Value, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.search.floor import floor_of
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains
from port_planner.tiling.rewriting import RewrittenGraph
from port_planner.tiling.tiles import even_bounds, tile_chains
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_batch, language_loss, language_model, language_step

FAT_BYTES = 200_000


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


def cut(count: int = 4) -> tuple[StepGraph, RewrittenGraph]:
    graph = language_step().graphs["step"]
    return graph, tile_chains(graph, find_chains(graph, FAT_BYTES), count)


def test_tiles_have_the_bits_of_the_whole_and_the_graph_stays_one() -> None:
    for count in (2, 3, 4, 8):
        graph, rewritten = cut(count)
        verify_graph(rewritten.graph)
        verify_operands(rewritten.graph)
        assert differing(graph, rewritten) == ()
        names = [op.name for op in rewritten.graph.ops]
        assert names.count("aten::gather") == len(even_bounds(256, count, 16))
        assert names.count("aten::nll_loss_forward") == 1
        assert len(names) > len(graph.ops)


def test_what_lies_inside_a_chain_never_exists_whole_and_the_floor_sinks() -> None:
    graph, rewritten = cut(8)
    head = max(s.nbytes for s in graph.storages)
    made = {s for fresh in rewritten.graph.creates for s in fresh}
    assert sum(graph.storages[s].nbytes == head for fresh in graph.creates for s in fresh) > 2
    assert sum(rewritten.graph.storages[s].nbytes == head for s in made) <= 1  # what the head's gradient reads whole
    assert floor_of(rewritten.graph, costs_of(rewritten.graph)).nbytes < floor_of(graph, costs_of(graph)).nbytes


@pytest.mark.slow
def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    make, batches = OPTIMIZERS["adamw"], [language_batch(i) for i in range(2)]
    expected = plain(language_model(), language_loss, make, batches)
    graph = cut(4)[1].graph
    for seed in range(3):
        plan = random_plan(graph, seed)
        capture = replace(language_step(), graphs={"step": graph})
        actual = planned(capture, {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, actual), seed


def test_every_op_of_a_tile_says_which_it_is() -> None:
    graph, rewritten = cut(4)
    assert graph.tiles == ()
    chains = find_chains(graph, FAT_BYTES)
    assert len(rewritten.graph.tiles) == len(chains)
    for tile in rewritten.graph.tiles:
        indices = [op.tile.index for op in rewritten.graph.ops if op.tile and op.tile.chain == tile.chain]
        assert indices == sorted(indices) and set(indices) == set(range(tile.count))
    head = next(tile.what for tile in rewritten.graph.tiles if "nll_loss_forward" in tile.what)
    assert head.endswith("along dimension 0 of [256, 1100]") and "operators)" in head
    assert unpack_graph(pack_graph(rewritten.graph)) == rewritten.graph
    moved = rewritten.graph.reordered(tuple(range(len(rewritten.graph.ops))))
    assert moved.tiles == rewritten.graph.tiles


def test_chains_of_a_graph_in_halves_have_numbers_of_their_own() -> None:
    graph = language_step().graphs["step"]
    marked = replace(graph, ops=(replace(graph.ops[0], tile=Tile(3, "halves", 0, 1)), *graph.ops[1:]))
    rewritten = tile_chains(marked, find_chains(marked, FAT_BYTES), 4)
    numbers = [tile.chain for tile in rewritten.graph.tiles]
    assert len(numbers) > 1 and len(set(numbers)) == len(numbers) and min(n for n in numbers if n != 3) > 3


def test_what_is_put_together_from_tiles_has_the_label_of_the_operator_in_tiles() -> None:
    graph, rewritten = cut()
    before = {graph.label(s) for s, uses in enumerate(graph.uses) if uses}
    made = [
        s
        for op in rewritten.graph.ops
        if op.name == RESERVED
        for s in {rewritten.graph.values[v].storage for v in op.outputs if v is not None}
    ]
    assert made and any(s < len(graph.storages) for s in made)
    for s in (s for s in made if s < len(graph.storages)):
        label = rewritten.graph.label(s)
        assert "empty" not in label and label.partition(" ")[0] == graph.label(s).partition(" ")[0]
        assert "," in label or label in before, "its shape is that of the whole"


def test_masks_are_drawn_whole_in_the_recorded_order() -> None:
    graph, rewritten = cut()
    before, after = (
        [[rewritten.graph.values[v].shape for v in op.outputs if v is not None] for op in g.ops if op.random]
        for g in (graph, rewritten.graph)
    )
    assert len(before) == 2 and before == after
    assert sum(v.dtype == "bool" for v in rewritten.graph.values) > sum(v.dtype == "bool" for v in graph.values)


# -- slips that must be found


def off_by_one(made: "tiles._TileRewriter", value: Value, d: int, tile: int, s: int | None = None) -> Value:
    """Let the second tile of a view begin a row too early."""
    found = _CUT(made, value, d, tile, s)
    if s is None and found.storage == value.storage and tile == 1:
        return replace(found, offset=found.offset - value.stride[d])
    return found


_CUT: Callable[..., Value] = tiles._TileRewriter._cut


def test_a_boundary_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles._TileRewriter, "_cut", off_by_one)
    graph, rewritten = cut()
    assert differing(graph, rewritten)


def test_a_mask_drawn_per_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a mask in another order than the whole's have the same numbers at other places."""
    graph, _ = cut()
    chains = [c for c in find_chains(graph, FAT_BYTES) if c.drawn]
    assert chains
    draw = tiles._TileRewriter._draw

    def per_slice(made: tiles._TileRewriter, op: Op) -> None:
        draw(made, op)
        drawn = made.builder.ops.pop()
        mask = made.masks[next(reversed(made.masks))]
        for tile in reversed(range(len(made.bounds))):
            part = made.builder.value(made._cut(mask, 0, tile))
            made.builder.add(replace(drawn, args=(Ref(part), *drawn.args[1:]), outputs=(part,)))

    monkeypatch.setattr(tiles._TileRewriter, "_draw", per_slice)
    assert differing(graph, tile_chains(graph, chains, 4))


def test_a_misaligned_start_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of one row, and elements that no vector is filled with, are computed by other kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(61, 300), nn.Tanh(), nn.Linear(300, 61), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(96, 61),)).graphs["step"]
    chains = find_chains(graph, 100_000)
    assert chains
    assert differing(graph, tile_chains(graph, chains, 96)) == ()
    monkeypatch.setattr(tiles, "min_rows", lambda *_: 1)
    assert differing(graph, tile_chains(graph, chains, 96))


def test_a_batch_of_one_sequence_is_cut_although_its_first_dimension_is_one_element() -> None:
    """Language models cast the product of the head, [1, tokens, classes], whose first stride spans all tokens."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(500, 64, dtype=torch.bfloat16), nn.Linear(64, 500, bias=False, dtype=torch.bfloat16)
    model, ids = nn.Sequential(embed, head), torch.randint(0, 500, (1, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids).float().view(-1, 500), ids.view(-1))

    graph = capture_step(model, loss, optimizer, (ids,)).graphs["step"]
    chains = [c for c in find_chains(graph, 150_000) if c.loss is not None]
    assert chains and any("_to_copy" in graph.ops[i].name for i in chains[0].cut)
    casts = [i for i in chains[0].cut if "_to_copy" in graph.ops[i].name]
    begun = replace(
        chains[0],
        ops=tuple(i for i in chains[0].ops if i >= casts[0]),
        cut={i: d for i, d in chains[0].cut.items() if i >= casts[0]},
    )
    for chain in (chains[0], begun):  # the product whole, as where its weight lies in blocks
        rewritten = tile_chains(graph, [chain], 4)
        assert rewritten.replacements and differing(graph, rewritten) == ()


def test_bounds_are_even_and_none_is_short() -> None:
    assert even_bounds(256, 4, 16) == ((0, 64), (64, 128), (128, 192), (192, 256))
    assert even_bounds(100, 8, 16) == ((0, 16), (16, 32), (32, 48), (48, 64), (64, 80), (80, 100))
    assert even_bounds(24, 5, 1) == ((0, 4), (4, 9), (9, 14), (14, 19), (19, 24))
    assert even_bounds(10, 4, 16) == ((0, 10),)
