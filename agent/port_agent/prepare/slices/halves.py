"""Convolutions' backward passes in halves, pointwise operators in place, and convolutions of single pixels as products of matrices."""

from dataclasses import replace

from port_agent.prepare.progress import Progress
from port_agent.prepare.slices.comparing import costs_of_rewritten, rewritten_alike
from port_agent.prepare.slices.sliced import ComparingRoom, Sliced
from port_planner.ir.costs import OpCost
from port_planner.make_bundle import Prepared
from port_planner.profiling.operators import Measured
from port_planner.slices.gradients import split_gradients
from port_planner.slices.in_place import write_in_place
from port_planner.slices.pixels import as_products
from port_planner.slices.rewriting import compacted


def in_halves(
    prepared: Prepared, measured: Measured, room: ComparingRoom, compute_watts: float, progress: Progress
) -> Sliced:
    """Return the job with every convolution's backward pass in halves and pointwise operators in place, measured anew.

    Convolutions of single pixels are products of matrices where that pays.

    Raises TrialError where a process that compares or measures fails.
    """
    halves, left = rewritten_alike(prepared, split_gradients, room)
    graphs, odd = rewritten_alike(replace(prepared, graphs=halves), write_in_place, room)
    left += odd
    sliced = Sliced(prepared, measured, tuple(left))
    if any(graphs[name] != graph for name, graph in prepared.graphs.items()):
        graphs = {name: compacted(graph) for name, graph in graphs.items()}
        again = costs_of_rewritten(graphs, measured, room, compute_watts, progress)
        sliced = Sliced(replace(prepared, graphs=graphs), again, tuple(left))
    return with_products(sliced, room, compute_watts, progress)


def with_products(sliced: Sliced, room: ComparingRoom, compute_watts: float, progress: Progress) -> Sliced:
    """Return the job with those convolutions of single pixels as products of matrices that take no more joules so.

    Raises TrialError where a process that compares or measures fails.
    """
    before = sliced.prepared.graphs
    graphs, left = rewritten_alike(sliced.prepared, as_products, room)
    if graphs == before:
        return replace(sliced, left_whole=(*sliced.left_whole, *left))
    fresh = costs_of_rewritten(graphs, sliced.measured, room, compute_watts, progress)
    tables = list[tuple[OpCost, ...]]()
    for (name, graph), old, new in zip(before.items(), sliced.measured.ops, fresh.ops, strict=True):
        chosen = [mine.joules <= theirs.joules for mine, theirs in zip(new, old, strict=True)]
        ops = tuple(
            graphs[name].ops[i] if yes else op for i, (op, yes) in enumerate(zip(graph.ops, chosen, strict=True))
        )
        graphs[name] = compacted(replace(graphs[name], ops=ops))
        tables.append(tuple(mine if yes else theirs for mine, theirs, yes in zip(new, old, chosen, strict=True)))
    made = replace(sliced.prepared, graphs=graphs)
    return Sliced(made, replace(sliced.measured, ops=tuple(tables)), (*sliced.left_whole, *left))
