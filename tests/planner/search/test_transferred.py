"""Plans transferred to a step of another shape: within the limits, no more than is needed,
almost nothing beyond the step.
"""

from dataclasses import replace

import pytest

import port_planner.search.transferred
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.search.plan_step import PlanLimits, base_joules, plan_step
from port_planner.search.transferred import transferred
from tests.planner.steps import costs_of, tiny_step

BIG, SMALL = 64, 40


def step(rows: int) -> tuple[StepGraph, CostTable]:
    graph = tiny_step(rows=rows).graphs["step"]
    return graph, costs_of(graph)


def kept_bytes(graph: StepGraph, costs: CostTable) -> int:
    return lower(graph, costs, Plan()).peak_bytes


def planned(rows: int, share: float) -> tuple[Plan, int]:
    """Return the plan of a step within a share of what it takes, and that."""
    graph, costs = step(rows)
    ram = int(share * kept_bytes(graph, costs))
    plan = plan_step(graph, costs, ram_bytes=ram, strategy="greedy").plan
    assert plan is not None and plan.decisions
    return plan, ram


@pytest.mark.slow
def test_what_fits_as_it_is_keeps_everything() -> None:
    plan, ram = planned(BIG, 0.8)
    found = transferred(*step(SMALL), PlanLimits(ram), plan)
    assert found is not None and not found.decisions and found.overhead_joules == 0.0 == found.bound_joules


@pytest.mark.parametrize("rows", [56, SMALL])
def test_a_smaller_step_does_no_more_than_its_neighbour_within_the_budget(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 10.0)
    plan, ram = planned(BIG, 0.5)
    graph, costs = step(rows)
    found = transferred(graph, costs, PlanLimits(ram), plan)
    assert found is not None and set(found.decisions) <= set(plan.decisions)
    program = lower(graph, costs, replace(found, ram_bytes=ram))
    assert program.peak_bytes == found.peak_bytes <= ram and found.joules == pytest.approx(program.joules)
    assert program.cost_joules <= lower(graph, costs, replace(plan, ram_bytes=ram)).cost_joules
    assert lower(*step(rows), Plan()).peak_bytes > ram, "the test shows nothing where everything fits"


def test_a_step_that_nearly_fits_does_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 10.0)
    plan, _ = planned(BIG, 0.5)
    graph, costs = step(56)
    ram = int(0.97 * kept_bytes(graph, costs))
    found = transferred(graph, costs, PlanLimits(ram), plan)
    assert found is not None and set(found.decisions) < set(plan.decisions) and found.peak_bytes <= ram
    share = found.overhead_joules / base_joules(costs)
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 1.01 * share)
    assert transferred(graph, costs, PlanLimits(ram), plan) == found
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 0.99 * share)
    assert transferred(graph, costs, PlanLimits(ram), plan) is None


def test_what_does_not_fit_or_costs_too_much_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ram = planned(BIG, 0.4)
    graph, costs = step(56)
    assert transferred(graph, costs, PlanLimits(ram), plan) is None
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 10.0)
    assert transferred(graph, costs, PlanLimits(ram), plan) is not None
    late = PlanLimits(ram, deadline_s=0.5 * sum(op.seconds for op in costs.ops))
    assert transferred(graph, costs, late, plan) is None
    small, less = planned(SMALL, 0.5)
    assert transferred(*step(BIG), PlanLimits(less), small) is None


def test_a_plan_that_is_none_for_the_step_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_planner.search.transferred, "WORTH_SEARCHING", 10.0)
    graph, costs = step(SMALL)
    wrong = Plan((Decision(0, 10**6, 0, Action.RECOMPUTE),))
    assert transferred(graph, costs, PlanLimits(int(0.5 * kept_bytes(graph, costs))), wrong) is None
