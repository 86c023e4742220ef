"""The choice between whole, halves and tiles: the cheapest within the budget, made before any dry run, and again
with a dry run's findings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from port_agent.prepare.tiling.channels import in_channels
from port_agent.prepare.tiling.tiled_job import CutTarget, PlanCost, TiledJob, cost_of_plan
from port_agent.prepare.tiling.tiling_search import MAX_ESTIMATED_RATIO, TilingSearch, cpu_s
from port_agent.prepare.tiling.weight_blocks import in_blocks
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import PlannedLimits
from port_planner.ir.costs import DeviceCosts

_Result = TypeVar("_Result")


CLOSE, APART = 0.01, 0.05
"""Shares of the joules: if quick plans of candidates differ by less than the second, the candidates may be planned
properly before the choice; if by at least the first, only once the savings are known to be small.
"""

SEARCH_S, MIN_SEARCH_S = 60.0, 6.0
"""CPU seconds for comparing, measuring and planning the candidates of one budget, after which nothing more is changed.

The shorter limit applies if the whole has a plan, because tiling can then only reduce the cost.
"""

QUICK_S = 5.0
"""Seconds of planning for each candidate that is compared."""


def choose_tiling(
    whole: TiledJob,
    presplit: TiledJob,
    target: CutTarget,
    planner: make_bundle.PlanFunction,
    limits: PlannedLimits,
    *,
    reordered: bool = False,
) -> TiledJob:
    """Return the job whole, in halves or with tiled chains of operators, whichever costs least for `target`.

    Graphs of further shapes stay as they are in `presplit` (`further_shapes`). `reordered`: whether chains may sum over
    their tiles in a different order than the whole. All candidates are compared and measured. Quick plans decide; if
    these are close, `planner` plans their choice, the halves and the whole. If nothing fits, the candidate that needs
    least is returned. Raises DryRunError if a process fails.
    """
    device, ram_bytes, allowed, progress = target.device, target.ram_bytes, target.allowed, target.progress
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=QUICK_S, limits=limits)
    least = cost_of_plan(whole, device, ram_bytes, quick)
    if least is not None and least.keeps_everything:
        return whole
    best: PlanCost | None = None
    blocked = in_blocks(presplit, device, ram_bytes, allowed, progress)
    in_rows = [blocked] if blocked.captured.blocks else []
    presplit = presplit if in_rows else blocked  # the same, and why no weight is in blocks
    by_channels = in_channels(presplit, device, ram_bytes, allowed, progress)
    job = list[TilingSearch]()
    search_s = SEARCH_S if least is None else MIN_SEARCH_S
    for base in (presplit, *by_channels, *in_rows):
        known = [found.joules for found in (least, best) if found is not None]
        candidates = TilingSearch(
            whole, base, target, quick, search_s, min(known, default=math.inf), reordered=reordered
        )
        candidates.plan_starts()
        candidates.plan_changes(math.inf if least is None else MAX_ESTIMATED_RATIO * least.joules)
        job.append(candidates)
        if candidates.best is not None and (best is None or candidates.best.joules < best.joules):
            best = candidates.best
    if best is None:
        return whole if least is not None else job[-1].nearest()
    if least is not None and least.joules <= best.joules:
        return whole
    split = [found] if (found := job[0].untiled) is not None and found is not best else []
    planned = [best, *split, *([] if least is None else [least])]
    return best_candidate(planned, lambda tiled: cost_of_plan(tiled, device, ram_bytes, planner), job[-1].end_s).sliced


def best_candidate(
    quick: Sequence["PlanCost"], plan: Callable[[TiledJob], "PlanCost | None"], end_s: float = math.inf
) -> "PlanCost":
    """Return the candidate whose `plan` costs least, among those with `quick` plans; if none has another plan, the
    cheapest of the quick ones.

    If the costs are close, the candidates are planned one after another, the cheapest first, until `end_s` of CPU time.
    This continues while the next one could win if planning saved twice the largest share that it has saved so far.
    """
    found: PlanCost | None = None
    saved = 0.0
    order = sorted(quick, key=lambda one: one.joules)
    if all(one.joules * (1 - APART) >= order[0].joules for one in order[1:]):
        return order[0]
    for one in order:
        if cpu_s() > end_s:
            break
        if found is not None and one.joules * (1 - max(2 * saved, CLOSE)) >= found.joules:
            break
        better = plan(one.sliced)
        if better is not None:
            saved = max(saved, 1 - better.joules / one.joules)
            found = better if found is None or better.joules < found.joules else found
    return found or order[0]


def again_with_base(make: Callable[[DeviceCosts, bool], _Result], device: DeviceCosts) -> _Result:
    """Return the result of `make` for `device`; if nothing fits, once more with the memory that a dry
    run found besides the step.

    `make` is called with a device and whether this is its last call. Tilings are chosen before any dry run. Near the
    least memory of the step, others are needed if the worker holds more than the measurements of single operators show.
    Raises InfeasibleError if nothing fits then either, or if no dry run found more.
    """
    try:
        return make(device, False)
    except make_bundle.InfeasibleError as error:
        if error.base_bytes is None or not error.found_more_than(device):
            raise
        return make(replace(device, base_bytes=error.base_bytes), True)
