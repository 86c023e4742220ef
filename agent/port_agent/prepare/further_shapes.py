"""Graphs of further shapes in pieces: cut where the first shape's graph is, as far as they have no room whole."""

from collections.abc import Set

from port_agent.prepare.progress import Progress
from port_agent.prepare.slices.comparing import cut_in
from port_agent.prepare.slices.sliced import ComparingRoom, Sliced, keys_in_blocks
from port_planner.ir.bundle.manifest import first_shapes, kind_of_graph
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.devices.kinds import CPU
from port_planner.ir.graph import StepGraph, operands, structure
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.slices.chains import touched_bytes
from port_planner.slices.choices import Cut, cut_fat


def with_further_shapes(
    sliced: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom, progress: Progress
) -> Sliced:
    """Return the job with graphs of further shapes in pieces as those of the first are, compared and measured, but for what has room whole.

    Raises TrialError where a process that compares or measures fails.
    """
    graphs, measured = sliced.prepared.graphs, sliced.measured
    first = {kind: name for name, kind in first_shapes(graphs).items()}
    cuts, apart = dict[str, Cut](), keys_in_blocks(sliced)
    for (name, graph), ops in zip(graphs.items(), measured.ops, strict=True):
        like = first[kind_of_graph(name)]
        if name == like or like not in sliced.cuts or graph.device != CPU:
            continue
        kept = lower(graph, CostTable(device, ops), Plan(), check_budget=False)
        if kept.peak_bytes > ram_bytes:
            cuts[name] = cut_like(graph, sliced.uncut[like], sliced.cuts[like], apart)
    if not cuts:
        return sliced
    (found,) = cut_in(sliced, [cuts], room, device.compute_watts, progress)
    return found


def cut_like(graph: StepGraph, other: StepGraph, cut: Cut, apart: Set[str] = frozenset()) -> Cut:
    """Return the cut of `other`, a graph of another shape, for this one: the same chains where both have the same values, else chains as fat.

    `apart`: as for `cut_fat`.
    """
    if _same_places(graph, other):
        return cut
    ends = [op for chain, _ in cut.counted for op in (chain.ops[0], chain.ops[-1])]
    fat = min((touched_bytes(other, op) for op in ends), default=0)
    return cut_fat(graph, max(fat - 1, 0), max((count for _, count in cut.counted), default=1), apart)


def _same_places(one: StepGraph, other: StepGraph) -> bool:
    """Say whether the operators of two graphs take and give the same values, by number."""
    if one.once(structure) != other.once(structure) or len(one.values) != len(other.values):
        return False
    return all(
        a.outputs == b.outputs and [*operands(a)] == [*operands(b)] for a, b in zip(one.ops, other.ops, strict=True)
    )
