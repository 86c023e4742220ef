"""Write the planning model of a captured step as a readable file, with the names of FORMULATION.md and a legend."""

from collections.abc import Iterator
from pathlib import Path

from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Plan
from port_planner.milp.highs import HighsSession
from port_planner.milp.milp_model import Formulation
from port_planner.problem.coarsen import Coarse, coarsen
from port_planner.search.anytime import captured_breadth


def write_model(path: Path, graph: StepGraph, costs: CostTable, plan: Plan, *, deadline_s: float | None = None) -> None:
    """Write the model that is searched for a plan such as `plan`, with its budget and order of operators.

    It is in the LP format, at the breadth of the search of neighbourhoods, before anything is
    fixed. Raises ModelFileError.
    """
    coarse = coarsen(graph, costs, ram_bytes=plan.ram_bytes, deadline_s=deadline_s, order=plan.order)
    formulation = Formulation(coarse.problem, captured_breadth(coarse.problem))
    HighsSession(formulation.model).write(path, _legend(coarse, formulation))


def _legend(coarse: Coarse, formulation: Formulation) -> Iterator[str]:
    problem = coarse.problem
    budget = format_bytes(problem.ram_bytes) if problem.ram_bytes is not None else "no budget"
    yield f"The planning model of a step: {problem.size} stages, {len(problem.tensors)} tensors, {budget} beside what is always held."
    yield "Columns k, x, y, q, c, z, a, o, h, w and rows eq1 to eq10: planner/port_planner/milp/FORMULATION.md."
    yield (
        f"Units: 1 is {format_bytes(round(formulation.byte_scale))} in memory and wear rows, "
        f"{format_seconds(formulation.second_scale)} in time rows, {formulation.joule_scale:.3g} J in the objective."
    )
    yield "Targets d: " + ", ".join(f"{d} {name}" for d, name in enumerate(problem.targets))
    for s, (first, last) in enumerate(coarse.ranges):
        names = f"{coarse.graph.ops[first].name} to {coarse.graph.ops[last].name}"
        yield f"s = {s}: operators {first} to {last} ({names}), {format_seconds(problem.stages[s].seconds)}"
    for i, tensor in enumerate(problem.tensors):
        yield f"i = {i}: {tensor.name}, {format_bytes(tensor.nbytes)}"
    for g in formulation.gaps:
        gap = problem.gaps[g]
        yield f"g = {g}: tensor {gap.tensor} ({problem.tensors[gap.tensor].name}) between stages {gap.after} and {gap.before}"
