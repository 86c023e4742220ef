"""Batch norms' backward passes by channels, where they set the floor of the step."""

from dataclasses import replace

from port_agent.prepare.progress import Progress
from port_agent.prepare.slices import comparing
from port_agent.prepare.slices.sliced import ComparingRoom, Sliced, main_step
from port_planner.ir.costs import DeviceCosts
from port_planner.search.floor import floor_of
from port_planner.slices.choices import OF_THE_ROOM
from port_planner.slices.norms import NORM_BACKWARD, norms_by_channels
from port_planner.slices.rewriting import compacted

NORM_PIECES = 8
"""Of channels, into which the backward pass of a batch norm is cut: its copies are little beside what stays whole."""

NEAR_THE_FLOOR = 1.5
"""Of what the step's floor needs beside the process: with more memory, norms whose copies take time are left whole."""


def in_channels(
    halved: Sliced, device: DeviceCosts, ram_bytes: int, room: ComparingRoom, progress: Progress
) -> list[Sliced]:
    """Return the job with fat batch norms' backward passes by channels, measured anew; nothing unless one sets a floor near the budget.

    Raises TrialError where a process that compares or measures fails.
    """
    floor, own_bytes = floor_of(*main_step(halved, device)), ram_bytes - device.base_bytes
    if floor.name != NORM_BACKWARD or own_bytes > NEAR_THE_FLOOR * (floor.nbytes - device.base_bytes):
        return []
    (share, _), *_ = OF_THE_ROOM
    graphs, left = comparing.rewritten_alike(
        halved.prepared, lambda graph, odd: norms_by_channels(graph, int(share * own_bytes), NORM_PIECES, odd), room
    )
    if graphs == halved.prepared.graphs:
        return []
    made = replace(halved.prepared, graphs={name: compacted(graph) for name, graph in graphs.items()})
    sliced = Sliced(made, halved.measured, (*halved.left_whole, *left))
    return comparing.with_operator_costs([sliced], room, device.compute_watts, progress)
