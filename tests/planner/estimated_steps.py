"""Captured steps of real models with costs as a board file estimates them."""

from dataclasses import replace
from functools import cache

from benchmarks.models import workload
from port_planner.capture.step import capture_step
from port_planner.ir.boards import estimated_costs, load_board
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.pareto import min_budget


@cache
def captured(name: str = "resnet18") -> tuple[StepGraph, CostTable]:
    import torch

    made = workload(name, small=True)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
    graph = capture_step(made.model, made.loss_fn, optimizer, made.batch(0)).graphs["step"]
    costs = estimated_costs(graph, load_board("pi4b"))
    return graph, replace(costs, device=replace(costs.device, base_bytes=1 << 20))


def budget(share: float, name: str = "resnet18") -> int:
    graph, costs = captured(name)
    least, most = min_budget(graph, costs), lower(graph, costs, Plan()).peak_bytes
    return round(least + share * (most - least))
