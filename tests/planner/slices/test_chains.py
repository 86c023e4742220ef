"""Chains begin and end at fat operators, stop where something needs the whole, and end with a loss."""

import itertools
import math

import pytest

from planner.ir.graph import Phase, operands
from planner.slices.algebra import base_name
from planner.slices.chains import MOST_THIN, find_chains, least_rows, touched_bytes, units_of
from tests.planner.slices.language_step import language_step

FAT_BYTES = 200_000


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
        assert max((b - a for a, b in itertools.pairwise(fat)), default=0) <= MOST_THIN + 1
        parts = [*chain.cut, *chain.before, *chain.drawn, *([] if chain.loss is None else [chain.loss])]
        assert sorted(parts) == list(chain.ops)


def test_the_loss_ends_the_forward_chain() -> None:
    graph = language_step().graphs["step"]
    (head,) = (c for c in find_chains(graph, FAT_BYTES) if c.loss is not None)
    names = [base_name(graph.ops[i]) for i in head.ops]
    assert names[-1] == "nll_loss_forward" and "_log_softmax" in names
    assert head.drawn  # dropout within


def test_nothing_in_a_chain_reads_whole_what_the_chain_makes_in_pieces() -> None:
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
        least = least_rows(graph, chain, units)
        for i, dims in chain.cut.items():
            if base_name(graph.ops[i]) in ("mm", "addmm"):
                assert all(graph.values[v].shape[d] // units * least >= 16 for v, d in dims.items())


def test_a_step_without_fat_operators_has_no_chain() -> None:
    assert find_chains(language_step().graphs["step"], 1 << 30) == []
