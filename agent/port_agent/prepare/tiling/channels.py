"""Batch norms' backward passes by channels, where they set the floor of the step."""

from dataclasses import replace

from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling import comparing
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob, main_step
from port_planner.ir.costs import DeviceCosts
from port_planner.search.floor import floor_of
from port_planner.tiling.norms import NORM_BACKWARD, norms_by_channels
from port_planner.tiling.rewriting import compacted
from port_planner.tiling.tilings import OF_THE_BUDGET

NORM_TILES = 8
"""Of channels, into which the backward pass of a batch norm is cut: its copies are little beside what stays whole."""

NEAR_THE_FLOOR = 1.5
"""Of what the step's floor needs beside the process: with more memory, norms whose copies take time are left whole."""


def in_channels(
    presplit: TiledJob, device: DeviceCosts, ram_bytes: int, allowed: ComparisonLimits, progress: Progress
) -> list[TiledJob]:
    """Return the job with fat batch norms' backward passes by channels, measured anew; nothing unless one sets a floor near the budget.

    Raises DryRunError where a process that compares or measures fails.
    """
    floor, own_bytes = floor_of(*main_step(presplit, device)), ram_bytes - device.base_bytes
    if floor.name != NORM_BACKWARD or own_bytes > NEAR_THE_FLOOR * (floor.nbytes - device.base_bytes):
        return []
    (share, _), *_ = OF_THE_BUDGET
    graphs, left = comparing.rewritten_alike(
        presplit.prepared, lambda graph, odd: norms_by_channels(graph, int(share * own_bytes), NORM_TILES, odd), allowed
    )
    if graphs == presplit.prepared.graphs:
        return []
    made = replace(presplit.prepared, graphs={name: compacted(graph) for name, graph in graphs.items()})
    tiled = TiledJob(made, presplit.measured, (*presplit.left_whole, *left))
    return comparing.with_operator_costs([tiled], allowed, device.compute_watts, progress)
