"""What a dry run shows about costs: the cost of packing, and how much longer a whole step takes than
its operators one at a time.
"""

from collections.abc import Mapping
from dataclasses import replace

from port_agent.prepare.measurement.dry_run import DryRun
from port_planner.ir.bundle.manifest import kind_of_graph
from port_planner.ir.costs import PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.make_bundle import neighbour
from port_planner.profiling import neighbours
from port_planner.profiling.operator_profile import MeasuredCosts

_LIKELY_PACE = (0.5, 2.0)
"""Range of plausible paces; beyond it, the dry run's step shows the machine's other work."""


def with_packings(
    measured: MeasuredCosts, graphs: Mapping[str, StepGraph], found: DryRun, compute_watts: float, *, estimated: bool
) -> MeasuredCosts:
    """Return the costs with the packing measured in the dry run, for the watts of the device.

    `estimated`: the costs are of another board, where packing takes longer in the same ratio as the step's operators.
    For shapes that the dry run did not run, the figures of the next larger one are used.
    """
    pace = found.pace if estimated and found.pace > 0 else 1.0
    packings = {
        name: tuple(_at_pace(cost, pace, compute_watts) for cost in costs) for name, costs in found.packings.items()
    }
    seen = {name: graphs[name] for name in packings}
    for name, graph in graphs.items():
        alike = {n: g for n, g in seen.items() if kind_of_graph(n) == kind_of_graph(name)}
        like = neighbour(graph, alike)
        if name not in packings and like is not None:
            packings[name] = neighbours.packings_of(graph, seen[like], packings[like])
    return replace(measured, packings=tuple(packings.get(name, ()) for name in graphs))


def _at_pace(cost: PackingCost, pace: float, compute_watts: float) -> PackingCost:
    return replace(
        cost,
        pack_seconds=cost.pack_seconds / pace,
        unpack_seconds=cost.unpack_seconds / pace,
        joules=cost.seconds / pace * compute_watts,
    )


def at_dry_run_pace(measured: MeasuredCosts, found: DryRun) -> MeasuredCosts:
    """Return the operators' costs, measured one at a time, scaled to the time of a whole step of the dry run.

    Together they also pay for page faults on released memory, and find caches warmer or colder.
    """
    least, most = _LIKELY_PACE
    return measured.at_pace(found.pace) if least <= found.pace <= most else measured
