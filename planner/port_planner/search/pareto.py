"""Plans over RAM, time, energy and bytes written to flash, none worse than another in all four,
among which an agent switches.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from port_planner.ir.bundle.manifest import WHOLE_UPDATE, PlanChoice
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.program import host_bytes_of
from port_planner.problem.coarsen import coarsen
from port_planner.search.greedy.search import smallest_budget
from port_planner.search.plan_step import HURRIED_WATTS, plan_step, with_figures
from port_planner.search.wear import with_wear


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the frontier and its needs, measured by replaying its program."""

    plan: Plan
    peak_bytes: int
    seconds: float
    joules: float
    written_bytes: int

    def dominates(self, other: "Point") -> bool:
        """Return whether this plan is at least as good in memory, time, energy and wear, and better in one."""
        pairs = tuple(zip(self.figures, other.figures, strict=True))
        return all(a <= b * (1 + 1e-9) for a, b in pairs) and any(a < b * (1 - 1e-9) for a, b in pairs)

    @property
    def figures(self) -> tuple[float, ...]:
        """The figures by which plans are compared; less is better in each."""
        return (self.peak_bytes, self.seconds, self.joules, self.written_bytes)


def non_dominated(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point dominates, by falling memory; of equal ones, the first."""
    found = list(points)
    kept: list[Point] = []
    for i, point in enumerate(found):
        beaten = any(q.dominates(point) for q in found)
        twin = any(q.figures == point.figures for q in found[:i])
        if not beaten and not twin:
            kept.append(point)
    return sorted(kept, key=lambda p: (-p.peak_bytes, p.seconds))


def min_budget(graph: StepGraph, costs: CostTable) -> int:
    """Return approximately the smallest budget, worker base included, that has a plan."""
    problem = coarsen(graph, costs, ram_bytes=None).problem
    return smallest_budget(problem) + costs.device.base_bytes


def budgets(graph: StepGraph, costs: CostTable, ram_bytes: int, count: int = 4) -> list[int]:
    """Return `count` budgets from `ram_bytes` down to the least, evenly spaced; None: from what
    keeping everything takes.
    """
    most = min(ram_bytes, lower(graph, costs, Plan()).peak_bytes)
    least = min(min_budget(graph, costs), most)
    if count < 2 or least >= most:
        return [most]
    return [round(most - (most - least) * k / (count - 1)) for k in range(count)]


def frontier(
    graph: StepGraph,
    costs: CostTable,
    limits: Sequence[int],
    *,
    time_limit_s: float = 20.0,
    strategy: str = "milp",
) -> list[Point]:
    """Return the non-dominated plans at these budgets: least energy and wear, least energy alone, and fast ones.

    `time_limit_s` is shared by all of them.
    """
    unworn = replace(costs, device=with_wear(costs.device, 0.0))
    hurried = replace(unworn, device=replace(unworn.device, static_watts=HURRIED_WATTS[1] + costs.device.static_watts))
    tables = tuple(dict.fromkeys((costs, unworn, hurried)))
    share = time_limit_s / max(len(tables) * len(limits), 1)
    found = [plans_within(graph, table, limits, time_limit_s=share, strategy=strategy) for table in tables]
    return non_dominated(point_of(graph, costs, plan) for plans in found for plan in plans.values())


def plans_within(
    graph: StepGraph, costs: CostTable, limits: Sequence[int], *, time_limit_s: float, strategy: str
) -> dict[int, Plan]:
    """Return a plan for each of these budgets that has one, the smallest budget first.

    `time_limit_s` is for each. More memory must never cost more. Because the search may miss the plan of
    the next smaller budget, that plan also competes. It is used unchanged if its transfers, spread over
    more memory, would cost more.
    """
    plans: dict[int, Plan] = {}
    for limit in sorted(limits):
        before = tuple(plans.values())[-1:]
        result = plan_step(graph, costs, ram_bytes=limit, time_limit_s=time_limit_s, strategy=strategy, rivals=before)
        if result.plan is not None:
            plans[limit] = cheapest_within(result.plan, before)
    return plans


def cheapest_within(plan: Plan, of_less: Iterable[Plan]) -> Plan:
    """Return the cheapest of a plan and of those for smaller budgets, which are also valid for its budget.

    The bound stays that of `plan`.
    """
    found = min((plan, *of_less), key=lambda one: one.overhead_joules)
    return replace(found, bound_joules=plan.bound_joules)


def point_of(graph: StepGraph, costs: CostTable, plan: Plan) -> Point:
    """Return the point of `plan` under these costs, even if it was made for others."""
    program = lower(graph, costs, plan)
    plan = with_figures(plan, costs, program)
    return Point(plan, program.peak_bytes, program.seconds, program.joules, program.written_bytes)


def budget_for(
    graph: StepGraph, costs: CostTable, seconds: float, limits: Sequence[int], *, strategy: str = "greedy"
) -> int | None:
    """Return the smallest of these budgets whose plan takes at most `seconds` a step; None if none does.

    The search is a bisection, because more memory never makes a step slower, except for what a heuristic misses.
    """
    if seconds < sum(c.seconds for c in costs.ops):
        return None
    ascending = sorted(limits)

    def in_time(limit: int) -> bool:
        plan = plan_step(graph, costs, ram_bytes=limit, deadline_s=seconds, strategy=strategy).plan
        return plan is not None and plan.seconds <= seconds * (1 + 1e-9)

    k = bisect.bisect_left(ascending, True, key=in_time)
    return ascending[k] if k < len(ascending) else None


def choice_of(
    ram_bytes: int,
    plans: Mapping[str, Plan],
    graphs: Mapping[str, StepGraph],
    costs: Mapping[str, CostTable],
    accumulate: int,
) -> PlanChoice:
    """Return the manifest entry of one plan per graph; its figures are averages over batches of full size.

    `ram_bytes`: budget of the memory in which operators compute. If that is a device's own memory, the
    host's budget is in the costs.
    """
    counts = full_batches(graphs, accumulate)
    total = accumulate if WHOLE_UPDATE in counts else sum(counts.values())
    programs = {name: lower(graphs[name], costs[name], plans[name]) for name in counts}

    def a_batch(figure: Callable[[str], float]) -> float:
        return sum(count * figure(name) for name, count in counts.items()) / total

    bounds = [plans[name].bound_joules for name in counts]
    peak, device_ram, device_peak = max(p.peak_bytes for p in plans.values()), 0, 0
    device = next(iter(costs.values())).device
    if device.host is not None:
        device_ram, device_peak = ram_bytes, peak
        ram_bytes = device.host_base_bytes + (device.host.capacity_bytes or 0)
        peak = device.host_base_bytes + host_bytes_of(lower(graphs[n], costs[n], plan) for n, plan in plans.items())
    return PlanChoice(
        ram_bytes,
        peak,
        a_batch(lambda name: programs[name].seconds),
        a_batch(lambda name: programs[name].joules),
        a_batch(lambda name: plans[name].overhead_joules),
        None if None in bounds else a_batch(lambda name: plans[name].bound_joules or 0.0),
        round(a_batch(lambda name: programs[name].written_bytes)),
        plans[next(iter(counts))].strategy,
        a_batch(lambda name: programs[name].wear_joules),
        device_ram,
        device_peak,
    )


def full_batches(graphs: Iterable[str], accumulate: int) -> dict[str, int]:
    """Return which graphs an update of full batches runs, and how often; a whole update represents all its batches."""
    names = tuple(graphs)
    if WHOLE_UPDATE in names or accumulate == 1 or "last" not in names:
        return {WHOLE_UPDATE if WHOLE_UPDATE in names else names[0]: 1}
    return {name: often for name, often in (("first", 1), ("next", accumulate - 2), ("last", 1)) if often}
