"""Choose which layers' weights keep their low bytes if a budget cannot hold them all.

The low bytes of a layer grow with its weights, and a page must lie in the arena as a whole while its layer runs. So the
layers with the most weights lose theirs first, and as few layers as possible do. The Q8.8 rule rounds weights without
low bytes stochastically.
"""

from __future__ import annotations

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.choose_plan import BoardDeadlineError, FitOptions, FittedMemory, fit_memory
from port_planner.mcu.ir import Graph, row_bytes
from port_planner.mcu.memory import ArenaBudgetError


def fit_low_bytes(
    graph: Graph, scheme: SparseScheme, options: FitOptions, *, simd: bool = True
) -> tuple[SparseScheme, FittedMemory]:
    """Return the scheme with low bytes for as many layers as fit within the limits, and its plan.

    Raises ArenaBudgetError or BoardDeadlineError if nothing fits even without low bytes.
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
