"""Plan the steps of a bundle again for the speeds that were measured.

If compute, reads and writes are all slower by one factor, the plans remain the best; if their proportions change, other
tensors are worth paging. The budgets stay. So no new plan needs more memory than the dry run of the old one measured,
and nothing is written more often than the limits or the old plan allow.
"""

from collections.abc import Callable
from dataclasses import replace

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import Revision
from port_planner.ir.costs import CostTable, Speeds
from port_planner.ir.plan import Plan
from port_planner.search.pareto import choice_of, full_batches, point_of
from port_planner.search.plan_problem import PlanProblem, plan_problem
from port_planner.search.plan_step import PlanResult

HEADROOM_SHARE = 0.01
"""Share of a plan's budget that stays free, as when the bundle was created."""
SEARCH_S = 20.0
OUT_OF_PROPORTION = 1.25
"""Change of the proportions of compute, reads and writes below which the search finds the same
plans, or hardly better ones.
"""
Solver = Callable[[PlanProblem, Plan], PlanResult]
"""Returns the best plan for a problem, no worse than the known one."""


def solved_here(problem: PlanProblem, known: Plan) -> PlanResult:
    """Return the result of planning on this device."""
    return problem.solved(rivals=(known,))


def at_speeds(costs: CostTable, speeds: Speeds) -> CostTable:
    """Return the costs of a step at these speeds, with unchanged watts.

    The figures stay for several media, or for one with packed pages: the observed seconds are those of all media
    together, or of other bytes.
    """
    flash, pace = costs.device.flash, speeds.compute
    if not costs.device.scratch_targets and not flash.packs_pages:
        flash = replace(
            flash,
            read_bytes_per_s=speeds.read_bytes_per_s or flash.read_bytes_per_s,
            write_bytes_per_s=speeds.write_bytes_per_s or flash.write_bytes_per_s,
        )
    ops = tuple(replace(c, seconds=c.seconds * pace, joules=c.joules * pace) for c in costs.ops)
    packings = tuple(
        replace(c, pack_seconds=c.pack_seconds * pace, unpack_seconds=c.unpack_seconds * pace, joules=c.joules * pace)
        for c in costs.packings
    )
    return CostTable(replace(costs.device, flash=flash), ops, packings)


def in_proportion(before: CostTable, after: CostTable) -> bool:
    """Return whether compute, reads and writes slowed down by about the same factor, so that the
    best plan stays the best.
    """
    old, new = before.device.flash, after.device.flash
    pace = sum(c.seconds for c in after.ops) / sum(c.seconds for c in before.ops)
    factors = (pace, old.read_bytes_per_s / new.read_bytes_per_s, old.write_bytes_per_s / new.write_bytes_per_s)
    return max(factors) <= OUT_OF_PROPORTION * min(factors)


def revise(bundle: Bundle, speeds: Speeds, search_s: float = SEARCH_S, solve: Solver = solved_here) -> Revision:
    """Return the bundle's plans with their figures at these speeds, planned again if the proportions changed.

    A new plan that costs more energy and wear than the old one is discarded.
    """
    costs = {name: at_speeds(table, speeds) for name, table in bundle.costs.items()}
    manifest = bundle.manifest
    main = manifest.main_graph
    searched = set[str]()
    if not in_proportion(bundle.costs[main], costs[main]):
        searched = set(full_batches(bundle.graphs, manifest.accumulate))
    plans, choices = [], []
    for number, (old, choice) in enumerate(zip(bundle.plans, manifest.plans, strict=True)):
        new = {name: point_of(bundle.graphs[name], costs[name], plan).plan for name, plan in old.items()}
        limits = manifest.limits
        if number:  # a plan for days with few writes left keeps writing as little
            limits = replace(limits, written_bytes=choice.written_bytes, step_s=None)
        strategy, seconds = ("greedy", 1.0) if number else ("milp", search_s)
        for name in searched:
            ram_bytes = int(choice.ram_bytes * (1 - HEADROOM_SHARE))
            problem = plan_problem(bundle.graphs[name], costs[name], ram_bytes, strategy, seconds, limits)
            new[name] = solve(problem, new[name]).plan or new[name]
        plans.append(new)
        choices.append(choice_of(choice.ram_bytes, new, bundle.graphs, costs, manifest.accumulate))
    return Revision(bundle.id, speeds, tuple(choices), plans, costs)
