"""What is rematerialized needs its inputs."""

import pytest

from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.rematerialize import effective_operands, rematerializable
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import PlanError, idle_gaps
from tests.planner.steps import costs_of, tiny_step

# -- wrong plans


def _graph() -> StepGraph:
    return tiny_step().graphs["step"]


def _activation(graph: StepGraph) -> tuple[int, int, int]:
    """A temporary that can be rematerialized, with an idle gap of some length."""
    for s in range(len(graph.storages)):
        for a, b in idle_gaps(graph, s):
            if rematerializable(graph, s, a) and b - a > 4 and graph.uses[s][-1] == b:
                return s, a, b
    raise AssertionError("no such storage")


def test_a_rematerialization_whose_inputs_are_gone_is_refused() -> None:
    graph = _graph()
    s, a, b = _activation(graph)
    sources = {x for w in graph.writers[s] for x in effective_operands(graph, w)} - {s}
    gone = None
    for x in sources:
        for before, after in idle_gaps(graph, x):
            if before <= b <= after and graph.storages[x].role is Role.TEMPORARY:
                gone = Decision(x, before, after, Action.PAGE)
    if gone is None or gone.before == b:
        # a weight that is away while its layer would be rematerialized
        w = next(x for x in sources if graph.storages[x].role is Role.PARAMETER)
        before, after = next((p, q) for p, q in idle_gaps(graph, w) if p < b < q)
        gone = Decision(w, before, after, Action.PAGE)
    with pytest.raises(PlanError, match="is gone"):
        lower(graph, costs_of(graph), Plan((Decision(s, a, b, Action.RECOMPUTE), gone)))
