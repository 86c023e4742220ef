"""Choose how to tile a graph's chains with one model that also decides pages and rematerializations of all tensors."""

from dataclasses import replace

from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession
from port_planner.milp.milp_model import Formulation
from port_planner.milp.telescoped import telescoped
from port_planner.problem.coarsen import coarsen
from port_planner.tiling.stage_groups import chain_groups
from port_planner.tiling.tilings import Tiling

CLOSE_ENOUGH = 1e-3
"""Share of the step's joules: two tilings that differ by less count as equally good."""

BREADTH = Breadth(0, 2, early_pages=False, timeless=True, optimistic=True)
"""Tensors come back at the ends of their gaps, with the intermediates that this takes.

Without intermediates (`anytime.SMALLEST`), recomputing seems so cheap that no tiling pays. What they hold at their
stage is left out, because in tiles it is little.
"""


def solve_tiling(graph: StepGraph, costs: CostTable, ram_bytes: int, cut: Tiling, time_limit_s: float) -> Tiling | None:
    """Return a tiling of these chains: each kind in the number of tiles that costs least,
    counting what it allows to keep.

    Alternatives are whole decisions of the model, all else may be fractional: an estimate, not a bound. None if
    nothing was found in time.
    """
    coarse = coarsen(graph, costs, ram_bytes=ram_bytes)
    found = chain_groups(coarse, cut)
    if not found.groups:
        return cut.changed_all(1)
    problem = replace(coarse.problem, groups=found.groups)
    formulation = Formulation(problem, BREADTH)
    model = formulation.model
    model.integral = [False] * model.columns
    for column in formulation.variants.values():
        model.integral[column] = True
    near = CLOSE_ENOUGH * problem.base_joules / formulation.joule_scale
    run = HighsSession(telescoped(model), sub_models=False).run(time_limit_s, gap=0.0, absolute_gap=near)
    return None if run.values is None else found.chosen(cut, dict(formulation.schedule(run.values).variants))
