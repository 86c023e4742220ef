"""The host memory of a step on a device besides its pages: storages there, and the workspace of operators there."""

from collections.abc import Sequence, Set

from port_planner.ir.costs import CostTable
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.program import Code, Instruction


def beside_bytes(graph: StepGraph, costs: CostTable, instructions: Sequence[Instruction], starts_away: Set[int]) -> int:
    """Return the most bytes that are held at once; 0 for a step of the CPU, which plans already count.

    A paged storage is held until its write has been waited for, and from the beginning of its read.
    """
    if graph.device == CPU:
        return 0
    sizes = {s: storage.nbytes for s, storage in enumerate(graph.storages) if storage.device == CPU}
    held = {s for s in sizes if graph.storages[s].role is not Role.TEMPORARY and graph.uses[s] and s not in starts_away}
    now = most = sum(sizes[s] for s in held)
    for instruction in instructions:
        i, code = instruction.index, instruction.code
        come: Sequence[int] = ()
        workspace = 0
        if code in (Code.RUN, Code.RERUN):
            come, workspace = graph.creates[i], costs.ops[i].beside_bytes
        elif code is Code.READ:
            come = (i,)
        elif code in (Code.FREE, Code.WAIT_WRITE) and i in held:
            held.discard(i)
            now -= sizes[i]
        fresh = (sizes.keys() & set(come)) - held
        held |= fresh
        now += sum(sizes[s] for s in fresh)
        most = max(most, now + workspace)
    return most
