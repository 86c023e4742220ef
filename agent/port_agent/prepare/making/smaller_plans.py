"""A bundle's further plans: for smaller budgets, to which the agent switches when memory gets short, and
one that reduces flash wear.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from port_agent.prepare.making.refinement import Refinement, quick_planner
from port_agent.prepare.making.unplanned import target_bytes
from port_agent.prepare.measurement.dry_run import DryRun
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.plan import Plan
from port_planner.make_bundle import InfeasibleError, PlanFunction
from port_planner.search import pareto
from port_planner.search.pareto import point_of

_NARROW, _WIDE = 2, 6
"""Number of plans for smaller budgets: by the quick planner, and by the chosen one, which takes longer for each."""
_SPARED_WRITES = 0.25
"""Share of the first plan's writes that a plan may make on days when the allowance of flash writes runs short."""


@dataclass(frozen=True, slots=True)
class SmallerPlans:
    """Plans of a bundle's graphs for a budget below its own, or that write less."""

    plans: Mapping[str, Plan]
    ram_bytes: int
    keeps_limits: bool
    """Whether the smaller plans meet the deadline, if the bundle has one."""


def smaller_plans(refinement: Refinement, planner: PlanFunction | None) -> list[SmallerPlans]:
    """Plan for smaller budgets than the draft's first plan, and once more to reduce flash wear.

    Without a planner, quick ones make fewer plans.
    """
    limits, target = refinement.bundle_file.limits, target_bytes(refinement.pools)
    limited, count = (quick_planner(limits), _NARROW) if planner is None else (planner, _WIDE)
    late = None if limits.step_s is None else quick_planner(replace(limits, step_s=None))
    bundle = Bundle(refinement.bundle_file.path)
    single = bundle.manifest.graphs[0]
    budgets = pareto.budgets(bundle.graphs[single], bundle.costs[single], target, count + 1)[1:]
    least = refinement.start_bytes if refinement.pools.device_bytes is None else 0
    tries = [(budget, limited, True) for budget in budgets if budget >= least]
    written = bundle.manifest.plans[0].written_bytes
    if written and refinement.device.flash.wear_joules_per_byte:
        sparing = replace(limits, step_s=None, written_bytes=int(written * _SPARED_WRITES))
        tries.insert(0, (target, quick_planner(sparing), limits.step_s is None))
    found = []
    for budget, chosen, keeping in tries:
        plans = _planned(refinement, budget, chosen)
        if plans is None and late is not None:
            plans, keeping = _planned(refinement, budget, late), False
        if plans is not None:
            found.append(SmallerPlans(plans, budget, keeping))
    return found


def _planned(refinement: Refinement, ram_bytes: int, planner: PlanFunction) -> dict[str, Plan] | None:
    try:
        return refinement.planned(ram_bytes, planner)[0]
    except InfeasibleError:
        return None


def with_cheapest_first(refinement: Refinement, smaller: Sequence[SmallerPlans], found: DryRun) -> DryRun:
    """Replace the first plan by plans for smaller budgets if they cost less, and return a dry run of the result.

    If they take unplanned memory in that dry run, the first plan stays, with what was `found`.
    """
    bundle, device = Bundle(refinement.bundle_file.path), refinement.device
    keeping = [one.plans for one in smaller if one.keeps_limits]
    cheapest = {
        name: pareto.cheapest_within(plan, (plans[name] for plans in keeping)) for name, plan in bundle.plans[0].items()
    }
    if cheapest == bundle.plans[0]:
        return found
    again, final = refinement.run(cheapest, bundle.costs)
    if final:
        return again
    refinement.device = device
    refinement.bundle_file.put([bundle.plans[0]], bundle.costs, [refinement.pools.computing_bytes])
    return found


def with_smaller_plans(refinement: Refinement, smaller: Sequence[SmallerPlans]) -> Manifest:
    """Add plans after the draft's own, except those that another plan beats, and return its manifest."""
    bundle = Bundle(refinement.bundle_file.path)
    main = bundle.manifest.main_graph
    choices = [bundle.plans[0], *(one.plans for one in smaller)]
    limits = [refinement.pools.computing_bytes, *(one.ram_bytes for one in smaller)]
    points = [point_of(bundle.graphs[main], bundle.costs[main], c[main]) for c in choices]
    kept = [0] + [i for i in range(1, len(points)) if not any(p.dominates(points[i]) for p in points)]
    return refinement.bundle_file.put([choices[i] for i in kept], bundle.costs, [limits[i] for i in kept])
