"""Chains begin and end at fat operators, stop where something needs the whole, and end with a loss."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.graph import Phase, Ref, StepGraph, operands, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.operators import base_name
from port_planner.tiling import tiles
from port_planner.tiling.algebra import tile_dimensions
from port_planner.tiling.chains import MAX_THIN, find_chains, min_rows, split_at, touched_bytes, units_of
from port_planner.tiling.tiles import tile_chains
from tests.planner.tiling.language_step import language_step

FAT_BYTES = 200_000


@pytest.mark.slow
def test_a_chain_goes_from_fat_to_fat_and_holds_no_operator_twice() -> None:
    graph = language_step().graphs["step"]
    seen: set[int] = set()
    for chain in find_chains(graph, FAT_BYTES):
        assert seen.isdisjoint(chain.ops)
        seen |= set(chain.ops)
        assert touched_bytes(graph, chain.ops[0]) > FAT_BYTES
        assert chain.ops[-1] == chain.loss or touched_bytes(graph, chain.ops[-1]) > FAT_BYTES
        assert {graph.ops[i].phase for i in chain.ops} in ({Phase.FORWARD}, {Phase.BACKWARD})
        fat = [k for k, i in enumerate(chain.ops) if touched_bytes(graph, i) > FAT_BYTES]
        assert max((b - a for a, b in itertools.pairwise(fat)), default=0) <= MAX_THIN + 1
        parts = [*chain.cut, *chain.before, *chain.drawn, *([] if chain.loss is None else [chain.loss])]
        assert sorted(parts) == list(chain.ops)


def test_the_loss_ends_the_forward_chain() -> None:
    graph = language_step().graphs["step"]
    (head,) = (c for c in find_chains(graph, FAT_BYTES) if c.loss is not None)
    names = [base_name(graph.ops[i].name) for i in head.ops]
    assert names[-1] == "nll_loss_forward" and "_log_softmax" in names
    assert head.drawn  # dropout within


@pytest.mark.slow
def test_a_chain_split_at_any_operator_has_the_same_bits_and_its_masks_stay_with_what_draws_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    graph = language_step().graphs["step"]
    chains = find_chains(graph, FAT_BYTES)
    (head,) = (c for c in chains if c.loss is not None)
    assert split_at(graph, head, head.ops[-1] + 1) == [head]
    split, kept = [], 0
    for op in head.ops:
        parts = split_at(graph, head, op)
        assert op not in {i for part in parts for i in part.ops}
        for part in parts:
            made = {s for i in part.ops for s in graph.creates[i]}
            assert {s for i in part.drawn for s in graph.ops[i].writes} <= made
        split.append(parts)
        kept += bool(parts)
    assert kept and not all(split), "what makes a mask and what draws it leave nothing"
    for parts in split:
        rewritten = tile_chains(graph, parts, 4)
        verify_operands(rewritten.graph)
        assert differing(graph, rewritten) == ()


def test_nothing_in_a_chain_reads_whole_what_the_chain_makes_in_tiles() -> None:
    graph = language_step().graphs["step"]
    for chain in find_chains(graph, FAT_BYTES):
        made = {s for i in chain.cut for s in graph.creates[i]}
        for i, dims in chain.cut.items():
            wholes = {graph.values[v].storage for v in operands(graph.ops[i]) if v not in dims}
            assert made.isdisjoint(wholes)


@pytest.mark.parametrize("fat_bytes", [100_000, 200_000, 1_000_000])
def test_every_dimension_that_is_cut_is_a_multiple_of_the_units(fat_bytes: int) -> None:
    graph = language_step().graphs["step"]
    chains = find_chains(graph, fat_bytes)
    units = units_of(graph, chains)
    sizes = [graph.values[v].shape[d] for c in chains for dims in c.cut.values() for v, d in dims.items()]
    assert units == math.gcd(*sizes) >= 8
    for chain in chains:
        least = min_rows(graph, chain, units)
        for i, dims in chain.cut.items():
            if base_name(graph.ops[i].name) in ("mm", "addmm"):
                assert all(graph.values[v].shape[d] // units * least >= 16 for v, d in dims.items())


def test_a_step_without_fat_operators_has_no_chain() -> None:
    assert find_chains(language_step().graphs["step"], 1 << 30) == []


def test_labels_that_are_a_part_of_more_are_cut_too() -> None:
    """The next token of a single sequence is its label: a view that begins one further."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(600, 32), nn.Linear(32, 600))

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        labels = functional.pad(ids, (0, 1), value=-100)[..., 1:]
        return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, loss, optimizer, (torch.randint(0, 600, (1, 64)),)).graphs["step"]
    chains = find_chains(graph, 100_000)
    (labelled,) = (c for c in chains if any(base_name(graph.ops[i].name) == "nll_loss_backward" for i in c.cut))
    assert "_log_softmax_backward_data" in {base_name(graph.ops[i].name) for i in labelled.cut}
    rewritten = tile_chains(graph, chains, 4)
    verify_operands(rewritten.graph)
    assert differing(graph, rewritten) == ()


