"""What fits into the memories when a step's operators are divided, and the cost of a quick plan for each division."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from port_agent.prepare.pools import Pools
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import CostTable, DeviceCosts, OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.program import host_bytes_of
from port_planner.search.placement.device_memory import DeviceMemory, MemoryPool, PageTarget, held_of
from port_planner.search.placement.operator_devices import HOST
from port_planner.search.plan_problem import plan_problem

DEVICE = 1
"""Index of the memory alongside the host's (`HOST`), and of the device that computes in it, in tables of two."""
_QUICK_S = 1.0
"""Seconds of a quick plan that estimates a division within the budgets."""


@dataclass(frozen=True, slots=True)
class PlacementMemory:
    """Budgets of the memories, and costs of the device and its paging targets, as plans use them."""

    pools: Pools
    device: DeviceCosts

    @property
    def unified(self) -> bool:
        """Whether both compute in the host's memory."""
        return self.pools.device_bytes is None

    def memory(self, graph: StepGraph, homes: Mapping[str, int]) -> DeviceMemory:
        """Return what limits the choice for a graph.

        `homes`: by key, the memories in which other graphs have put lasting storages.
        """
        device, pools = self.device, self.pools
        targets = [PageTarget(DEVICE, device.flash)]
        if self.unified:
            bounds = [MemoryPool(frozenset({HOST, DEVICE}), pools.ram_bytes - device.base_bytes)]
        else:
            bounds = [
                MemoryPool(frozenset({HOST}), pools.ram_bytes - device.host_base_bytes),
                MemoryPool(frozenset({DEVICE}), pools.computing_bytes - device.base_bytes),
            ]
            if device.host is not None:
                targets.insert(0, PageTarget(DEVICE, device.host, HOST))
        return DeviceMemory((HOST, DEVICE), held_of(graph, homes, host=HOST), tuple(bounds), tuple(targets))

    def costs(self, graph: StepGraph, ops: tuple[OpCost, ...]) -> CostTable:
        """Return the costs of a graph on both; if both use one memory, the CPU's part of it
        is missing for the device.
        """
        table = CostTable(self.device, ops)
        if not self.unified:
            return table
        beside = lower(graph, table, Plan(), check_budget=False).beside_bytes
        return CostTable(replace(self.device, base_bytes=self.device.base_bytes + beside), ops)

    def planned_seconds(self, graph: StepGraph, ops: tuple[OpCost, ...]) -> float | None:
        """Return the seconds of a step within the budgets, with paging and recomputation; None if no plan was found."""
        alone = graph.device == CPU
        table = CostTable(of_the_cpu(self.device), ops) if alone else self.costs(graph, ops)
        budget = self.pools.ram_bytes if alone else self.pools.computing_bytes
        plan = plan_problem(graph, table, budget, "greedy", _QUICK_S, NO_LIMITS).solved().plan
        if plan is None:
            return None
        program = lower(graph, table, plan)
        if (
            not alone
            and not self.unified
            and self.device.host_base_bytes + host_bytes_of((program,)) > self.pools.ram_bytes
        ):
            return None
        return program.seconds


def of_the_cpu(device: DeviceCosts) -> DeviceCosts:
    """Return the costs of a step in which the device takes no part, so that all is in the host's memory."""
    if device.host is None:
        return device
    media = tuple(target for target in device.scratch_targets if target.capacity_bytes is None)
    return replace(device, base_bytes=device.host_base_bytes, host_base_bytes=0, scratch_targets=media)
