"""A drawing shows each decision of a plan in its shade, at its time, within the plan's memory."""

from dataclasses import replace

import pytest

from port_planner.draw.drawing import Bar, Shade, TileRun, drawing
from port_planner.ir.graph import Tile
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.search.plan_step import plan_step
from tests.planner.estimated_steps import budget, captured
from tests.planner.ir.lowering.small_graph import A, B, W, costs, graph


@pytest.mark.slow
def test_drawings_show_every_fate() -> None:
    step, table = captured()
    dear = replace(
        table, ops=tuple(replace(c, joules=1.0) for c in table.ops)
    )  # to make again what pages could bring back
    plan = plan_step(step, dear, ram_bytes=budget(0.2), strategy="greedy").plan
    assert plan is not None
    picture = drawing(step, table, plan)
    assert {bar.shade for bar in picture.bars} >= {Shade.KEEP, Shade.PAGE_IN}
    assert all(0 <= bar.start < bar.stop <= len(step.ops) for bar in picture.bars)
    assert max(picture.memory) <= plan.ram_bytes and len(picture.operators) == len(step.ops)
    assert picture.phases[0].start == 0 and picture.phases[-1].stop == len(step.ops)
    assert any(" of " in name for name in picture.operators) and any(" of " in name for name, _ in picture.lanes)
    assert dict(picture.figures)["written to flash"] and picture.base_bytes == table.device.base_bytes


def bars_of(storage: int, *, changed: bool = True) -> list[tuple[int, int, Shade]]:
    """Return the bars of a storage that pages out after op 0 and is back for op 4."""
    step = graph()
    if not changed:
        step = replace(step, ops=(*step.ops[:4], replace(step.ops[4], name="aten::add.Tensor", writes=())))
    picture = drawing(step, costs(), Plan((Decision(storage, step.uses[storage][0], 4, Action.PAGE),)))
    lane = [name for name, _ in picture.lanes].index(step.label(storage))
    return [(bar.start, bar.stop, bar.shade) for bar in picture.bars if bar.lane == lane]


def test_what_a_step_does_not_change_is_dropped_and_not_written() -> None:
    assert bars_of(W) == [(0, 1, Shade.PAGE_OUT), (4, 5, Shade.PAGE_IN)]
    assert bars_of(W, changed=False) == [(0, 1, Shade.KEEP), (4, 5, Shade.PAGE_IN)]


def test_what_is_large_for_long_has_a_lane() -> None:
    picture = drawing(graph(), costs(), Plan(), most=1)
    assert picture.lanes == (("w", 400),) and picture.unshown > 0
    assert picture.bars == (Bar(0, 0, 5, Shade.KEEP),)
    assert {name for name, _ in drawing(graph(), costs(), Plan()).lanes} >= {graph().label(s) for s in (A, B, W)}


def test_seconds_are_those_of_the_plans_order() -> None:
    assert drawing(graph(), costs(), Plan()).moments == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)


def test_tiles_of_a_chain_are_runs_with_their_names() -> None:
    step, tiles = graph(), [Tile(0, "chain", k, 2) for k in range(2)]
    ops = tuple(replace(op, tile=tiles[k // 2 - 1]) if k > 1 else op for k, op in enumerate(step.ops))
    picture = drawing(replace(step, ops=ops), costs(), Plan())
    assert picture.runs == (TileRun(tiles[0], 2, 4), TileRun(tiles[1], 4, 5))
    assert picture.operators[2].endswith(", tile 1 of 2") and "tile" not in picture.operators[0]
    assert dict(picture.figures)["in tiles"] == "1 chain"
    assert drawing(step, costs(), Plan()).runs == ()
