"""The board's step as a planning problem: its bytes are the arena's, and weights forbid what they must."""

from __future__ import annotations

from functools import cache

import pytest

from port_planner.mcu.autodiff import StepKind, full_scheme, last_layers
from port_planner.mcu.board_problem import BoardProblem, board_problem
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.frontend import import_module
from port_planner.mcu.memory import plan_memory
from port_planner.mcu.pages import parameter_name
from port_planner.problem.problem import Choice, GapDecision, Schedule
from port_planner.problem.replay import replay
from tests.planner.mcu.networks import every_layer


@cache
def stated(count: int | None = None) -> tuple[BoardProblem, int]:
    module, data = every_layer(2)
    graph = import_module(module, data.shape[1:], "every_layer")
    scheme = full_scheme(graph) if count is None else last_layers(graph, count)
    kept = plan_memory(graph, scheme)
    found = board_problem(kept.program, scheme, core_costs("nrf52840"), kept.arena.peak_bytes)
    return found, kept.arena.lower_bound_bytes


@pytest.mark.parametrize("count", [None, 1, 3])
def test_keeping_everything_takes_what_the_arena_takes(count: int | None) -> None:
    found, bound = stated(count)
    cost = replay(found.problem, Schedule())
    assert cost.valid and cost.peak_bytes == bound


def test_what_runs_again_stands_before_its_step_with_its_inputs_first() -> None:
    found, _ = stated()
    gap = next(
        (g, gap)
        for g, gap in enumerate(found.problem.gaps)
        if found.problem.tensors[gap.tensor].rematerializations and not gap.dead and gap.tensor > 1
    )
    schedule = Schedule((Choice(gap[0], gap[1].before, GapDecision.RECOMPUTE),))
    assert found.recomputation(schedule).before == {gap[1].before: (found.names[gap[1].tensor],)}


def test_an_operator_may_not_run_again_once_its_weights_were_updated() -> None:
    found, _ = stated()
    problem, op = found.problem, found.program.graph.ops[0].name
    weights = problem.tensors[found.names.index(parameter_name(op))]
    assert weights.pinned and weights.nbytes == 0 and len(weights.writes) == 2
    update = next(i for i, s in enumerate(found.program.steps) if s.kind is StepKind.WEIGHT and s.op == op)
    tensor = found.names.index(op)
    cost = replay(problem, Schedule(intermediates=((tensor, update + 1),)))
    assert any("has changed since" in error for error in cost.errors)
