"""Tile batch norms' backward passes by channels, if they determine the least memory of the step."""

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
"""Number of tiles of channels in a batch norm's backward pass; their copies are small
compared with what stays whole.
"""

NEAR_THE_FLOOR = 1.5
"""Multiple of the least memory of the step, with the process, above which norms stay whole
because their copies take time.
"""


def in_channels(
    presplit: TiledJob, device: DeviceCosts, ram_bytes: int, allowed: ComparisonLimits, progress: Progress
) -> list[TiledJob]:
    """Return the job with large batch norms' backward passes by channels, measured again; unchanged unless one of them
    determines a least memory near the budget.

    Raises DryRunError if a process that compares or measures fails.
    """
    floor, own_bytes = floor_of(*main_step(presplit, device)), ram_bytes - device.base_bytes
    if floor.name != NORM_BACKWARD or own_bytes > NEAR_THE_FLOOR * (floor.nbytes - device.base_bytes):
        return []
    (share, _), *_ = OF_THE_BUDGET
    graphs, left = comparing.rewritten_alike(
        presplit.captured, lambda graph, odd: norms_by_channels(graph, int(share * own_bytes), NORM_TILES, odd), allowed
    )
    if graphs == presplit.captured.graphs:
        return []
    made = replace(presplit.captured, graphs={name: compacted(graph) for name, graph in graphs.items()})
    tiled = TiledJob(made, presplit.measured, (*presplit.left_whole, *left))
    return comparing.with_operator_costs([tiled], allowed, device.compute_watts, progress)
