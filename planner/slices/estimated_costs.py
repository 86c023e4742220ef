"""What operators in pieces would cost, before they were run: the whole's costs, divided by what each touches.

Pieces take about as long as the whole, and what copies them together comes on top, so an estimate is rather low. It tells which ways to cut a
graph are worth comparing and measuring.
"""

from collections.abc import Sequence

from planner.ir.costs import OpCost
from planner.ir.graph import StepGraph
from planner.slices.chains import touched_bytes
from planner.slices.rewriting import Rewritten


def estimated_costs(graph: StepGraph, costs: Sequence[OpCost], rewritten: Rewritten) -> tuple[OpCost, ...]:
    """Return costs of the rewritten graph's operators, one for each; `costs` are those of `graph`, which it was made of."""
    new_graph = rewritten.graph
    found: dict[int, OpCost] = {}
    for replacement in rewritten.replacements:
        old = [costs[i] for i in replacement.old]
        seconds, joules = sum(cost.seconds for cost in old), sum(cost.joules for cost in old)
        workspace_bytes = max((cost.workspace_bytes for cost in old), default=0)
        fattest = max((touched_bytes(graph, i) for i in replacement.old), default=0) or 1
        touched = {i: touched_bytes(new_graph, i) for i in replacement.new}
        total = sum(touched.values()) or 1
        for i, nbytes in touched.items():
            share = nbytes / total
            workspace = int(workspace_bytes * min(1.0, nbytes / fattest))
            found[i] = OpCost(share * seconds, workspace, share * joules)
    replaced = {i for replacement in rewritten.replacements for i in replacement.old}
    rest = iter([cost for i, cost in enumerate(costs) if i not in replaced])
    return tuple(found[i] if i in found else next(rest) for i in range(len(new_graph.ops)))
