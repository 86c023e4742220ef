"""The frontier of memory against energy."""

from planner.search.pareto import budgets, frontier, non_dominated
from tests.planner.estimated_steps import captured


def test_the_frontier_holds_no_beaten_plan() -> None:
    graph, costs = captured()
    limits = budgets(graph, costs, 1 << 40, 3)
    assert limits == sorted(limits, reverse=True)
    points = frontier(graph, costs, limits, strategy="greedy")
    assert points and points == non_dominated(points)
    assert all(point.peak_bytes <= point.plan.ram_bytes for point in points)
