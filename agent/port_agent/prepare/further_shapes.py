"""Tile the graphs of further shapes in the same places as the first shape's graph, if they do not fit whole."""

from collections.abc import Set

from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling.comparing import tiled_with
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob, blocked_keys
from port_planner.ir.bundle.manifest import first_shapes, kind_of_graph
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph, operands, structure
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.tilings import Tiling, tile_fat


def with_further_shapes(
    tiled: TiledJob, device: DeviceCosts, ram_bytes: int, allowed: ComparisonLimits, progress: Progress
) -> TiledJob:
    """Return the job with graphs of further shapes tiled like the first, compared and measured, except those that fit
    whole.

    Raises DryRunError if a process that compares or measures fails.
    """
    graphs, measured = tiled.captured.graphs, tiled.measured
    first = {kind: name for name, kind in first_shapes(graphs).items()}
    tilings, apart = dict[str, Tiling](), blocked_keys(tiled)
    for (name, graph), ops in zip(graphs.items(), measured.ops, strict=True):
        like = first[kind_of_graph(name)]
        if name == like or like not in tiled.tilings or graph.device != CPU:
            continue
        kept = lower(graph, CostTable(device, ops), Plan(), check_budget=False)
        if kept.peak_bytes > ram_bytes:
            tilings[name] = tiled_like(graph, tiled.untiled[like], tiled.tilings[like], apart)
    if not tilings:
        return tiled
    (found,) = tiled_with(tiled, [tilings], allowed, device.compute_watts, progress)
    return found


def tiled_like(graph: StepGraph, other: StepGraph, tiling: Tiling, apart: Set[str] = frozenset()) -> Tiling:
    """Return the tiling of `other`, a graph of another shape, for this one: the same chains if both have the same
    values, otherwise chains of equal size.

    `apart`: as for `tile_fat`.
    """
    if _same_places(graph, other):
        return tiling
    ends = [op for chain, _ in tiling.counted for op in (chain.ops[0], chain.ops[-1])]
    fat = min((touched_bytes(other, op) for op in ends), default=0)
    return tile_fat(graph, max(fat - 1, 0), max((count for _, count in tiling.counted), default=1), apart)


def _same_places(one: StepGraph, other: StepGraph) -> bool:
    """Return whether the operators of two graphs take and return the same values, by number."""
    if one.once(structure) != other.once(structure) or len(one.values) != len(other.values):
        return False
    return all(
        a.outputs == b.outputs and [*operands(a)] == [*operands(b)] for a, b in zip(one.ops, other.ops, strict=True)
    )
