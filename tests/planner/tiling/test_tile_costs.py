"""Estimates of operators in tiles: those left whole keep their costs, tiles take about what the whole did."""

import pytest

from port_planner.ir.costs import OpCost
from port_planner.ir.graph import StepGraph
from port_planner.tiling import tiles
from port_planner.tiling.tile_costs import tile_costs
from port_planner.tiling.tilings import tile_fat
from tests.planner.tiling.language_step import language_step

CALL_S = 1e-6


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


@pytest.fixture
def graph() -> StepGraph:
    return language_step().graphs["step"]


def _distinct(graph: StepGraph) -> list[OpCost]:
    """Return costs that tell operators apart; the first is the quickest."""
    return [OpCost(CALL_S + 1e-3 * i, 8 * i, 2e-3 * i) for i in range(len(graph.ops))]


def test_what_stays_whole_keeps_its_costs_and_tiles_take_what_the_whole_did_and_a_call(graph: StepGraph) -> None:
    costs = _distinct(graph)
    rewritten = tile_fat(graph, 280_000, 4).applied(graph)
    assert rewritten.replacements
    found = tile_costs(graph, costs, rewritten)
    assert len(found) == len(rewritten.graph.ops)
    old = {i for replacement in rewritten.replacements for i in replacement.old}
    new = {i for replacement in rewritten.replacements for i in replacement.new}
    kept = [i for i in range(len(graph.ops)) if i not in old]
    stayed = [i for i in range(len(found)) if i not in new]
    assert [found[i] for i in stayed] == [costs[i] for i in kept]
    assert [rewritten.graph.ops[i].name for i in stayed] == [graph.ops[i].name for i in kept]
    for replacement in rewritten.replacements:
        whole = sum(costs[i].seconds for i in replacement.old)
        taken = sum(found[i].seconds - CALL_S for i in replacement.new)
        assert 0.8 * whole < taken < 3 * whole, "what is put together is copied besides"
        most = max(costs[i].workspace_bytes for i in replacement.old)
        assert all(0 <= found[i].workspace_bytes <= most for i in replacement.new)


def test_nothing_in_tiles_costs_what_it_did(graph: StepGraph) -> None:
    costs = _distinct(graph)
    assert tile_costs(graph, costs, tile_fat(graph, 1 << 40, 4).applied(graph)) == tuple(costs)
