"""What `plan` and `frontier` say about deadlines, and costs taken to a board that is not at hand."""

import argparse
from datetime import datetime

import pytest

from agent.cli.devices_and_plots import too_slow, wanted_pace
from agent.prepare import bundle
from planner.deadline import DeadlineError, Pace
from planner.ir.boards import BoardError, load_board
from planner.ir.lowering.lower import lower
from planner.ir.plan import Plan
from planner.profiling.operators import Measured
from planner.search.plan_step import plan_step
from tests.planner.estimated_steps import budget, captured

PACE = 1.02
"""Of the fastest step: what the smallest budgets cannot keep."""


def test_a_missed_deadline_names_the_shortfall_and_the_budget_that_would_do() -> None:
    graph, costs = captured()
    least = lower(graph, costs, Plan()).seconds
    small = budget(0.05)
    slow = plan_step(graph, costs, ram_bytes=small, strategy="greedy").plan
    assert slow is not None and slow.seconds > PACE * least
    text = too_slow(graph, costs, Pace(100 * PACE * least, 100, PACE * least), small, slow.seconds)
    assert "too much" in text and "would do" in text
    hopeless = too_slow(graph, costs, Pace(50 * least, 100, 0.5 * least), small, slow.seconds)
    assert "no RAM budget makes it fast enough" in hopeless


def test_a_pace_needs_a_deadline() -> None:
    parsed = argparse.Namespace(deadline=None, charging=None, epochs=1)
    assert wanted_pace(parsed, 100, 8) is None
    parsed.deadline = datetime(2999, 1, 1).timestamp()
    found = wanted_pace(parsed, 100, 8)
    assert found is not None and found.steps == 13
    parsed.deadline = datetime(2001, 1, 1).timestamp()
    with pytest.raises(DeadlineError, match="no charging time"):
        wanted_pace(parsed, 100, 8)


def test_costs_of_another_board_are_scaled_and_say_estimated() -> None:
    graph, costs = captured()
    measured = Measured((costs.ops,), costs.device.base_bytes, 0)
    times = {}
    for name in ("pi4b", "jetson-orin"):
        scaled, device = bundle.other_board({"step": graph}, measured, costs.device, name)
        assert device.name.endswith("(estimated)") and device.base_bytes == costs.device.base_bytes
        assert device.static_watts == load_board(name)["static_watts"]
        assert [c.workspace_bytes for c in scaled.ops[0]] == [c.workspace_bytes for c in costs.ops]
        times[name] = sum(c.seconds for c in scaled.ops[0])
    assert 0 < times["jetson-orin"] < times["pi4b"]
    with pytest.raises(BoardError, match="pi4b"):
        bundle.other_board({"step": graph}, measured, costs.device, "abacus")
