"""Plans of a step for batches of another shape, transferred from a planned step of the same program.

The same operators have the same places in both (`port_planner.ir.graph.structure`), so every decision applies to the
other step. Decisions that a smaller step does not need are left out, the costliest first. A transferred plan is lowered
like any other. It is used only if its program costs almost nothing beyond the step itself, so that no search would find
a noticeably cheaper one.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import PlanError, Program
from port_planner.search.plan_step import PlanLimits, base_joules, with_figures

WORTH_SEARCHING = 0.01
"""Share of a step's joules: a transferred plan with a larger overhead is rejected."""

LEFT_OUT = (1.0, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 0.0)
"""Shares of the storages in a plan's decisions that a smaller step may keep, tried in this order."""


def transferred(graph: StepGraph, costs: CostTable, limits: PlanLimits, plan: Plan) -> Plan | None:
    """Return a plan for a step that keeps everything if that fits; otherwise one that applies `plan`, or a part of it.

    `plan`: a plan of a step with the same structure. None if it exceeds the limits here, or costs more than
    `WORTH_SEARCHING` of the step's joules: then a search is worth its time.
    """
    kept = _program(graph, costs, limits, Plan())
    if kept is not None:
        return with_figures(Plan(ram_bytes=limits.ram_bytes), costs, kept, 0.0)
    max_joules = WORTH_SEARCHING * base_joules(costs)
    by_storage = defaultdict[int, list[Decision]](list)
    for decision in plan.decisions:
        if decision.action is not Action.INTERMEDIATE:
            by_storage[decision.storage].append(decision)
    ordered = graph.reordered(plan.order) if plan.order else graph
    ordered_costs = costs.reordered(plan.order) if plan.order else costs
    joules = {s: _joules(ordered, ordered_costs, decisions) for s, decisions in by_storage.items()}
    expensive = sorted(joules, key=lambda s: -joules[s] / max(ordered.sizes[s], 1))
    for share in LEFT_OUT:
        out = expensive[: int(share * len(expensive))]
        if sum(joules.values()) - sum(joules[s] for s in out) > max_joules:
            return None
        less = replace(_without(plan, frozenset(out)), ram_bytes=limits.ram_bytes)
        program = _program(graph, costs, limits, less)
        if program is not None:
            found = with_figures(less, costs, program)
            return found if found.overhead_joules <= max_joules else None
    return None


def _without(plan: Plan, storages: frozenset[int]) -> Plan:
    """Return a plan without decisions about these storages, and without recomputation that only they needed."""
    left = [d for d in plan.decisions if d.storage not in storages or d.action is Action.INTERMEDIATE]
    computing = {d.before for d in left if d.action is Action.RECOMPUTE}
    kept = tuple(d for d in left if d.action is not Action.INTERMEDIATE or d.before in computing)
    return replace(plan, decisions=kept)


def _joules(graph: StepGraph, costs: CostTable, decisions: Iterable[Decision]) -> float:
    """Return the joules of decisions about one storage, without waits."""
    joules = 0.0
    for d in decisions:
        if d.action is Action.RECOMPUTE:
            joules += sum(costs.ops[w].joules for w in graph.writers[d.storage] if w <= d.after)
        elif d.action is Action.PAGE:
            target = costs.device.targets[d.target]
            joules += graph.sizes[d.storage] * (target.read_joules_per_byte + target.written_cost_joules_per_byte)
        else:
            joules += sum(p.joules for p in costs.packings if p.storage == d.storage)
    return joules


def _program(graph: StepGraph, costs: CostTable, limits: PlanLimits, plan: Plan) -> Program | None:
    """Return the program of a plan that respects the limits, or None."""
    try:
        program = lower(graph, costs, replace(plan, ram_bytes=limits.ram_bytes))
    except PlanError:
        return None
    return None if limits.passed_by(program) else program
