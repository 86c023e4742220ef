"""Which layers' weights have low bytes where a budget does not hold them all.

What a layer's low bytes take grows with its weights, and a page has to lie in the arena as a whole while its layer runs: so the
layers with most weights lose theirs first, and as few as possible do. The Q8.8 rule rounds what has none stochastically.
"""

from __future__ import annotations

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.choose_plan import BoardDeadlineError, FitOptions, FittedMemory, fit_memory
from port_planner.mcu.ir import Graph, row_bytes
from port_planner.mcu.memory import ArenaBudgetError


def fit_low_bytes(
    graph: Graph, scheme: SparseScheme, options: FitOptions, *, simd: bool = True
) -> tuple[SparseScheme, FittedMemory]:
    """Return the scheme with as many layers' low bytes as a plan within the limits holds, and that plan.

    Raises ArenaBudgetError or BoardDeadlineError where it does not even fit without.
    """
    wide = [op for op in graph.weighted() if scheme.of(op.name).q88]
    wide.sort(key=lambda op: -scheme.of(op.name).rows * row_bytes(op))
    narrow = {name for name, update in scheme.updates.items() if not update.q88}

    def attempt(dropped: int) -> tuple[SparseScheme, FittedMemory] | None:
        tried = scheme.with_low_bytes(narrow | {op.name for op in wide[:dropped]})
        try:
            return tried, fit_memory(graph, tried, options, simd=simd)
        except (ArenaBudgetError, BoardDeadlineError):
            if dropped == len(wide):
                raise
            return None

    failed, dropped = -1, 0
    while (found := attempt(dropped)) is None:
        failed, dropped = dropped, min(max(1, 2 * dropped), len(wide))
    while dropped - failed > 1:
        between = (failed + dropped) // 2
        fewer = attempt(between)
        if fewer is None:
            failed = between
        else:
            dropped, found = between, fewer
    return found