class Deep(nn.Module):
    """Two wide products with an activation between them: in the backward pass the second one's update lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(functional.gelu(self.up(x)))[:8])


def deep_step() -> StepGraph:
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 64, requires_grad=True)
    return capture_step(model, lambda m, x: m(x * 2).square().mean(), optimizer, (x.detach(),)).graphs["step"]


def test_a_chain_runs_ahead_of_updates_that_lie_between() -> None:
    graph = deep_step()
    chains = find_chains(graph, 200_000)
    names = [[base_name(graph.ops[i].name) for i in chain.cut] for chain in chains]
    passed = {i for c in chains for i in range(c.ops[0], c.ops[-1]) if i not in c.ops}
    assert ["mm", "gelu_backward"] in names and any(graph.ops[i].phase is Phase.UPDATE for i in passed)
    for chain in chains:
        for i in (i for i in range(chain.ops[0], chain.ops[-1]) if i not in chain.ops):
            reads, changes = set(graph.reads[i]), {*graph.creates[i], *graph.ops[i].writes}
            for k in (k for k in chain.ops if k > i):
                written = {*graph.creates[k], *graph.ops[k].writes}
                assert changes.isdisjoint({*graph.reads[k], *written}) and reads.isdisjoint(written)
    rewritten = tile_chains(graph, chains, 4)
    verify_graph(rewritten.graph)
    verify_operands(rewritten.graph)
    assert differing(graph, rewritten) == ()


def test_what_needs_a_passed_update_ends_the_chain() -> None:
    """An operator that reads the weight once it is updated cannot run ahead of the update."""
    graph = deep_step()
    (chain,) = (
        c for c in find_chains(graph, 200_000) if "gelu_backward" in {base_name(graph.ops[i].name) for i in c.cut}
    )
    update = next(
        i for i in range(chain.ops[0], chain.ops[-1]) if graph.ops[i].phase is Phase.UPDATE and graph.ops[i].writes
    )
    (weight,) = graph.ops[update].writes
    product = graph.ops[chain.ops[0]]
    late = next(i for i in chain.ops if i > update)
    reading = replace(
        graph.ops[late], kwargs=(("after", next(a for a in graph.ops[update].args if isinstance(a, Ref))),)
    )
    other = replace(graph, ops=(*graph.ops[:late], reading, *graph.ops[late + 1 :]))
    assert weight in other.reads[late] and product in other.ops
    taken = {i for c in find_chains(other, 200_000) for i in c.ops if c.ops[0] < update}
    assert late not in taken


def test_an_operator_of_too_few_rows_for_two_tiles_is_not_cut() -> None:
    graph = deep_step()
    heads = [
        op for op in graph.ops if base_name(op.name) == "addmm" and graph.values[op.outputs[0] or 0].shape == (8, 4)
    ]
    assert heads and all(tile_dimensions(graph, op) is None for op in heads)
