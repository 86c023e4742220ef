"""Graphs compared in a process of its own: once, each by itself; each keeps its own costs."""

from dataclasses import replace

import pytest

from port_agent.prepare.measurement.dry_run import DryRunError
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.tiling.comparing import compared, tiled_with, with_operator_costs
from port_agent.prepare.tiling.tiled_job import TiledJob
from port_planner.exactness.replacements import Difference
from port_planner.ir.costs import OpCost
from port_planner.ir.graph import StepGraph
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling import tiles
from port_planner.tiling.gradients import split_gradients_by_mask
from port_planner.tiling.rewriting import RewrittenGraph
from port_planner.tiling.tilings import tile_fat
from tests.agent.prepare.tiling.small_jobs import ROOM, whole
from tests.planner.tiling.language_step import language_step

MM = "aten::mm"


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_a_comparison_that_ends_otherwise_is_an_error() -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients_by_mask(graph)
    damaged = replace(rewritten.graph, storages=rewritten.graph.storages[:-1])
    with pytest.raises(DryRunError, match="comparing tiled operators ended"):
        compared([(graph, replace(rewritten, graph=damaged))], ROOM)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_graphs_are_compared_in_one_process_each_by_itself() -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients_by_mask(graph)
    assert rewritten.replacements
    nothing = RewrittenGraph(graph, ())
    assert compared([(graph, nothing), (graph, rewritten), (graph, nothing)], ROOM) == ((), (), ())
    assert compared([(graph, nothing)], ROOM) == ((),)


@pytest.mark.slow
def test_what_was_compared_is_known_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = whole()[0].graphs["step"]
    rewritten = split_gradients_by_mask(graph)
    ran: list[int] = []

    def odd(
        _: MeasurementWorker, pairs: list[tuple[StepGraph, RewrittenGraph]], *__: object
    ) -> tuple[tuple[Difference, ...], ...]:
        ran.append(sum(len(new.replacements) for _, new in pairs))
        return tuple(tuple(Difference(r, "the third byte differs") for r in new.replacements) for _, new in pairs)

    monkeypatch.setattr(MeasurementWorker, "compare", odd)
    first = compared([(graph, rewritten)], ROOM)
    assert {d.where for d in first[0]} == {"the third byte differs"} and len(first[0]) == len(rewritten.replacements)
    assert compared([(graph, rewritten)], ROOM) == first
    assert ran == [len(rewritten.replacements)]
    compared([(graph, rewritten)], replace(ROOM, threads=2))
    assert len(ran) == 2, "another number of threads is another machine"


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["the operator is known", "it is not"])
def test_a_chain_is_split_at_the_operator_that_differs_and_whole_where_that_is_not_known(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 50_000)
    graph = language_step().graphs["step"]
    tiling = tile_fat(graph, 280_000, 4)
    odd = next(i for chain, _ in tiling.counted if chain.loss is not None for i in chain.ops if graph.ops[i].name == MM)

    def comparing(
        _: MeasurementWorker, pairs: list[tuple[StepGraph, RewrittenGraph]], *__: object
    ) -> tuple[tuple[Difference, ...], ...]:
        return tuple(
            tuple(
                Difference(r, "row 3 differs", r.old.index(odd) if known else None)
                for r in new.replacements
                if odd in r.old
            )
            for _, new in pairs
        )

    monkeypatch.setattr(MeasurementWorker, "compare", comparing)
    monkeypatch.setattr(MeasurementWorker, "measure", lambda *_, **__: MeasuredCosts(((),), 0, 0))
    captured = replace(whole()[0], graphs={"step": graph})
    (found,) = tiled_with(
        TiledJob(captured, MeasuredCosts(((),), 0, 0), ()), [{"step": tiling}], ROOM, 2.0, lambda *_: None
    )
    (reason,) = found.left_whole
    assert reason.endswith("row 3 differs")
    left = found.tilings["step"]
    assert left.count([odd]) == 1 and (left.count([odd + 1]) == 4) == known
    assert any(odd in chain.ops for chain, _ in left.counted) != known


@pytest.mark.slow
def test_each_way_of_cutting_keeps_the_costs_of_its_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    made, measured = whole()
    graphs = made.graphs
    tiled = [TiledJob(made, measured, ()), TiledJob(made, measured, ())]
    counted = [
        [OpCost(float(place), 0, 0.0)] * len(g.ops) for place, g in enumerate((*graphs.values(), *graphs.values()))
    ]
    monkeypatch.setattr(MeasurementWorker, "measure", lambda *_, **__: MeasuredCosts(tuple(map(tuple, counted)), 0, 0))
    first, second = with_operator_costs(tiled, ROOM, 2.0, lambda *_: None)
    assert [table[0].seconds for table in first.measured.ops] == [*range(len(graphs))]
    assert [table[0].seconds for table in second.measured.ops] == [*range(len(graphs), 2 * len(graphs))]
    assert first.measured.base_bytes == measured.base_bytes
