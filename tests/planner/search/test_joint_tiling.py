"""The joint model's cut beside all cuts: nearly the best, whole where nothing is short, nothing where nothing fits."""

import itertools
import math

import pytest

from port_planner.ir.costs import CostTable, OpCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search import joint_tiling
from port_planner.search.floor import floor_of
from port_planner.search.joint_tiling import solve_tiling
from port_planner.search.plan_step import base_joules, plan_step
from port_planner.tiling import stage_groups, tiles
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.tile_costs import tile_costs
from port_planner.tiling.tilings import Tiling, kinds, tile_fat
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_step

FAT_BYTES = 280_000


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)


@pytest.fixture
def graph() -> StepGraph:
    return language_step().graphs["step"]


def by_bytes(graph: StepGraph) -> CostTable:
    """Return costs by what operators touch, and something for each call."""
    seconds = [1e-5 + touched_bytes(graph, i) / 2e9 for i in range(len(graph.ops))]
    return CostTable(costs_of(graph).device, tuple(OpCost(s, 0, s) for s in seconds))


def joules(graph: StepGraph, cut: Tiling, ram_bytes: int) -> float:
    """Return the cost of a quick plan of the graph with this tiling; infinite if no plan exists."""
    costs, rewritten = by_bytes(graph), cut.applied(graph)
    estimated = CostTable(costs.device, tile_costs(graph, costs.ops, rewritten))
    plan = plan_step(rewritten.graph, estimated, ram_bytes=ram_bytes, strategy="greedy").plan
    return math.inf if plan is None else base_joules(estimated) + plan.overhead_joules


@pytest.mark.long
@pytest.mark.parametrize("spare_bytes", [-200_000, 0, 400_000])
def test_the_joint_cut_is_nearly_the_best_of_all(graph: StepGraph, spare_bytes: int) -> None:
    costs, cut = by_bytes(graph), tile_fat(graph, FAT_BYTES, 4)
    ram_bytes = floor_of(graph, costs).nbytes + spare_bytes
    alike = kinds(graph, cut.applied(graph))
    every = list[float]()
    for counts in itertools.product((1, 4), repeat=len(alike)):
        other = cut
        for ops, count in zip(alike, counts, strict=True):
            other = other.changed(ops, count)
        every.append(joules(graph, other, ram_bytes))
    found = solve_tiling(graph, costs, ram_bytes, cut, 10.0)
    assert found is not None
    assert joules(graph, found, ram_bytes) <= 1.15 * min(every)


@pytest.mark.slow
def test_with_room_for_all_nothing_is_cut(graph: StepGraph) -> None:
    costs, cut = by_bytes(graph), tile_fat(graph, FAT_BYTES, 4)
    kept = lower(graph, costs, Plan(), check_budget=False).peak_bytes
    found = solve_tiling(graph, costs, kept, cut, 10.0)
    assert found is not None and {count for _, count in found.counted} == {1}


def test_where_no_cut_fits_there_is_none(graph: StepGraph) -> None:
    costs, cut = by_bytes(graph), tile_fat(graph, FAT_BYTES, 4)
    assert solve_tiling(graph, costs, floor_of(graph, costs).nbytes // 20, cut, 10.0) is None


def test_chains_too_short_to_be_cut_stay_whole_without_a_solver(
    graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_tiling, "Formulation", None)
    monkeypatch.setattr(stage_groups, "COUNTS", (1,))
    costs, cut = by_bytes(graph), tile_fat(graph, FAT_BYTES, 4)
    assert solve_tiling(graph, costs, 1 << 30, cut, 10.0) == cut.changed_all(1)
