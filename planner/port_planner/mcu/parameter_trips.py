"""Use the RAM that a plan leaves free to skip transfers of paged parameters, or to avoid waiting for them.

A plan reads a layer's parameters before its first operator and waits. If the arena has RAM for them, they stay there
from their update to the next training sample. Early layers gain most: they are updated last and needed first. The
remaining transfers run alongside an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from port_planner.mcu.autodiff import PAGE_KINDS, SparseScheme, StepKind, TableRow
from port_planner.mcu.core_costs import CoreCosts, row_seconds
from port_planner.mcu.ir import Graph
from port_planner.mcu.memory import MemoryPlan, PageUse
from port_planner.mcu.page_costs import PageCosts
from port_planner.mcu.pages import TRANSFERS, Transfer, transfers

OPERATORS_BESIDE = 2
"""Operators that a transfer may overlap: most transfers fit in one, but short ones (masks, biases) need another."""

TRIES = 32
"""Plans tried for each kind of candidate: a network of 50 layers takes as long as its search."""

WORK = 6_000
"""Rounds times buffers of the offset search in each of the hundred or so plans tried."""

Chosen = TypeVar("Chosen", str, Transfer)


@dataclass(frozen=True, slots=True)
class ParameterTrips:
    """A plan with fewer transfers, and what one training sample saves by it."""

    memory: MemoryPlan
    saved_seconds: float
    saved_joules: float


def skip_parameter_trips(
    graph: Graph,
    scheme: SparseScheme,
    core: CoreCosts,
    costs: PageCosts,
    memory: MemoryPlan,
    use: PageUse,
    allowed_bytes: int,
    planned: Callable[..., MemoryPlan],
) -> ParameterTrips:
    """Return the plan `memory` with as many parameter transfers skipped or overlapped as its arena has RAM for.

    `planned`: `plan_memory` with all arguments but the use of the medium.
    """
    before = memory

    def fits(changed: PageUse) -> bool:
        nonlocal memory, use
        tried = planned(pages=changed, rounds=0)
        if tried.arena.lower_bound_bytes <= allowed_bytes < tried.arena.peak_bytes:
            tried = planned(pages=changed, rounds=WORK // len(memory.arena.buffers))
        if tried.arena.peak_bytes > allowed_bytes:
            return False
        memory, use = tried, changed
        return True

    def carry(layers: Iterable[str]) -> bool:
        return fits(replace(use, paging=replace(use.paging, carried=use.paging.carried | set(layers))))

    def beside(moved: Iterable[Transfer]) -> bool:
        return fits(replace(use, paging=replace(use.paging, beside=(*use.paging.beside, *moved))))

    _take([page.removeprefix("p:") for page in memory.parameters.pages], carry)
    carried = {row.page for row in memory.rows if row.carried}
    moving = [moved for moved in transfers(memory.rows) if moved[1] or moved[0] not in carried]
    for _ in range(OPERATORS_BESIDE):
        _take(moving, beside)
    spared = [costs.paging(memory.parameters.pages[page].size_bytes) for page in carried]
    waited = _waited(graph, scheme, core, costs, before) - _waited(graph, scheme, core, costs, memory)
    seconds = waited + sum(costs.core_seconds_per_byte * memory.parameters.pages[page].size_bytes for page in carried)
    return ParameterTrips(memory, seconds, waited * core.watts + sum(trip.joules_in for trip in spared))


def _take(candidates: Sequence[Chosen], fits: Callable[[Sequence[Chosen]], bool]) -> None:
    """Take candidates in order, many at a time if they fit together, within a limited number of tries."""
    waiting = [candidates] if candidates else []
    for _ in range(TRIES):
        if not waiting:
            break
        group = waiting.pop()
        if not fits(group) and len(group) > 1:
            half = len(group) // 2
            waiting += [group[half:], group[:half]]


def _waited(graph: Graph, scheme: SparseScheme, core: CoreCosts, costs: PageCosts, memory: MemoryPlan) -> float:
    """Return the seconds of a sample in which the core waits for the medium, which handles one
    transfer at a time, in order.
    """
    now = idle_at = waited = 0.0
    done: dict[str, float] = {}
    for row in memory.rows:
        if row.kind in TRANSFERS and not row.carried:
            idle_at = done[row.page] = max(now, idle_at) + _seconds(costs, memory, row)
        elif row.kind is StepKind.PAGE_WAIT and done.get(row.page, now) > now:
            waited += done[row.page] - now
            now = done[row.page]
        elif row.kind not in PAGE_KINDS:
            now += row_seconds(graph, scheme, core, row)
    return waited


def _seconds(costs: PageCosts, memory: MemoryPlan, row: TableRow) -> float:
    """Return how long a transfer keeps the medium busy."""
    medium = memory.medium
    size = 0 if medium is None else medium.pages[medium.index(row.page)].size_bytes
    trip, core = costs.paging(size), costs.core_seconds_per_byte * size
    return (trip.seconds_out if row.kind is StepKind.PAGE_OUT else trip.seconds_in) - core
