"""Convolutions' backward passes in halves, pointwise operators in place, and convolutions of single
pixels as products of matrices.
"""

from dataclasses import replace

from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling.comparing import costs_of_rewritten, rewritten_alike
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob
from port_planner.ir.costs import OpCost
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.gradients import split_gradients, split_gradients_by_mask
from port_planner.tiling.in_place import write_in_place
from port_planner.tiling.pixels import as_products
from port_planner.tiling.rewriting import compacted


def with_split_gradients(
    captured: CapturedJob, measured: MeasuredCosts, allowed: ComparisonLimits, compute_watts: float, progress: Progress
) -> TiledJob:
    """Return the job with every convolution's backward pass in halves and pointwise operators in place, measured again.

    Convolutions of single pixels become matrix products if that is cheaper. Raises DryRunError if a process that
    compares or measures fails.
    """
    split, left = rewritten_alike(captured, split_gradients, allowed)
    if left:  # this processor's kernels add in another order: halves that are both the backward pass may have its bits
        split, left = rewritten_alike(replace(captured, graphs=split), split_gradients_by_mask, allowed)
    graphs, odd = rewritten_alike(replace(captured, graphs=split), write_in_place, allowed)
    left += odd
    tiled = TiledJob(captured, measured, tuple(left))
    if any(graphs[name] != graph for name, graph in captured.graphs.items()):
        graphs = {name: compacted(graph) for name, graph in graphs.items()}
        again = costs_of_rewritten(graphs, measured, allowed, compute_watts, progress)
        tiled = TiledJob(replace(captured, graphs=graphs), again, tuple(left))
    return with_products(tiled, allowed, compute_watts, progress)


def with_products(tiled: TiledJob, allowed: ComparisonLimits, compute_watts: float, progress: Progress) -> TiledJob:
    """Return the job with convolutions of single pixels as matrix products, except where
    products would take more joules.

    Raises DryRunError if a process that compares or measures fails.
    """
    before = tiled.captured.graphs
    graphs, left = rewritten_alike(tiled.captured, as_products, allowed)
    if graphs == before:
        return replace(tiled, left_whole=(*tiled.left_whole, *left))
    fresh = costs_of_rewritten(graphs, tiled.measured, allowed, compute_watts, progress)
    tables = list[tuple[OpCost, ...]]()
    for (name, graph), old, new in zip(before.items(), tiled.measured.ops, fresh.ops, strict=True):
        chosen = [mine.joules <= theirs.joules for mine, theirs in zip(new, old, strict=True)]
        ops = tuple(
            graphs[name].ops[i] if yes else op for i, (op, yes) in enumerate(zip(graph.ops, chosen, strict=True))
        )
        graphs[name] = compacted(replace(graphs[name], ops=ops))
        tables.append(tuple(mine if yes else theirs for mine, theirs, yes in zip(new, old, chosen, strict=True)))
    made = replace(tiled.captured, graphs=graphs)
    return TiledJob(made, replace(tiled.measured, ops=tuple(tables)), (*tiled.left_whole, *left))
