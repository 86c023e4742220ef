"""Plans of a step for batches of another shape, transferred from a step of the same program that has one.

The same operators have the same places in both (`planner.ir.graph.structure`), so every decision can be read as one of the other step. What a
smaller step has room for is taken back, the dearest first. A transferred plan is lowered like any other; it is believed for what its
program takes, and only where that is no dearer than it was where it comes from.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from planner.ir.costs import CostTable
from planner.ir.graph import StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.plan import Action, Decision, Plan
from planner.ir.program import PlanError, Program
from planner.search.plan_step import PlanLimits, base_joules, with_figures

WORTH_SEARCHING = 0.01
"""Of a step's joules: a transferred plan may cost so much more, as a share of its own step, than it does where it comes from."""


def transferred(graph: StepGraph, costs: CostTable, limits: PlanLimits, plan: Plan, share: float) -> Plan | None:
    """Return a plan for a step that keeps everything where that fits, else one that does what `plan` does, or less of it.

    `plan`: of a step of the same structure; `share`: the overhead that a search left there, as a share of that step's joules. None where the plan
    does not keep within the limits here, or costs more than `WORTH_SEARCHING` beyond that share: then a search is worth its time.
    """
    kept = _program(graph, costs, limits, Plan())
    if kept is not None:
        return with_figures(Plan(ram_bytes=limits.ram_bytes), costs, kept, 0.0)
    least = _least(graph, costs, limits, replace(plan, ram_bytes=limits.ram_bytes))
    if least is None or least.overhead_joules > (share + WORTH_SEARCHING) * base_joules(costs):
        return None
    return replace(least, bound_joules=None)


def overhead_share(plan: Plan, costs: CostTable) -> float:
    """Return what a plan costs beyond its step, as a share of the step's joules."""
    base = base_joules(costs)
    return plan.overhead_joules / base if base > 0 else 0.0


def _least(graph: StepGraph, costs: CostTable, limits: PlanLimits, plan: Plan) -> Plan | None:
    """Return a plan with as few of these decisions as keep within the limits, the dearest for its bytes left out first."""
    whole = _program(graph, costs, limits, plan)
    if whole is None:
        return None
    by_storage = defaultdict[int, list[Decision]](list)
    for decision in plan.decisions:
        if decision.action is not Action.INTERMEDIATE:
            by_storage[decision.storage].append(decision)
    ordered = graph.reordered(plan.order) if plan.order else graph
    ordered_costs = costs.reordered(plan.order) if plan.order else costs
    dear = sorted(by_storage, key=lambda s: -_joules_per_byte(ordered, ordered_costs, by_storage[s]))

    def without(count: int) -> Plan:
        return _without(plan, frozenset(dear[:count]))

    def too_much(count: int) -> bool:
        return _program(graph, costs, limits, without(count)) is None

    count = bisect.bisect_left(range(1, len(dear) + 1), True, key=too_much)
    made = [with_figures(plan, costs, whole)]
    less = _program(graph, costs, limits, without(count)) if count else None
    if less is not None:
        made.append(with_figures(without(count), costs, less))
    return min(made, key=lambda one: one.overhead_joules)


def _without(plan: Plan, storages: frozenset[int]) -> Plan:
    """Return a plan that decides nothing about these storages, nor computes again what nothing is computed of any more."""
    left = [d for d in plan.decisions if d.storage not in storages or d.action is Action.INTERMEDIATE]
    computing = {d.before for d in left if d.action is Action.RECOMPUTE}
    kept = tuple(d for d in left if d.action is not Action.INTERMEDIATE or d.before in computing)
    return replace(plan, decisions=kept)


def _joules_per_byte(graph: StepGraph, costs: CostTable, decisions: Iterable[Decision]) -> float:
    """Return what decisions about one storage cost, for each of its bytes."""
    joules, nbytes = 0.0, 1
    for d in decisions:
        nbytes = max(graph.sizes[d.storage], 1)
        if d.action is Action.RECOMPUTE:
            joules += sum(costs.ops[w].joules for w in graph.writers[d.storage] if w <= d.after)
        elif d.action is Action.PAGE:
            target = costs.device.targets[d.target]
            joules += nbytes * (target.read_joules_per_byte + target.written_cost_joules_per_byte)
        else:
            joules += sum(p.joules for p in costs.packings if p.storage == d.storage)
    return joules / nbytes


def _program(graph: StepGraph, costs: CostTable, limits: PlanLimits, plan: Plan) -> Program | None:
    """Return the program of a plan that keeps within the limits; None where it is none, or does not."""
    try:
        program = lower(graph, costs, replace(plan, ram_bytes=limits.ram_bytes))
    except PlanError:
        return None
    return None if limits.passed_by(program) else program
