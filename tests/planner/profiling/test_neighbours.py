"""Costs of steps of further shapes, between those of smaller and larger ones."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from port_planner.ir.costs import Codec, OpCost, PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.profiling import kept_costs
from port_planner.profiling.neighbours import between, filled, interpolated, packings_of
from port_planner.profiling.operator_profile import kept_tables, profile_operators
from tests.planner.steps import tiny_step

ROWS = (8, 2, 4, 6, 3)


def steps() -> list[StepGraph]:
    return [tiny_step(rows=rows).graphs["step"] for rows in ROWS]


@pytest.mark.slow
def test_what_lies_between_two_that_are_near_needs_no_measuring() -> None:
    graphs = steps()
    assert between(graphs) == {2, 3, 4}  # 8 rows are the first and the most, 2 the least
    assert between(graphs[:2]) == between(graphs[:1]) == frozenset()
    assert between(graphs[2:]) == frozenset(), "the first of a program is measured though it lies between two"
    far = [tiny_step(rows=rows).graphs["step"] for rows in (64, 1, 3, 2)]
    assert between(far) == {3}, "between 3 rows and 64 nothing is near"
    others = tiny_step("SGD", rows=4).graphs["step"]
    assert between([*graphs, others]) == {2, 3, 4}


@pytest.mark.slow
def test_the_same_batches_in_other_ways_are_all_measured() -> None:
    graphs = steps()
    assert between([*graphs, graphs[3]]) == frozenset()


def test_costs_between_two_are_in_proportion_and_workspace_is_of_the_larger() -> None:
    known = [(10.0, OpCost(1.0, 100, 4.0)), (30.0, OpCost(2.0, 300, 8.0))]
    assert interpolated(known, 20.0) == OpCost(1.5, 300, 6.0)
    assert interpolated(known, 10.0) == OpCost(1.0, 100, 4.0)
    assert interpolated(known, 60.0) == OpCost(4.0, 600, 16.0)
    assert interpolated(known, 5.0) == OpCost(0.5, 100, 2.0)


def test_only_what_is_not_known_is_filled() -> None:
    graphs = steps()
    least, most = OpCost(1.0, 0, 1.0), OpCost(2.0, 64, 2.0)
    tables: list[list[OpCost | None]] = [[None] * len(graph.ops) for graph in graphs]
    for i in range(len(graphs[0].ops)):
        tables[0][i], tables[1][i] = most, least
    tables[2][0] = OpCost(9.0, 9, 9.0)
    found = filled(graphs, tables)
    assert found[0] == (most,) * len(graphs[0].ops) and found[2][0] == OpCost(9.0, 9, 9.0)
    assert all(1.0 <= cost.seconds <= 2.0 for table in (found[3], found[4]) for cost in table[1:])
    assert sum(c.seconds for c in found[4]) < sum(c.seconds for c in found[3])
    assert filled(graphs[:1], [[None] * len(graphs[0].ops)])[0][0] == OpCost(0.0, 0, 0.0)


@pytest.mark.slow
def test_shapes_between_are_not_run_and_cost_what_lies_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = steps()
    found = profile_operators(graphs, compute_watts=4.0, kept_in=tmp_path, resident=False)
    (file,) = tmp_path.iterdir()
    kept = kept_costs.read_costs(tmp_path, file.name, time.time())
    alone = profile_operators(graphs[:2], compute_watts=4.0, kept_in=tmp_path, resident=False)
    assert kept.keys() == kept_costs.read_costs(tmp_path, file.name, time.time()).keys()
    assert alone.ops == found.ops[:2]
    total = [sum(cost.seconds for cost in table) for table in found.ops]
    assert total[1] <= total[4] <= total[0] and all(cost.joules > 0 for cost in found.ops[2] if cost.seconds > 0)
    fields = kept_tables(graphs, threads=1, compute_watts=4.0, kept_in=tmp_path, workspace_seen=False)
    assert fields is None or fields == found.ops


def packing(codec: Codec, reserved: int) -> PackingCost:
    return PackingCost(0, 1, codec, 4, 0.5, reserved, 1.0, 2.0, 3.0)


def test_packed_forms_of_smaller_tensors_are_as_dense() -> None:
    larger, smaller = (graph_with(nbytes) for nbytes in (4000, 1000))
    (found,) = packings_of(smaller, larger, [packing(Codec.BITMAP, 2000)])
    assert (found.pack_seconds, found.unpack_seconds, found.joules) == (0.25, 0.5, 0.75)
    assert 500 < found.reserved_bytes <= 600
    assert packings_of(larger, smaller, [packing(Codec.BITMAP, 500)]) == ()
    assert packings_of(larger, larger, [packing(Codec.BITMAP, 2000)]) == (packing(Codec.BITMAP, 2000),)


def graph_with(nbytes: int) -> StepGraph:
    graph = steps()[0]
    return replace(graph, storages=(replace(graph.storages[0], nbytes=nbytes), *graph.storages[1:]))
