"""What a placed plan costs at least: never more than its program does, and that where nothing waits."""

from dataclasses import replace

import pytest

from port_planner.ir.costs import CostTable, Flash
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.program import CostlyPlanError
from tests.agent.exactness import packing_costs, random_plan
from tests.planner.steps import costs_of, tiny_step

SEEDS = 12
AT_ONCE = 1e18
"""Bytes per second of a medium that nothing waits for."""


def _graph() -> StepGraph:
    return tiny_step().graphs["step"]


def _costs(graph: StepGraph, bytes_per_s: float) -> CostTable:
    costs = replace(costs_of(graph), packings=packing_costs(graph))
    flash = Flash("card", bytes_per_s, bytes_per_s / 2, 0.0, 1e-7, 3e-7, wear_joules_per_byte=2e-7)
    return replace(costs, device=replace(costs.device, flash=flash, static_watts=1.5))


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [1e4, 1e6, 1e8, AT_ONCE])
def test_no_plan_is_refused_that_costs_no_more_than_it_may(bytes_per_s: float) -> None:
    graph = _graph()
    costs = _costs(graph, bytes_per_s)
    for seed in range(SEEDS):
        plan = random_plan(graph, seed, pack=0.3)
        program = lower(graph, costs, plan)
        assert lower(graph, costs, plan, max_joules=program.cost_joules) == program


@pytest.mark.slow
def test_a_plan_that_waits_for_nothing_is_known_to_cost_what_it_does() -> None:
    graph = _graph()
    costs = _costs(graph, AT_ONCE)
    paged = 0
    for seed in range(SEEDS):
        plan = random_plan(graph, seed, pack=0.3)
        program = lower(graph, costs, plan)
        paged += program.written_bytes > 0
        with pytest.raises(CostlyPlanError, match="more than"):
            lower(graph, costs, plan, max_joules=program.cost_joules * (1 - 1e-6))
    assert paged > SEEDS / 2


def test_the_page_thread_takes_its_time_however_much_is_computed_meanwhile() -> None:
    graph = _graph()
    costs = _costs(graph, 1e3)
    plan = random_plan(graph, 1, page=0.9, recompute=0.0, slices=0.0)
    program = lower(graph, costs, plan)
    assert program.stall_seconds > 10 * program.compute_seconds, "transfers are nearly all of this step"
    with pytest.raises(CostlyPlanError):
        lower(graph, costs, plan, max_joules=0.9 * program.cost_joules)
