"""The frontier of memory against energy."""

import pytest

from port_planner.search.pareto import budgets, frontier, non_dominated, plans_within
from tests.planner.estimated_steps import captured


def test_the_frontier_holds_no_beaten_plan() -> None:
    graph, costs = captured()
    limits = budgets(graph, costs, 1 << 40, 3)
    assert limits == sorted(limits, reverse=True)
    points = frontier(graph, costs, limits, strategy="greedy")
    assert points and points == non_dominated(points)
    assert all(point.peak_bytes <= point.plan.ram_bytes for point in points)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("resnet18", "bert", "vit"))]
)
def test_more_memory_never_costs_more_over_twenty_budgets(name: str) -> None:
    graph, costs = captured(name)
    limits = budgets(graph, costs, 1 << 40, 20)
    plans = plans_within(graph, costs, limits, time_limit_s=20.0, strategy="greedy")
    overheads = [plans[limit].overhead_joules for limit in sorted(limits)]
    assert overheads == sorted(overheads, reverse=True), "each has at least what the one before had"
    assert all(plan.peak_bytes <= plan.ram_bytes <= limit for limit, plan in plans.items())
