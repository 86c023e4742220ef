"""The floor of a step: the least memory that any plan of its graph can do with, and plans that reach it.

While an operator runs, what it touches is resident and nothing else has to be; the fullest of these moments is the floor.
A plan that pages everything there is, whenever it is idle, needs no more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.costs import CostTable
from planner.ir.graph import Role, StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.lowering.update_slices import SLICE_BYTES, update_groups
from planner.ir.plan import Action, Decision, Plan
from planner.ir.program import BudgetError, UpdateGroup, idle_gaps
from planner.ir.units import format_bytes

PAGED_FROM_BYTES = (64 << 10, 4 << 10, 1)
"""Plans near the floor page what has at least so many bytes, the largest first: each page takes a transfer of its own."""

STRATEGY = "floor"

MOSTLY = 0.5
"""Share of an operator's bytes that one thing takes if it is to blame."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least budget of a step, the worker's base included, the op that sets it and who is resident there."""

    nbytes: int
    op: int
    name: str
    base_bytes: int
    workspace_bytes: int
    holders: tuple[tuple[str, int, bool], ...]
    """Name, bytes, and whether it outlives the step, the largest first."""
    base: str = "the process itself"

    @property
    def remedy(self) -> str:
        """What would lower the floor."""
        here = max(self.nbytes - self.base_bytes, 1)
        lasting = sum(nbytes for _, nbytes, persistent in self.holders if persistent)
        if self.workspace_bytes > MOSTLY * here:
            return "a smaller batch, or fewer channels there: most of it is workspace of the kernel"
        if lasting > MOSTLY * here:
            name = next(name for name, _, persistent in self.holders if persistent)
            return f"a smaller {name}: the operator reads it whole"
        return "a smaller batch"

    def __str__(self) -> str:
        names = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes, _ in self.holders[:3])
        return (
            f"{format_bytes(self.nbytes)}, {format_bytes(self.base_bytes)} of it {self.base}, set by op {self.op} "
            f"({self.name.removeprefix('aten::')}: {names}); what lowers it: {self.remedy}"
        )


def floor_of(graph: StepGraph, costs: CostTable) -> Floor:
    """Return the least budget for which there is a plan."""
    base = costs.device.base_bytes
    of = "the process itself" if costs.device.host is None else "context and libraries"
    plan = paging_plan(graph, min(PAGED_FROM_BYTES), base + 1)
    try:
        lower(graph, costs, plan)
    except BudgetError as error:
        held = [(graph.label(s), nbytes, graph.storages[s].persistent) for s, nbytes in error.holders]
        workspace = costs.ops[error.op].workspace_bytes
        return Floor(error.needed_bytes, error.op, graph.ops[error.op].name, base, workspace, tuple(held), of)
    return Floor(base + 1, 0, graph.ops[0].name if graph.ops else "", base, 0, (), of)


def floor_plans(graph: StepGraph, ram_bytes: int) -> Iterator[Plan]:
    """Yield plans that need little more than the floor, the cheapest first and the one that needs least last."""
    for least in PAGED_FROM_BYTES:
        yield paging_plan(graph, least, ram_bytes)


def paging_plan(graph: StepGraph, least_bytes: int, ram_bytes: int) -> Plan:
    """Return the plan that pages whatever has at least so many bytes in every gap, and updates in slices."""
    groups = update_groups(graph)
    sliced = {g: -(-group.nbytes // SLICE_BYTES) for g, group in enumerate(groups) if group.nbytes >= 2 * SLICE_BYTES}
    streamed = [groups[g] for g in sliced]
    decisions = [
        Decision(s, a, b, Action.PAGE)
        for s, storage in enumerate(graph.storages)
        if storage.nbytes >= least_bytes and graph.uses[s] and storage.role not in (Role.BATCH, Role.CONSTANT)
        for a, b in (*idle_gaps(graph, s), *_around_the_step(graph, s))
        if not _inside(streamed, a, b)
    ]  # fmt: skip
    return Plan(tuple(sorted(decisions)), sliced=tuple(sorted(sliced.items())), ram_bytes=ram_bytes, strategy=STRATEGY)


def _around_the_step(graph: StepGraph, s: int) -> Iterator[tuple[int, int]]:
    if graph.storages[s].persistent:
        yield graph.uses[s][-1], graph.uses[s][0]


def _inside(groups: list[UpdateGroup], a: int, b: int) -> bool:
    """Say whether a gap lies within an update that runs in slices."""
    return any(group.first <= a < b <= group.last for group in groups)
