"""Coarsening: the memory of a step stays exact while its operators are put together."""

from dataclasses import replace

import pytest

from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.problem.coarsen import coarsen
from port_planner.problem.problem import Choice, GapDecision, Schedule, verify_problem
from port_planner.problem.replay import replay
from tests.planner.estimated_steps import captured


@pytest.mark.slow
def test_coarsening_keeps_the_memory_exact() -> None:
    graph, costs = captured()
    problem = coarsen(graph, costs, ram_bytes=1 << 40).problem
    verify_problem(problem)
    exact = lower(graph, costs, Plan()).peak_bytes - costs.device.base_bytes
    found = replay(problem, Schedule()).peak_bytes
    assert exact <= found <= exact * 1.05
    assert problem.size < len(graph.ops)


def test_what_lives_within_a_step_may_go_to_any_target_and_what_outlives_it_to_the_first() -> None:
    graph, costs = captured()
    disk = replace(costs.device.flash, name="disk")
    costs = replace(costs, device=replace(costs.device, scratch_targets=(disk,)))
    coarse = coarsen(graph, costs, ram_bytes=1 << 40)
    assert coarse.problem.targets == (costs.device.flash.name, "disk")
    found = {(tensor.persistent, tuple(p.target for p in tensor.paging)) for tensor in coarse.problem.tensors}
    assert found - {(True, ()), (False, ())} == {(True, (0,)), (False, (0, 1))}
    gap = next(g for g, gap in enumerate(coarse.problem.gaps) if not coarse.problem.tensors[gap.tensor].persistent)
    choice = Choice(gap, coarse.problem.gaps[gap].before, GapDecision.PAGE, 1)
    assert [d.target for d in coarse.plan(Schedule((choice,)), 0, "by hand").decisions] == [1]
