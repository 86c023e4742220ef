"""What a deadline leaves for a step, and what is said where no plan keeps to it."""

from datetime import datetime

import pytest

from port_agent.planning.pace import too_slow, wanted_pace
from port_planner.deadline import DeadlineError, Pace
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.plan_step import plan_step
from tests.planner.estimated_steps import budget, captured

PACE = 1.02
"""Of the fastest step: what the smallest budgets cannot keep."""


@pytest.mark.slow
def test_a_missed_deadline_names_the_shortfall_and_the_budget_that_would_do() -> None:
    graph, costs = captured()
    least = lower(graph, costs, Plan()).seconds
    small = budget(0.05)
    slow = plan_step(graph, costs, ram_bytes=small, strategy="greedy").plan
    assert slow is not None and slow.seconds > PACE * least
    text = too_slow(graph, costs, Pace(100 * PACE * least, 100, PACE * least), small, slow.seconds)
    assert "too much" in text and "would suffice" in text
    hopeless = too_slow(graph, costs, Pace(50 * least, 100, 0.5 * least), small, slow.seconds)
    assert "no RAM budget makes it fast enough" in hopeless


def test_a_pace_needs_a_deadline() -> None:
    assert wanted_pace(None, None, 1, 13) is None
    found = wanted_pace(datetime(2999, 1, 1).timestamp(), None, 1, 13)
    assert found is not None and found.steps == 13
    with pytest.raises(DeadlineError, match="no charging time"):
        wanted_pace(datetime(2001, 1, 1).timestamp(), None, 1, 13)
