"""Estimated costs of tiled operators before they run: the whole's cost per byte, plus one call each.

The estimate shows which tilings are worth comparing and measuring.
"""

import math
from collections.abc import Sequence

from port_planner.ir.costs import OpCost
from port_planner.ir.graph import ITEM_BYTES, StepGraph, operands
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.rewriting import RewrittenGraph


def tile_costs(graph: StepGraph, costs: Sequence[OpCost], rewritten: RewrittenGraph) -> tuple[OpCost, ...]:
    """Return the costs of the rewritten graph's operators; `costs` are those of the original `graph`.

    A call costs as much as the fastest operator.
    """
    new_graph = rewritten.graph
    call = min(costs, key=lambda cost: cost.seconds, default=OpCost(0.0, 0, 0.0))
    found: dict[int, OpCost] = {}
    for replacement in rewritten.replacements:
        old = [costs[i] for i in replacement.old]
        seconds, joules = sum(cost.seconds for cost in old), sum(cost.joules for cost in old)
        workspace_bytes = max((cost.workspace_bytes for cost in old), default=0)
        fattest = max((touched_bytes(graph, i) for i in replacement.old), default=0) or 1
        total = sum(_computed_bytes(graph, i) for i in replacement.old) or 1
        for i in replacement.new:
            share = _computed_bytes(new_graph, i) / total
            workspace = int(workspace_bytes * min(1.0, touched_bytes(new_graph, i) / fattest))
            found[i] = OpCost(share * seconds + call.seconds, workspace, share * joules + call.joules)
    replaced = {i for replacement in rewritten.replacements for i in replacement.old}
    rest = iter([cost for i, cost in enumerate(costs) if i not in replaced])
    return tuple(found[i] if i in found else next(rest) for i in range(len(new_graph.ops)))


def _computed_bytes(graph: StepGraph, i: int) -> int:
    """Return how many computed bytes an op touches: each tile reads a weight whole, in the time of one part."""
    op = graph.ops[i]
    values = {graph.values[v] for v in (*operands(op), *op.outputs) if v is not None}
    return sum(
        min(math.prod(value.shape) * ITEM_BYTES[value.dtype], graph.storages[value.storage].nbytes)
        for value in values
        if not graph.storages[value.storage].persistent
    )
