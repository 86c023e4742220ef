"""Costs of steps of further shapes: the same operators, interpolated between smaller and larger measured tensors.

A program's steps on batches of several shapes run the same operators in the same order. The smallest and largest shapes
are measured, and enough between them that no shape is far from the next. For other shapes, each operator's cost is
interpolated between those at the same place.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from port_planner.ir.boards import op_work
from port_planner.ir.costs import OpCost, PackingCost
from port_planner.ir.graph import StepGraph, computed_bytes, structure

NEXT_SIZE = 4.0
"""Largest ratio of the amounts that the steps of neighbouring measured shapes compute.

Beyond it, caches and threads change what a byte costs.
"""

_ROUNDING_BYTES = 64
"""Bytes of a packed form besides its contents: its header, and bits rounded up to words."""

Point = tuple[float, OpCost]
"""Work of an operator, in operations or bytes, and its measured cost."""


def between(graphs: Sequence[StepGraph]) -> frozenset[int]:
    """Return, by number, the graphs that lie between smaller and larger measured ones of the same program.

    They need not be measured themselves.

    The first graph of a program is always measured: plans are chosen by it.
    """
    found = set[int]()
    for members in _programs(graphs):
        if len({graphs[n].batch_shapes for n in members}) < len(members):
            continue  # the same batches in other ways, whose costs must be told apart
        order = sorted(members, key=lambda n: computed_bytes(graphs[n]))
        last = order[0]
        for n, following in itertools.pairwise(order[1:]):
            near = computed_bytes(graphs[following]) <= NEXT_SIZE * computed_bytes(graphs[last])
            if near and n != members[0]:
                found.add(n)
            else:
                last = n
    return frozenset(found)


def filled(graphs: Sequence[StepGraph], costs: Sequence[Sequence[OpCost | None]]) -> tuple[tuple[OpCost, ...], ...]:
    """Return the costs, with each None interpolated from the same operator of the same program on other shapes.

    An operator that was measured on no shape costs nothing.
    """
    made = [list(table) for table in costs]
    for members in _programs(graphs):
        for n in members:
            for i in (i for i, cost in enumerate(costs[n]) if cost is None):
                known = [(_work(graphs[m], i), cost) for m in members if (cost := costs[m][i]) is not None]
                made[n][i] = interpolated(known, _work(graphs[n], i)) if known else OpCost(0.0, 0, 0.0)
    return tuple(tuple(cost for cost in table if cost is not None) for table in made)


def interpolated(known: Sequence[Point], work: float) -> OpCost:
    """Return the cost of an operator that does this much work, interpolated between its measured neighbours.

    Seconds and joules lie between those of the next smaller and next larger work; workspace is that of the larger.
    Outside the measured range, everything grows with the work.
    """
    less = max((p for p in known if p[0] <= work), key=lambda p: p[0], default=None)
    more = min((p for p in known if p[0] >= work), key=lambda p: p[0], default=None)
    if less is None or more is None:
        done, cost = less or more or (0.0, OpCost(0.0, 0, 0.0))
        factor = work / done if done else 1.0
        grown = math.ceil(max(factor, 1.0) * cost.workspace_bytes)
        return OpCost(factor * cost.seconds, grown, factor * cost.joules)
    share = (work - less[0]) / (more[0] - less[0]) if more[0] > less[0] else 1.0
    a, b = less[1], more[1]
    return OpCost(
        a.seconds + share * (b.seconds - a.seconds),
        max(a.workspace_bytes, b.workspace_bytes),
        a.joules + share * (b.joules - a.joules),
    )


def packings_of(graph: StepGraph, larger: StepGraph, costs: Iterable[PackingCost]) -> tuple[PackingCost, ...]:
    """Return the cost of packing a step's tensors, from a step of the same structure that computes at least as much.

    Contents are assumed to be as dense as there. Nothing is known of tensors that are larger here: their
    numbers may need more bits.
    """
    found = []
    for cost in costs:
        part = graph.storages[cost.storage].nbytes / max(larger.storages[cost.storage].nbytes, 1)
        if part > 1:
            continue
        reserved = min(cost.reserved_bytes, math.ceil(part * cost.reserved_bytes) + _ROUNDING_BYTES)
        seconds = part * cost.pack_seconds, part * cost.unpack_seconds
        found.append(
            replace(
                cost,
                reserved_bytes=reserved,
                pack_seconds=seconds[0],
                unpack_seconds=seconds[1],
                joules=part * cost.joules,
            )
        )
    return tuple(found)


def _programs(graphs: Sequence[StepGraph]) -> list[list[int]]:
    """Return the graphs by number, grouped by program."""
    found = defaultdict[object, list[int]](list)
    for n, graph in enumerate(graphs):
        found[graph.once(structure)].append(n)
    return [*found.values()]


def _work(graph: StepGraph, i: int) -> float:
    work = op_work(graph, i)
    return work.flops if work.dense else work.nbytes
