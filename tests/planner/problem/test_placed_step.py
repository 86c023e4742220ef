"""A placed step reads everything where its operators run, from copies that are made before and
never outlive what they show.
"""

import random

import pytest

from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.graph import GraphError, Role, StepGraph
from port_planner.problem.placed_step import homes_of, on_kind, placed_step
from port_planner.search.placement.operator_devices import together_of
from tests.planner.steps import tiny_step

SIM = "sim"


def kinds_of(graph: StepGraph, seed: int) -> tuple[str, ...]:
    rng = random.Random(seed)
    kinds = [rng.choice((CPU, SIM)) for _ in graph.ops]
    for group in together_of(graph):
        for i in group:
            kinds[i] = kinds[group[0]]
    return tuple(kinds)


@pytest.mark.parametrize("seed", range(6))
def test_every_operator_finds_the_present_contents_on_its_own_device(seed: int) -> None:
    graph = tiny_step().graphs["step"]
    kinds = kinds_of(graph, seed)
    made = placed_step(graph, kinds)
    there = made.graph
    version = [0] * len(there.storages)
    shows: dict[int, tuple[int, int]] = {}
    """Copy -> the storage it was made of, and how often that had been written by then."""
    for i, (op, origin) in enumerate(zip(there.ops, made.origin, strict=True)):
        moved = transfer_of(there, op)
        assert (moved is None) == (origin is not None)
        if moved is not None:
            shows[moved.target] = moved.source, version[moved.source]
            continue
        assert {there.storages[s].device for s in (*there.reads[i], *there.creates[i])} <= {kinds[origin or 0]}
        assert all(version[shows[s][0]] == shows[s][1] for s in there.reads[i] if s in shows)
        for s in (*there.creates[i], *op.writes):
            version[s] += 1
    assert [op.name for op, o in zip(there.ops, made.origin, strict=True) if o is not None] == [
        o.name for o in graph.ops
    ]
    assert there.loss == graph.loss and there.batch == graph.batch


def test_on_one_device_nothing_is_copied_and_a_batch_lies_there() -> None:
    graph = tiny_step().graphs["step"]
    made = placed_step(graph, [SIM] * len(graph.ops))
    assert made.origin == tuple(range(len(graph.ops)))
    assert {s.device for s in made.graph.storages if s.role is not Role.TEMPORARY} == {SIM}
    assert placed_step(on_kind(graph, SIM), [CPU] * len(graph.ops)).graph == graph


def test_a_storage_that_would_be_written_on_two_devices_or_away_from_home_is_refused() -> None:
    graph = tiny_step().graphs["step"]
    writers = next(w for s, w in enumerate(graph.writers) if graph.storages[s].persistent and w)
    key = next(s.key for s, w in zip(graph.storages, graph.writers, strict=True) if s.persistent and w == writers)
    with pytest.raises(GraphError, match="would be written on"):
        homes_of(graph, [CPU] * len(graph.ops), {key: SIM})
    group = together_of(graph)[0]
    with pytest.raises(GraphError, match="cpu and sim"):
        homes_of(graph, [SIM if i == group[0] else CPU for i in range(len(graph.ops))], {})
