"""Plans of captured steps: whatever a strategy decides, the lowered program stays within the budget."""

import pytest

from planner.draw import Mark, Shade, drawing, frontier_svg, page, svg
from planner.ir.graph import StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.plan import Plan
from planner.problem.coarsen import coarsen
from planner.problem.model import Schedule, verify_problem
from planner.problem.reorder import peak_bytes, reorder, respects
from planner.problem.replay import replay
from planner.search.pareto import budgets, frontier, non_dominated
from planner.search.plan_step import plan_step
from planner.search.solve import STRATEGIES, Outcome, StrategyError
from tests.planner.estimated_steps import budget, captured


def test_coarsening_keeps_the_memory_exact() -> None:
    graph, costs = captured()
    problem = coarsen(graph, costs, ram_bytes=1 << 40).problem
    verify_problem(problem)
    exact = lower(graph, costs, Plan()).peak_bytes - costs.device.base_bytes
    found = replay(problem, Schedule()).peak_bytes
    assert exact <= found <= exact * 1.05
    assert problem.size < len(graph.ops)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("strategy", ["greedy", "milp", *(s for s in STRATEGIES if s not in ("greedy", "milp"))])
def test_every_plan_lowers_within_its_budget(strategy: str, share: float) -> None:
    graph, costs = captured()
    limit = budget(share)
    result = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=2.0)
    if result.plan is None:
        assert result.outcome in (Outcome.INFEASIBLE, Outcome.TIMED_OUT) and strategy not in ("greedy", "milp")
        return
    program = lower(graph, costs, result.plan)
    assert program.peak_bytes <= limit and result.plan.peak_bytes == program.peak_bytes
    assert result.bound_joules is not None
    assert result.bound_joules <= result.plan.overhead_joules * (1 + 1e-6) + 1e-9


def test_ours_is_never_above_a_baseline() -> None:
    graph, costs = captured()
    limit = budget(0.5)
    ours = plan_step(graph, costs, ram_bytes=limit, time_limit_s=4.0).plan
    assert ours is not None
    for strategy in STRATEGIES:
        other = plan_step(graph, costs, ram_bytes=limit, strategy=strategy, time_limit_s=1.0).plan
        assert other is None or ours.overhead_joules <= other.overhead_joules * (1 + 1e-9) + 1e-9, strategy


def test_too_little_memory_names_the_op_and_what_it_needs() -> None:
    graph, costs = captured()
    result = plan_step(graph, costs, ram_bytes=costs.device.base_bytes + 4096, strategy="greedy")
    assert result.outcome is Outcome.INFEASIBLE and result.plan is None
    assert result.needed_bytes is not None and result.needed_op is not None and result.holders
    assert "raise --ram to at least" in result.message


def test_an_unknown_strategy_lists_the_known() -> None:
    graph, costs = captured()
    with pytest.raises(StrategyError, match="greedy"):
        plan_step(graph, costs, ram_bytes=1 << 40, strategy="magic")


def test_a_roomy_budget_changes_nothing() -> None:
    graph, costs = captured()
    result = plan_step(graph, costs, ram_bytes=1 << 40)
    assert result.outcome is Outcome.OPTIMAL and result.plan is not None and not result.plan.decisions


def test_reordering_breaks_no_constraint_and_does_not_raise_the_peak() -> None:
    graph, _ = captured()
    late = _updates_last(graph)
    order = reorder(late)
    assert order and respects(late, order)
    assert peak_bytes(late.reordered(order)) < peak_bytes(late)
    assert not respects(late, tuple(reversed(range(len(late.ops)))))


def _updates_last(graph: StepGraph) -> StepGraph:
    from planner.ir.graph import Phase

    first = [i for i, op in enumerate(graph.ops) if op.phase is not Phase.UPDATE]
    return graph.reordered((*first, *(i for i, op in enumerate(graph.ops) if op.phase is Phase.UPDATE)))


def test_the_frontier_holds_no_beaten_plan() -> None:
    graph, costs = captured()
    limits = budgets(graph, costs, 1 << 40, 3)
    assert limits == sorted(limits, reverse=True)
    points = frontier(graph, costs, limits, strategy="greedy")
    assert points and points == non_dominated(points)
    assert all(point.peak_bytes <= point.plan.ram_bytes for point in points)


def test_drawings_show_every_fate() -> None:
    graph, costs = captured()
    plan = plan_step(graph, costs, ram_bytes=budget(0.2), strategy="greedy").plan
    assert plan is not None
    picture = drawing(graph, costs, plan)
    assert {bar.shade for bar in picture.bars} >= {Shade.KEEP, Shade.PAGE_IN}
    assert all(0 <= bar.start < bar.stop <= len(graph.ops) for bar in picture.bars)
    assert max(picture.memory) <= plan.ram_bytes
    text = svg(picture)
    assert text.startswith("<svg") and text.count("<rect") > len(picture.bars)
    assert "<svg" in page(picture) and "http://www.w3.org" in text


def test_the_page_shows_the_frontier() -> None:
    graph, costs = captured()
    picture = drawing(graph, costs, Plan())
    marks = [Mark(0, 300 << 20, 1.0, 10.0), Mark(1, 200 << 20, 2.0, 12.5)]
    text = frontier_svg(marks, chosen=1)
    assert text.count("<circle") == 2 and "200.0 MiB" in text and "12.50 J" in text
    assert text in page(picture, marks, 1) and page(picture, marks[:1]).count("<svg") == 1
    assert frontier_svg([marks[0], marks[0]], 0).count("<circle") == 2  # equal figures divide by nothing
