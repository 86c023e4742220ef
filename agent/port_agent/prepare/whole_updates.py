"""Jobs that sum gradients over micro-batches: one graph for a whole update, if that moves less
data than micro-batches do.
"""

from collections.abc import Sequence
from dataclasses import replace

from port_planner.ir.bundle.manifest import WHOLE_UPDATE
from port_planner.ir.costs import CostTable, DeviceCosts, OpCost
from port_planner.ir.graph import StepGraph, operands
from port_planner.ir.lowering.lower import lower
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.program import Program
from port_planner.make_bundle import CapturedJob, PlanFunction
from port_planner.problem.whole_update import WholeUpdate, whole_update
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.pareto import full_batches


def with_whole_update(
    captured: CapturedJob, measured: MeasuredCosts, device: DeviceCosts, ram_bytes: int, quick: PlanFunction
) -> tuple[CapturedJob, MeasuredCosts]:
    """Return the same with the graph of a whole update and its costs, if `quick` plans of it cost less energy and wear.

    The worker runs it whenever all micro-batches of an update exist; the other graphs stay for the rest.
    """
    counts = full_batches(captured.graphs, captured.job.accumulate)
    if captured.known is not None and captured.known.numbers:  # each batch has its own
        return captured, measured
    if captured.placed or captured.teams:  # their operators have costs where they were placed, batch by batch
        return captured, measured
    if captured.job.accumulate == 1 or WHOLE_UPDATE in counts or "last" not in counts:
        return captured, measured
    tables = dict(zip(captured.graphs, measured.ops, strict=True))
    names = [name for name, count in counts.items() for _ in range(count)]
    graphs = [captured.graphs[name] for name in names]
    ops = [tables[name] for name in names]

    def program_of(graph: StepGraph, costs: CostTable) -> Program | None:
        plan = quick(graph, costs, ram_bytes).plan
        return None if plan is None else lower(graph, costs, plan)

    alone = {name: program_of(captured.graphs[name], CostTable(device, tables[name])) for name in counts}
    if all(program is not None and not program.read_bytes for program in alone.values()):
        return captured, measured
    best = _total([alone[name] for name in names])
    found: tuple[StepGraph, tuple[OpCost, ...]] | None = None
    for remake in (False, True):
        update = whole_update(graphs, ram_bytes - device.base_bytes, remake=remake)
        if update is None:
            break
        costs = merged_costs(update, ops)
        joules = _total([program_of(update.graph, CostTable(device, costs))])
        if joules is not None and (best is None or joules < best):
            best, found = joules, (update.graph, costs)
    if found is None:
        return captured, measured
    verify_operands(found[0])
    return (
        replace(captured, graphs={**captured.graphs, WHOLE_UPDATE: found[0]}),
        replace(measured, ops=(*measured.ops, found[1])),
    )


def merged_costs(update: WholeUpdate, ops: Sequence[Sequence[OpCost]]) -> tuple[OpCost, ...]:
    """Return the costs of an update's operators from those of its micro-batches.

    The first random operator includes memory for all of them to draw once before it.
    """
    graph = update.graph
    costs = [ops[m][i] for m, i in update.origin]
    if graph.draws:
        first = min(i for together in graph.draws for i in together)
        drawing = max(_bytes_of(graph, together[0]) for together in graph.draws)
        costs[first] = replace(costs[first], workspace_bytes=max(costs[first].workspace_bytes, drawing))
    return tuple(costs)


def _bytes_of(graph: StepGraph, i: int) -> int:
    taken = sum(graph.storages[graph.values[v].storage].nbytes for v in operands(graph.ops[i]))
    return taken + sum(graph.storages[s].nbytes for s in graph.creates[i])


def _total(programs: Sequence[Program | None]) -> float | None:
    """Return the joules, wear included; None if there is no program."""
    found = [program for program in programs if program is not None]
    return sum(p.joules + p.wear_joules for p in found) if len(found) == len(programs) else None
