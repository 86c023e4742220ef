"""A search that counts its attempts finds the same plan however fast the processor is, and stops after them."""

import itertools
import time

import pytest

from port_planner.ir.plan import Plan
from port_planner.make_bundle import default_planner
from port_planner.search import clock
from port_planner.search.plan_step import PlanResult, plan_step
from tests.planner.estimated_steps import budget, captured


def _planned(iterations: int, share: float = 0.1) -> PlanResult:
    graph, costs = captured()
    return plan_step(graph, costs, ram_bytes=budget(share), iterations=iterations)


@pytest.mark.slow
def test_as_many_attempts_find_the_same_plan_on_any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _planned(60)
    seconds = itertools.count(step=1000)
    monkeypatch.setattr(time, "process_time", lambda: float(next(seconds)))
    again = _planned(60)
    assert first.plan is not None
    assert again.plan == first.plan
    assert again.bound_joules == first.bound_joules


@pytest.mark.slow
def test_the_commands_planner_counts_attempts_where_it_is_asked_to() -> None:
    graph, costs = captured()
    planner = default_planner(strategy="milp", time_limit_s=0.0, iterations=3)
    assert planner(graph, costs, budget(0.1)).plan == _planned(3).plan


@pytest.mark.slow
def test_more_attempts_cost_no_more() -> None:
    few, many = (_planned(iterations).plan for iterations in (3, 60))
    assert isinstance(few, Plan) and isinstance(many, Plan)
    assert many.overhead_joules <= few.overhead_joules


def test_attempts_are_counted_inside_the_block_alone() -> None:
    with clock.counted():
        clock.note_attempt()
        assert (clock.now(), clock.solver_seconds(3.0) > 1000) == (1.0, True)
        with clock.counted():
            assert clock.now() == 0.0
        assert clock.now() == 1.0
    assert (clock.solver_seconds(3.0), clock.solver_nodes()) == (3.0, None)
