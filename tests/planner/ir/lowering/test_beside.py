"""What a placed step holds of the host's memory is counted instruction by instruction."""

from dataclasses import replace

from port_planner.ir.costs import CostTable, OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.problem.placed_step import placed_step
from tests.planner.steps import costs_of, tiny_step

WORKSPACE = 1 << 20


def test_a_step_of_the_cpu_holds_nothing_beside_its_plan() -> None:
    graph = tiny_step().graphs["step"]
    assert lower(graph, costs_of(graph), Plan()).beside_bytes == 0


def test_storages_on_the_host_and_the_workspace_of_operators_there_are_counted() -> None:
    graph = tiny_step().graphs["step"]
    whole = lower(graph, costs_of(graph), Plan())
    base = costs_of(graph).device.base_bytes
    last = len(graph.ops) - 1
    made = placed_step(graph, [CPU] * len(graph.ops)).graph
    on_both = replace(made, storages=(*made.storages, replace(made.storages[0], name="other", device="sim")))
    assert lower(on_both, costs_of(on_both), Plan()).beside_bytes == whole.peak_bytes - base
    costs = costs_of(on_both)
    ops = (*costs.ops[:last], OpCost(costs.ops[last].seconds, 0, 0.0, WORKSPACE))
    beside = lower(on_both, CostTable(costs.device, ops), Plan()).beside_bytes
    assert WORKSPACE <= beside <= WORKSPACE + whole.peak_bytes - base
