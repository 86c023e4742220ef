"""Frozen weights in blocks: the bits of the whole, under random plans too; a slip in a boundary or a start is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import Capture, Fill, capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.bundle.manifest import TensorLayout
from port_planner.ir.graph import StepGraph, Value, verify_graph
from port_planner.ir.lowering.update_slices import update_groups
from port_planner.ir.operands.verify import verify_operands
from port_planner.search.floor import floor_of
from port_planner.tiling import blocks
from port_planner.tiling.blocks import COLUMNS, ROWS, Block, blocks_of, large_weights, read_in_blocks
from port_planner.tiling.chains import find_chains
from port_planner.tiling.rewriting import GraphBuilder, RewrittenGraph, compacted
from port_planner.tiling.tiles import tile_chains
from tests.agent.exactness import OPTIMIZERS, Outcome, differences, plain, planned, random_plan
from tests.planner.steps import costs_of, tiny_step
from tests.planner.tiling.adapted_step import (
    CLASSES,
    WIDTH,
    adapted_batch,
    adapted_loss,
    adapted_model,
    adapted_step,
    trained,
)
from tests.planner.tiling.language_step import language_step
from tests.planner.tiling.table_step import reader, reader_batch, reader_loss

MIN_BYTES = 100_000
NAME = "embed.weight"


def step(dtype: torch.dtype = torch.float32) -> StepGraph:
    return adapted_step(dtype).graphs["step"]


def chosen(graph: StepGraph, count: int) -> dict[str, dict[int, tuple[Block, ...]]]:
    return {weight.name: blocks_of(weight, count) for weight in large_weights([graph], MIN_BYTES)}


def blocked(count: int = 5, dtype: torch.dtype = torch.float32) -> tuple[StepGraph, RewrittenGraph]:
    graph = step(dtype)
    return graph, read_in_blocks(graph, chosen(graph, count))


def test_a_frozen_weight_that_is_embedding_and_head_is_found_and_read_both_ways() -> None:
    (weight,) = large_weights([step()], MIN_BYTES)
    assert (weight.name, weight.shape, weight.dimensions) == (NAME, (CLASSES, WIDTH), {ROWS, COLUMNS})
    cut = blocks_of(weight, 3)
    assert [(b.begin, b.end) for b in cut[ROWS]] == [(0, 320), (320, 656), (656, 1000)]
    assert [(b.suffix, b.begin, b.end) for b in cut[COLUMNS]] == [
        ("#columns/0", 0, 32),
        ("#columns/1", 32, 64),
        ("#columns/2", 64, 96),
    ]


def test_weights_that_are_read_in_another_way_stay_whole() -> None:
    assert {w.name for w in large_weights([tiny_step().graphs["step"]], 1)} == {"11.weight"}  # convolutions are none
    graph = step()
    (s,) = (s for s, storage in enumerate(graph.storages) if storage.name == NAME)
    read = next(i for i in graph.uses[s] if graph.ops[i].name == "aten::mm")
    doubled = replace(graph.ops[read], name="aten::add.Tensor")
    other = replace(graph, ops=(*graph.ops[:read], doubled, *graph.ops[read + 1 :]))
    assert large_weights([graph, other], MIN_BYTES) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_have_the_bits_of_the_whole_and_the_graph_stays_one(dtype: torch.dtype) -> None:
    for count in (2, 3, 6):
        graph, rewritten = blocked(count, dtype)
        small = compacted(rewritten.graph)
        verify_graph(small)
        verify_operands(small)
        assert differing(graph, rewritten) == ()
        names = {storage.name for storage in small.storages}
        assert NAME not in names and f"{NAME}#rows/{count - 1}" in names
        assert [tile.count for tile in small.tiles] == [count] * 3
        assert len(rewritten.replacements) == 3


def test_a_head_with_a_bias_and_an_input_of_three_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 640))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(3, 17, 64),)).graphs["step"]
    rewritten = read_in_blocks(graph, chosen(graph, 4))
    assert sorted(r.what for r in rewritten.replacements) == [
        "addmm with 1.weight by rows in 4 blocks",
        "mm with 1.weight by columns in 4 blocks",
    ]
    assert differing(graph, rewritten) == ()


def started_in_blocks(capture: Capture, rewritten: RewrittenGraph) -> Capture:
    """Return a step with its tensors in blocks, and what these start from."""
    whole = capture.graphs["step"]
    tensors, layouts = dict(capture.tensors), dict(capture.layouts)
    for s, value in rewritten.sources.items():
        key, source = rewritten.graph.storages[s].key, tensors[whole.storages[value.storage].key]
        layouts[key] = TensorLayout(value.dtype, value.shape, (value.shape[1], 1))
        if isinstance(source, Fill):
            tensors[key] = replace(source, shape=value.shape)
        else:
            tensors[key] = torch.as_strided(source.detach(), value.shape, value.stride, value.offset).clone()
    return replace(capture, graphs={"step": compacted(rewritten.graph)}, tensors=tensors, layouts=layouts)


def in_capture(count: int) -> Capture:
    return started_in_blocks(adapted_step(), blocked(count)[1])


def put_together(found: Outcome) -> Outcome:
    """Return the same with every tensor in blocks made of its rows."""
    whole: dict[str, list[torch.Tensor]] = {}
    for key, tensor in sorted(found.contents.items()):
        if "#columns/" not in key:
            whole.setdefault(key.partition("#")[0], []).append(tensor)
    return replace(found, contents={k: torch.cat(t) if len(t) > 1 else t[0] for k, t in whole.items()})


@pytest.mark.slow
def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    batches = [adapted_batch(i) for i in range(2)]
    expected = plain_of_adapted(batches)
    capture = in_capture(4)
    for seed in range(3):
        plan = random_plan(capture.graphs["step"], seed)
        actual = planned(capture, {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, put_together(actual)), seed


def plain_of_adapted(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Outcome:
    def only_trained(parameters: object) -> torch.optim.Optimizer:
        return OPTIMIZERS["adamw"](p for p in parameters if p.requires_grad)  # type: ignore[attr-defined]

    return plain(adapted_model(), adapted_loss, only_trained, batches)


def test_the_floor_is_no_more_the_weight() -> None:
    graph, rewritten = blocked(6)
    small = compacted(rewritten.graph)
    apart = {s.key for s in small.storages if "#" in s.name}

    def floor(of: StepGraph, kept: set[str]) -> int:
        cut = tile_chains(of, find_chains(of, 50_000, kept), 4).graph
        return floor_of(cut, costs_of(cut)).nbytes

    whole, without = floor(graph, set()), floor(small, apart)
    assert without < whole - CLASSES * WIDTH * 4 / 5


def test_no_chain_takes_what_reads_a_block() -> None:
    small = compacted(blocked(6)[1].graph)
    apart = {s.key for s in small.storages if "#" in s.name}
    readers = {i for s, storage in enumerate(small.storages) if storage.key in apart for i in small.uses[s]}
    taken = {i for chain in find_chains(small, 50_000, apart) for i in chain.ops}
    assert taken and readers.isdisjoint(taken)
    assert not readers.isdisjoint({i for chain in find_chains(small, 50_000) for i in chain.ops})


# -- slips that must be found


@pytest.mark.parametrize("way", [ROWS, COLUMNS])
def test_a_boundary_off_by_one_is_found(way: int) -> None:
    graph, rewritten = blocked()
    name = f"{NAME}#{'rows' if way == ROWS else 'columns'}/1"
    (s,) = (s for s, storage in enumerate(rewritten.graph.storages) if storage.name == name)
    source = rewritten.sources[s]
    early = replace(source, offset=source.offset - source.stride[way])
    assert differing(graph, replace(rewritten, sources={**rewritten.sources, s: early}))


def test_an_index_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    number: Callable[..., int] = blocks._BlockRewriter._number

    def late(made: blocks._BlockRewriter, op: object, name: str, v: int, n: int, dtype: str | None = None) -> int:
        return number(made, op, name, v, n + (name == "ge.Scalar"), dtype)

    monkeypatch.setattr(blocks._BlockRewriter, "_number", late)
    graph, rewritten = blocked()
    assert [d.replacement.what.partition(" ")[0] for d in differing(graph, rewritten)] == ["embedding"]


def test_blocks_too_narrow_for_the_kernel_of_the_whole_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PRODUCT_ROWS", 1)
    graph, rewritten = blocked(WIDTH)
    assert {d.replacement.what.partition(" ")[0] for d in differing(graph, rewritten)} == {"mm"}


def test_copies_to_a_misaligned_start_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Callable[..., int] = GraphBuilder.value

    def shifted(builder: GraphBuilder, value: Value) -> int:
        columns = len(value.shape) == 2 and value.stride == (CLASSES, 1) and value.offset
        return known(builder, replace(value, offset=value.offset - 1) if columns else value)

    monkeypatch.setattr(GraphBuilder, "value", shifted)
    graph, rewritten = blocked()
    assert differing(graph, rewritten)


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_an_index_that_is_no_row_is_refused_as_by_the_whole(wrong: int, tmp_path: Path) -> None:
    ids, labels = adapted_batch(0)
    ids[1, 3] = wrong
    capture = in_capture(4)
    with pytest.raises(IndexError, match="out of range"):
        planned(capture, {"step": random_plan(capture.graphs["step"], 0)}, [(ids, labels)], tmp_path)


# -- a table that is trained


def reader_step(optimizer: str) -> Capture:
    model = reader()
    return capture_step(model, reader_loss, OPTIMIZERS[optimizer](model.parameters()), reader_batch(0))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_trained_table_its_state_and_gradient_exist_in_rows_alone(optimizer: str) -> None:
    graph = reader_step(optimizer).graphs["step"]
    (weight,) = large_weights([graph], MIN_BYTES)
    assert weight.dimensions == {ROWS} and len(weight.states) == (2 if optimizer == "adamw" else 1)
    rewritten = read_in_blocks(graph, {weight.name: blocks_of(weight, 5)})
    small = compacted(rewritten.graph)
    verify_graph(small)
    verify_operands(small)
    assert differing(graph, rewritten) == ()
    rows = max(block.end - block.begin for block in blocks_of(weight, 5)[ROWS]) + 2
    assert max(storage.nbytes for storage in small.storages) == rows * WIDTH * 4
    assert len(update_groups(small)) == len(update_groups(graph)) + 4
    assert floor_of(small, costs_of(small)).nbytes < floor_of(graph, costs_of(graph)).nbytes / 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_it_trains_as_plain_pytorch_does_under_random_plans(optimizer: str, tmp_path: Path) -> None:
    batches = [reader_batch(i) for i in range(3)]
    expected = plain(reader(), reader_loss, OPTIMIZERS[optimizer], batches)
    capture = reader_step(optimizer)
    graph = capture.graphs["step"]
    chosen_blocks = {weight.name: blocks_of(weight, 4) for weight in large_weights([graph], MIN_BYTES)}
    capture = started_in_blocks(capture, read_in_blocks(graph, chosen_blocks))
    for seed in range(3):
        plan = random_plan(capture.graphs["step"], seed)
        actual = planned(capture, {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, put_together(actual)), seed


def test_rows_of_a_gradient_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reader_step("sgd").graphs["step"]
    chosen_blocks = {weight.name: blocks_of(weight, 5) for weight in large_weights([graph], MIN_BYTES)}
    rows: Callable[..., int] = blocks._BlockRewriter._rows_of_gradient

    def late(made: blocks._BlockRewriter, op: object, block: Block) -> int:
        return rows(made, op, replace(block, begin=block.begin + 1, end=block.end + 1) if block.begin else block)

    monkeypatch.setattr(blocks._BlockRewriter, "_rows_of_gradient", late)
    (found,) = differing(graph, read_in_blocks(graph, chosen_blocks))
    assert found.replacement.what.startswith("gradient and update of table.weight by rows")


def test_a_gradient_that_something_else_reads_keeps_the_table_whole() -> None:
    model = reader()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    capture = capture_step(model, reader_loss, optimizer, reader_batch(0), clip_grad_norm=1.0)
    assert large_weights(capture.graphs.values(), MIN_BYTES) == ()


# -- a weight that is trained, embedding and head in one


def tied() -> nn.Module:
    model = adapted_model()
    return model.requires_grad_(True)


def tied_step(optimizer: str, rows: int | None = None) -> Capture:
    model, stateless = tied(), {"plain": lambda p: torch.optim.SGD(p, lr=0.1)}
    made = {**OPTIMIZERS, **stateless}[optimizer](model.parameters())
    ids, labels = adapted_batch(0)
    return capture_step(model, adapted_loss, made, (ids[:rows], labels[:rows]))


def tied_in_blocks(graph: StepGraph, count: int, columns: int) -> RewrittenGraph:
    (weight,) = large_weights([graph], MIN_BYTES)
    return read_in_blocks(graph, {weight.name: blocks_of(weight, count, columns)})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain"])
def test_a_trained_head_that_is_the_embedding_too_exists_in_rows_alone(optimizer: str) -> None:
    graph = tied_step(optimizer, rows=2).graphs["step"]
    (weight,) = large_weights([graph], MIN_BYTES)
    assert (weight.name, weight.dimensions, weight.trained) == (NAME, {ROWS, COLUMNS}, True)
    assert [block.stored for block in blocks_of(weight, 5, 1)[COLUMNS]] == [False]
    for columns in (1, 3):
        rewritten = tied_in_blocks(graph, 5, columns)
        small = compacted(rewritten.graph)
        verify_graph(small)
        verify_operands(small)
        assert differing(graph, rewritten) == ()
        assert sorted(r.what for r in rewritten.replacements) == [
            f"embedding with {NAME} by rows in 5 blocks",
            f"gradient and update of {NAME} by rows in 5 blocks",
            f"mm with {NAME} by columns in {columns} blocks",
            f"mm with {NAME} by rows in 5 blocks",
        ]
        assert not any("#columns" in storage.name for storage in small.storages)
    least, whole = floor_of(small, costs_of(small)), floor_of(graph, costs_of(graph))
    assert least.nbytes < whole.nbytes * 0.6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_tied_weight_trains_as_plain_pytorch_does_under_random_plans(optimizer: str, tmp_path: Path) -> None:
    batches = [adapted_batch(i) for i in range(3)]
    expected = plain(tied(), adapted_loss, OPTIMIZERS[optimizer], batches)
    capture = tied_step(optimizer)
    capture = started_in_blocks(capture, tied_in_blocks(capture.graphs["step"], 4, 2))
    for seed in range(3):
        plan = random_plan(capture.graphs["step"], seed)
        actual = planned(capture, {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, put_together(actual)), seed


def test_a_head_of_its_own_is_trained_in_rows() -> None:
    graph = language_step().graphs["step"]
    (weight,) = (w for w in large_weights([graph], MIN_BYTES) if w.name == "head.weight")
    rewritten = read_in_blocks(graph, {weight.name: blocks_of(weight, 4, 2)})
    assert {r.what.partition(" ")[0] for r in rewritten.replacements} == {"mm", "gradient"}
    assert differing(graph, rewritten) == ()


def test_rows_of_a_product_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Callable[..., int] = blocks._BlockRewriter._rows_of_product

    def late(made: blocks._BlockRewriter, op: object, block: Block) -> int:
        return rows(made, op, replace(block, begin=block.begin - 1, end=block.end - 1) if block.begin else block)

    monkeypatch.setattr(blocks._BlockRewriter, "_rows_of_product", late)
    graph = tied_step("sgd").graphs["step"]
    (found,) = differing(graph, tied_in_blocks(graph, 5, 1))
    assert found.replacement.what.startswith("gradient and update")


@pytest.mark.parametrize("slip", ["rows", "columns"])
def test_columns_put_together_of_a_misaligned_start_are_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together: Callable[..., Value] = blocks._BlockRewriter._put_together

    def off_by_one(made: blocks._BlockRewriter, op: object, block: Block, value: Value) -> Value:
        if slip == "columns" and block.begin:
            block = replace(block, begin=block.begin - 1, end=block.end - 1)
        first = len(made.builder.ops)
        found = together(made, op, block, value)
        if slip == "rows":
            del made.builder.ops[first + 1]  # of the first rows none comes in
        return found

    monkeypatch.setattr(blocks._BlockRewriter, "_put_together", off_by_one)
    graph = tied_step("sgd").graphs["step"]
    (found,) = differing(graph, tied_in_blocks(graph, 5, 2))
    assert found.replacement.what.startswith(f"mm with {NAME} by columns")


@pytest.mark.parametrize("changed", ["clipped", "accumulated"])
def test_gradients_that_outlive_their_update_or_are_read_before_keep_the_weight_whole(changed: str) -> None:
    model = tied()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    more = {"clip_grad_norm": 1.0} if changed == "clipped" else {"accumulate": 2}
    capture = capture_step(model, adapted_loss, optimizer, adapted_batch(0), **more)
    assert large_weights(capture.graphs.values(), MIN_BYTES) == ()


class Projected(nn.Module):
    """A weight [in, out], as GPT-2's Conv1D has it, that only products with itself read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 640) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def test_a_trained_weight_that_is_read_by_columns_alone_lies_in_rows_all_the_same() -> None:
    torch.manual_seed(0)
    model = Projected()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    graph = capture_step(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(32, 64),)).graphs["step"]
    (weight,) = large_weights([graph], MIN_BYTES)
    assert weight.dimensions == {ROWS, COLUMNS} and weight.trained
    rewritten = read_in_blocks(graph, {weight.name: blocks_of(weight, 4, 4)})
    assert len(rewritten.replacements) == 2 and differing(graph, rewritten) == ()
