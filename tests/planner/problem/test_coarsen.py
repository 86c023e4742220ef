"""Coarsening: the memory of a step stays exact while its operators are put together."""

from planner.ir.lowering.lower import lower
from planner.ir.plan import Plan
from planner.problem.coarsen import coarsen
from planner.problem.model import Schedule, verify_problem
from planner.problem.replay import replay
from tests.planner.estimated_steps import captured


def test_coarsening_keeps_the_memory_exact() -> None:
    graph, costs = captured()
    problem = coarsen(graph, costs, ram_bytes=1 << 40).problem
    verify_problem(problem)
    exact = lower(graph, costs, Plan()).peak_bytes - costs.device.base_bytes
    found = replay(problem, Schedule()).peak_bytes
    assert exact <= found <= exact * 1.05
    assert problem.size < len(graph.ops)
