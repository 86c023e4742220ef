"""Which chains run in tiles: long chains in parts, kinds of chains, what may be changed about a cut."""

import pytest

from port_planner.exactness.replacements import differing
from port_planner.ir.graph import StepGraph
from port_planner.operators import base_name
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains, split_chains, touched_bytes
from port_planner.tiling.tilings import Tiling, first_tilings, kinds, other_counts, tile_fat
from tests.planner.tiling.language_step import language_step

FAT_BYTES = 140_000


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


@pytest.fixture
def graph() -> StepGraph:
    return language_step().graphs["step"]


def test_a_long_chain_is_split_where_little_passes(graph: StepGraph) -> None:
    chains = find_chains(graph, 60_000)
    parts = split_chains(graph, chains, FAT_BYTES)
    assert len(parts) > len(chains)
    assert [i for part in parts for i in part.ops] == sorted({i for part in parts for i in part.ops})
    within = {i for chain in chains for i in chain.ops}
    for part in (part for part in parts if part not in chains):
        assert set(part.ops) <= within
        assert (
            sum(touched_bytes(graph, i) > FAT_BYTES or i == part.loss for i in (*part.cut, part.loss) if i is not None)
            > 1
        )
        made = {s for i in part.ops for s in graph.creates[i]}
        drawn = {s for i in part.drawn for s in graph.ops[i].writes}
        assert drawn <= made, "a mask is made where it is drawn"
    assert split_chains(graph, chains, 0) == chains, "where something passes everywhere, nothing is split"


def test_a_step_cut_at_narrow_places_has_the_same_bits(graph: StepGraph) -> None:
    parts = split_chains(graph, find_chains(graph, 60_000), FAT_BYTES)
    rewritten = Tiling(tuple((part, 2 + n % 3) for n, part in enumerate(parts))).applied(graph)
    assert rewritten.replacements
    assert differing(graph, rewritten) == ()


def test_kinds_are_chains_alike_and_a_change_of_one_leaves_the_others(graph: StepGraph) -> None:
    cut = tile_fat(graph, 280_000, 4)
    alike = kinds(graph, cut.applied(graph))
    touched = [sum(touched_bytes(graph, i) for i in ops) for ops in alike]
    assert len(alike) == 3 and touched == sorted(touched, reverse=True)
    head, *others = alike
    assert any(base_name(graph.ops[i].name) == "nll_loss_forward" for i in head)
    changed = cut.changed(head, 1)
    assert changed.count(head) == 1 and all(changed.count(ops) == 4 for ops in others)
    assert kinds(graph, changed.applied(graph)) == others
    assert kinds(graph, cut.changed(head, 8).applied(graph))[0] == head


def test_a_cut_split_at_an_operator_leaves_it_whole_and_the_rest_in_as_many_tiles(graph: StepGraph) -> None:
    cut = tile_fat(graph, 280_000, 4)
    head = next(chain for chain, _ in cut.counted if chain.loss is not None)
    product = next(i for i in head.cut if base_name(graph.ops[i].name) in ("mm", "addmm"))
    split = cut.split(graph, product)
    assert split.count([product]) == 1 and split.count([head.ops[-1]]) == 4
    assert {chain.ops for chain, _ in cut.counted} - {head.ops} <= {chain.ops for chain, _ in split.counted}
    assert differing(graph, split.applied(graph)) == ()


def test_ways_to_begin_with_follow_the_room_and_the_fattest_operator(graph: StepGraph) -> None:
    fattest = max(touched_bytes(graph, i) for i in range(len(graph.ops)))
    assert first_tilings(graph, fattest) == [
        (fattest // 3, 4),
        (fattest // 6, 8),
        (fattest // 12, 16),
        (fattest // 6, 2),
        (fattest // 6, 4),
    ]
    assert first_tilings(graph, 100 * fattest) == [(fattest // 6, 2), (fattest // 6, 4)], (
        "what is never short of room is cut finely"
    )


def test_other_numbers_of_tiles() -> None:
    assert other_counts(1) == (2,) and other_counts(2) == (1, 4) and other_counts(8) == (1, 4, 16)
