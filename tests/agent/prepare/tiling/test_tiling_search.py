"""What is looked at, compared and planned of the ways to cut a step, and what is not."""

import math
from dataclasses import replace
from typing import Any

import pytest

from port_agent.prepare.tiling import choice, comparing
from port_agent.prepare.tiling import tiling_search as ways_to_cut
from port_agent.prepare.tiling.tiled_job import CutTarget, TiledJob, cost_of_plan, main_step
from port_agent.prepare.tiling.tiling_search import TilingSearch
from port_planner import make_bundle
from port_planner.ir.costs import CostTable, OpCost
from port_planner.ir.graph import StepGraph
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.floor import floor_of
from port_planner.search.plan_step import PlanResult
from port_planner.tiling import tiles
from port_planner.tiling.tilings import tile_fat
from tests.agent.prepare.tiling.small_jobs import GREEDY, ROOM, chosen, ops_by_bytes, whole
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_step


def with_costs_by_bytes(made: list[TiledJob], factor: int = 1) -> list[TiledJob]:
    """Return jobs whose operators cost what their bytes do, times `factor`."""
    tables = [
        tuple(replace(op, joules=factor * op.joules) for op in ops_by_bytes(tiled.captured.graphs["step"]))
        for tiled in made
    ]
    return [replace(s, measured=MeasuredCosts((ops,), 0, 0)) for s, ops in zip(made, tables, strict=True)]


@pytest.mark.slow
def test_a_change_is_planned_once_and_not_where_it_takes_no_less_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    ram_bytes = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes + (1 << 19)
    planned = list[int]()

    def quick(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
        planned.append(len(graph.ops))
        return GREEDY(graph, costs, ram_bytes)

    candidates = TilingSearch(
        recorded, recorded, CutTarget(device, ram_bytes, ROOM, lambda *_: None), quick, 60.0, math.inf
    )
    uniform = tile_fat(graph, 280_000, 4)
    start, finer = {"step": uniform}, {"step": uniform.changed(range(len(graph.ops)), 8)}
    assert candidates._better([start], start, 4) == []
    assert planned == []
    found = candidates._better([start, finer], start, 4)
    assert planned == [len(candidate["step"].applied(graph).graph.ops) for candidate in (start, finer)]
    assert candidates._better([finer], start, 4) == found
    assert len(planned) == 2


@pytest.mark.slow
def test_a_graph_of_many_times_the_operators_is_measured_only_where_no_shorter_one_has_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [(280_000, 2), (280_000, 8)])
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: ((),) * len(pairs))
    graph = language_step().graphs["step"]
    few, many = (len(tile_fat(graph, 280_000, n).applied(graph).graph.ops) for n in (2, 8))
    monkeypatch.setattr(ways_to_cut, "MANY_TIMES", (few + many) / 2 / len(graph.ops))
    measured = set[int]()

    def counted(made: list[TiledJob], *_: Any) -> list[TiledJob]:
        measured.update(len(tiled.captured.graphs["step"].ops) for tiled in made)
        return with_costs_by_bytes(made)

    monkeypatch.setattr(comparing, "with_operator_costs", counted)
    monkeypatch.setattr(TilingSearch, "plan_changes", lambda *_: None)
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    chosen(recorded, recorded, device, floor + (1 << 18))
    assert measured and max(measured) < (few + many) / 2
    measured.clear()
    finest = tile_fat(graph, 280_000, 8).applied(graph).graph
    floor = floor_of(finest, CostTable(device, ops_by_bytes(finest))).nbytes
    chosen(recorded, recorded, device, floor)
    assert max(measured) > (few + many) / 2, "two tiles do not fit, eight do"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joint", "cheap", "job"),
    [(1, True, []), (2, True, [2]), (2, False, [2, 4])],
    ids=["it leaves all whole", "it cuts", "its cut costs more than promised"],
)
def test_what_the_joint_model_cuts_is_tried_and_the_rest_only_where_that_failed(
    joint: int, cheap: bool, job: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [(280_000, 4)])
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: ((),) * len(pairs))
    monkeypatch.setattr(
        ways_to_cut, "solve_tiling", lambda graph, costs, ram_bytes, tiling, limit_s: tiling.changed_all(joint)
    )
    graph = language_step().graphs["step"]
    lengths = {len(tile_fat(graph, 280_000, n).applied(graph).graph.ops): n for n in (2, 4)}
    measured = list[int]()

    def counted(made: list[TiledJob], *_: Any) -> list[TiledJob]:
        graphs = [tiled.captured.graphs["step"] for tiled in made]
        measured.extend(lengths[len(made.ops)] for made in graphs)
        return with_costs_by_bytes(made, factor=1 if cheap else 10)

    monkeypatch.setattr(comparing, "with_operator_costs", counted)
    monkeypatch.setattr(TilingSearch, "plan_changes", lambda *_: None)
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    chosen(recorded, recorded, device, floor + (1 << 16))
    assert measured == job


@pytest.mark.slow
def test_what_does_not_fit_whatever_its_kernels_take_is_not_compared_and_the_least_floor_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [(280_000, 2), (280_000, 8)])
    asked = list[int]()
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: asked.append(len(pairs)) or ((),) * len(pairs))
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    untiled, finest = (
        floor_of(made, CostTable(device, tuple(OpCost(1e-4, 0, 1e-4) for _ in made.ops))).nbytes
        for made in (graph, tile_fat(graph, 280_000, 8).applied(graph).graph)
    )
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)
    candidates = TilingSearch(
        recorded, recorded, CutTarget(device, finest - 1, ROOM, lambda *_: None), quick, 60.0, math.inf
    )
    candidates.plan_starts()
    assert (sum(asked), candidates.best) == (0, None)
    monkeypatch.setattr(comparing, "with_operator_costs", lambda made, *_: with_costs_by_bytes(made))
    nearest = candidates.nearest()
    assert sum(asked) == 1, "what is named was compared"
    found = cost_of_plan(nearest, device, finest - 1, quick)
    names = floor_of(*main_step(nearest, device)).nbytes
    assert found is None and finest <= names < untiled


@pytest.mark.slow
def test_ways_that_are_near_are_worked_on_whatever_measuring_them_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing and measuring them had used up the time, and what came of it was thrown away."""
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    cuts_nothing = (1 << 40, 4)
    monkeypatch.setattr(ways_to_cut, "first_tilings", lambda *_: [cuts_nothing, (280_000, 4)])
    monkeypatch.setattr(ways_to_cut, "MAX_STARTS", 1)
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: ((),) * len(pairs))
    clock, measured = [0.0], list[int]()

    def slowly(made: list[TiledJob], *_: Any) -> list[TiledJob]:
        clock[0] += 10 * choice.MIN_SEARCH_S
        measured.append(len(made))
        return with_costs_by_bytes(made)

    monkeypatch.setattr(comparing, "with_operator_costs", slowly)
    for module in (ways_to_cut, choice):
        monkeypatch.setattr(module, "cpu_s", lambda: clock[0])
    graph = language_step().graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    recorded = TiledJob(replace(whole()[0], graphs={"step": graph}), MeasuredCosts((ops_by_bytes(graph),), 0, 0), ())
    floor = floor_of(graph, CostTable(device, recorded.measured.ops[0])).nbytes
    assert chosen(recorded, recorded, device, floor + (1 << 18)).tiled_chains
    assert len(measured) > 1 and all(measured), "the cut of the joint model, not one of nothing; then changes of it"
