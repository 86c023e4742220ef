"""Graphs of further shapes in tiles: only where they have no room whole, at the places of the first shape's."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.prepare.further_shapes import tiled_like, with_further_shapes
from port_agent.prepare.tiling import comparing, tiling_search
from port_agent.prepare.tiling.choice import choose_tiling
from port_agent.prepare.tiling.comparing import tiled_with
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, CutTarget, TiledJob
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import CostTable, OpCost
from port_planner.ir.graph import StepGraph, structure
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import Bucket, TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.floor import floor_of
from port_planner.tiling import tiles
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.tilings import tile_fat
from tests.agent.exactness import OPTIMIZERS
from tests.planner.steps import costs_of
from tests.planner.tiling.language_step import language_batch, language_loss, language_model

ROOM = ComparisonLimits(1 << 30, Path("/var/tmp"), 1)
FAT_BYTES = 280_000


def by_bytes(graph: StepGraph) -> tuple[OpCost, ...]:
    seconds = [1e-5 + touched_bytes(graph, i) / 2e9 for i in range(len(graph.ops))]
    return tuple(OpCost(s, 0, s) for s in seconds)


def recorded(shares: Iterable[tuple[int, int]]) -> TiledJob:
    """Return a language model's step and those of further shapes: rows and lengths, in such parts of the first."""
    model, columns = language_model(), language_batch(0)
    further = [Bucket([c[: len(c) // r, : c.shape[1] // n] for c in columns], len(columns[0]) // r) for r, n in shares]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job = TrainingJob(model, language_loss, optimizer, columns, len(columns[0]), buckets=further)
    captured = make_bundle.prepare(job)
    return TiledJob(captured, MeasuredCosts(tuple(map(by_bytes, captured.graphs.values())), 0, 0), ())


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    monkeypatch.setattr(comparing, "compared", lambda pairs, _: ((),) * len(pairs))

    def measured(made: list[TiledJob], *_: Any) -> list[TiledJob]:
        return [
            replace(s, measured=MeasuredCosts(tuple(map(by_bytes, s.captured.graphs.values())), 0, 0)) for s in made
        ]

    monkeypatch.setattr(comparing, "with_operator_costs", measured)


@pytest.mark.slow
def test_the_first_shape_is_tried_in_tiles_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling_search, "first_tilings", lambda *_: [(FAT_BYTES, 4)])
    whole = recorded([(2, 1)])
    graph = whole.captured.graphs["step"]
    device = costs_of(graph, base=1 << 20).device
    ram_bytes = floor_of(graph, CostTable(device, whole.measured.ops[0])).nbytes
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)
    found = choose_tiling(whole, whole, CutTarget(device, ram_bytes, ROOM, lambda *_: None), quick, NO_LIMITS)
    assert found.tilings.keys() == {"step"} == found.untiled.keys() and found.untiled["step"] is graph
    assert found.captured.graphs["step#1"] is whole.captured.graphs["step#1"]


@pytest.mark.slow
def test_what_has_no_room_whole_is_cut_at_the_same_places() -> None:
    whole = recorded([(2, 1), (8, 2)])
    graphs = whole.captured.graphs
    device = costs_of(graphs["step"], base=1 << 20).device
    (tiling,) = tiled_with(whole, [{"step": tile_fat(graphs["step"], FAT_BYTES, 4)}], ROOM, 1.0, lambda *_: None)
    kept = [lower(g, CostTable(device, by_bytes(g)), Plan(), check_budget=False).peak_bytes for g in graphs.values()]
    assert kept[0] > kept[1] > kept[2]
    found = with_further_shapes(tiling, device, kept[2], ROOM, lambda *_: None)
    assert found.tilings.keys() == {"step", "step#1"} and found.captured.graphs["step#2"] is graphs["step#2"]
    assert (
        len(found.tiled_chains) == 2 * len(tiling.tiled_chains)
        and found.captured.graphs["step"] is tiling.captured.graphs["step"]
    )
    assert structure(found.captured.graphs["step#1"]) == structure(found.captured.graphs["step"])
    assert [len(table) for table in found.measured.ops] == [len(g.ops) for g in found.captured.graphs.values()]
    assert with_further_shapes(tiling, device, kept[1], ROOM, lambda *_: None) is tiling
    assert with_further_shapes(whole, device, 0, ROOM, lambda *_: None) is whole


@pytest.mark.slow
def test_a_step_of_other_operators_is_cut_where_it_is_as_fat() -> None:
    whole = recorded([(2, 1)])
    one, other = whole.captured.graphs.values()
    tiling = tile_fat(one, FAT_BYTES, 4)
    assert tiled_like(other, one, tiling) is tiling
    unlike = replace(other, ops=other.ops[:-1])
    assert {count for _, count in tiled_like(unlike, one, tiling).counted} <= {4}
    assert tiled_like(unlike, one, tiling) != tiling
