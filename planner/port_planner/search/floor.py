"""The floor of a step: the least memory that any plan of its graph needs, and plans that reach it.

While an operator runs, only the storages that it touches must be resident; the fullest of these moments is the floor. A
plan that pages everything whenever it is idle needs no more.
"""

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from port_planner.base.units import format_bytes
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.update_slices import SLICE_BYTES, update_groups
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import BudgetError, UpdateGroup, idle_gaps
from port_planner.operators import base_name
from port_planner.tiling.blocks import of_a_block

PAGED_FROM_BYTES = (64 << 10, 4 << 10, 1)
"""Least bytes of storages that plans near the floor page, the largest first, because each page is one more transfer."""

STRATEGY = "floor"

MAX_NAMED = 3
"""Tensors listed in a sentence."""

MOSTLY = 0.5
"""Share of an operator's bytes from which a single tensor counts as the cause."""


class HolderKind(enum.Enum):
    """The kinds of storages that are resident while an operator runs."""

    WEIGHT = "weight"
    STATE = "optimizer's state"
    GRADIENT = "gradient"
    UPDATE = "update"
    """Temporaries of an update, or the buffers of one that runs in slices."""
    BUFFER = "buffer"
    OF_THE_BATCH = "of the batch"
    """The batch and everything computed from it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A tensor that is resident at the floor; `weight`: the name of the weight that it is or belongs to."""

    name: str
    nbytes: int
    kind: HolderKind = HolderKind.OF_THE_BATCH
    weight: str = ""

    def __str__(self) -> str:
        whole, along = of_a_block(self.name)
        part = f"a block of {along} of " if along else ""
        match self.kind:
            case HolderKind.WEIGHT | HolderKind.BUFFER:
                return f"{part}the {self.kind.value} {whole}"
            case HolderKind.STATE:
                return f"{part}the optimizer's {whole.removeprefix(self.weight).strip('/')} of {self.weight}"
            case HolderKind.GRADIENT:
                return f"the gradient of {self.weight}"
            case HolderKind.UPDATE:
                return f"the update of {self.weight}"
            case HolderKind.OF_THE_BATCH:
                return self.name


@dataclass(frozen=True, slots=True)
class Floor:
    """The least budget of a step, worker base included, the op that determines it, and what is
    resident there, largest first.
    """

    nbytes: int
    op: int
    name: str
    base_bytes: int
    workspace_bytes: int
    holders: tuple[Holder, ...]
    base: str = "the process itself"
    module: str = ""
    """The module whose weights that op uses."""

    @property
    def operator(self) -> str:
        """The op that determines the floor, in words that a reader knows."""
        return f"{self.name.removeprefix('aten::')}{' of ' * bool(self.module)}{self.module}"

    @property
    def remedy(self) -> str:
        """What would lower the floor, in words: which layer, and what to do."""
        here = max(self.nbytes - self.base_bytes, 1)
        if self.workspace_bytes > MOSTLY * here:
            kernel = base_name(self.name)
            return f"a smaller batch, or fewer channels in that layer: most of it is scratch memory of the kernel of {kernel}"
        of_weights = Counter[str]()
        for held in self.holders:
            of_weights[held.weight] += held.nbytes if held.weight else 0
        weight, nbytes = max(of_weights.items(), key=lambda item: item[1], default=("", 0))
        if nbytes <= MOSTLY * here:
            return "a smaller batch (fewer samples, or shorter or smaller ones): most of it is computed from the batch"
        theirs = [held for held in self.holders if held.weight == weight]
        layer = weight.rpartition(".")[0]
        smaller = f"make the layer {layer} smaller" if layer else f"make {weight} smaller"
        if any(held.kind is not HolderKind.WEIGHT for held in theirs):
            smaller = f"freeze {weight} (requires_grad_(False)) or {smaller}"
        most = " and ".join(str(held) for held in theirs[:MAX_NAMED])
        return f"{smaller}: most of it is {most}, which {'are' if len(theirs) > 1 else 'is'} needed whole there"

    @property
    def held(self) -> str:
        """The largest tensors that are resident there, with their bytes."""
        return ", ".join(f"{held} {format_bytes(held.nbytes)}" for held in self.holders[:MAX_NAMED])

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.nbytes)}, {format_bytes(self.base_bytes)} of it {self.base}, set by op {self.op} "
            f"({self.operator}: {self.held}); what lowers it: {self.remedy}"
        )


def floor_of(graph: StepGraph, costs: CostTable) -> Floor:
    """Return the least budget that has a plan."""
    base = costs.device.base_bytes
    of = "the process itself" if costs.device.host is None else "context and libraries"
    plan = paging_plan(graph, min(PAGED_FROM_BYTES), base + 1)
    try:
        lower(graph, costs, plan)
    except BudgetError as error:
        of_updates = _of_updates(graph)
        held = [_holder(graph, s, nbytes, of_updates) for s, nbytes in error.holders]
        workspace = costs.ops[error.op].workspace_bytes
        updated = next((group for group in sliced_groups(graph) if group.first <= error.op <= group.last), None)
        if updated is not None:
            workspace = 0  # its slices are in buffers
            weight = of_a_block(graph.storages[updated.parameter].name)[0]
            buffers = error.needed_bytes - base - sum(holder.nbytes for holder in held)
            held = sorted(
                [Holder("buffers", buffers, HolderKind.UPDATE, weight), *held], key=lambda holder: -holder.nbytes
            )
        name, module = graph.ops[error.op].name, graph.module_of(error.op)
        return Floor(error.needed_bytes, error.op, name, base, workspace, tuple(held), of, module)
    return Floor(base + 1, 0, graph.ops[0].name if graph.ops else "", base, 0, (), of)


def _of_updates(graph: StepGraph) -> dict[int, tuple[HolderKind, str]]:
    """Return the temporary storages of updates of single parameters: gradients, and the results computed from them.

    Each comes with the parameter's name.
    """
    found = {}
    for group in update_groups(graph):
        weight = of_a_block(graph.storages[group.parameter].name)[0]
        for s in group.storages:
            if graph.storages[s].role is Role.TEMPORARY:
                found[s] = (HolderKind.UPDATE if s in group.temporaries else HolderKind.GRADIENT), weight
    return found


def _holder(graph: StepGraph, s: int, nbytes: int, of_updates: Mapping[int, tuple[HolderKind, str]]) -> Holder:
    storage, name = graph.storages[s], graph.label(s)
    whole = of_a_block(storage.name)[0]
    match storage.role:
        case Role.PARAMETER:
            return Holder(name, nbytes, HolderKind.WEIGHT, whole)
        case Role.STATE:
            return Holder(name, nbytes, HolderKind.STATE, whole.rpartition("/")[0])
        case Role.GRADIENT:
            return Holder(name, nbytes, HolderKind.GRADIENT, whole)
        case Role.BUFFER:
            return Holder(name, nbytes, HolderKind.BUFFER)
        case _:
            return Holder(name, nbytes, *of_updates.get(s, (HolderKind.OF_THE_BATCH, "")))


def floor_plans(graph: StepGraph, ram_bytes: int) -> Iterator[Plan]:
    """Yield plans that need little more than the floor, beginning with the cheapest and ending with
    the one that needs least.
    """
    for least in PAGED_FROM_BYTES:
        yield paging_plan(graph, least, ram_bytes)


def paging_plan(graph: StepGraph, least_bytes: int, ram_bytes: int) -> Plan:
    """Return the plan that pages everything of at least `least_bytes` in every gap, and updates in slices."""
    streamed = sliced_groups(graph)
    sliced = {g: -(-group.nbytes // SLICE_BYTES) for g, group in enumerate(update_groups(graph)) if group in streamed}
    decisions = [
        Decision(s, a, b, Action.PAGE)
        for s, storage in enumerate(graph.storages)
        if storage.nbytes >= least_bytes and graph.uses[s] and storage.role not in (Role.BATCH, Role.CONSTANT)
        for a, b in (*idle_gaps(graph, s), *_around_the_step(graph, s))
        if not _inside(streamed, a, b)
    ]
    return Plan(tuple(sorted(decisions)), sliced=tuple(sorted(sliced.items())), ram_bytes=ram_bytes, strategy=STRATEGY)


def sliced_groups(graph: StepGraph) -> list[UpdateGroup]:
    """Return the updates that run in slices in these plans."""
    return [group for group in update_groups(graph) if group.nbytes >= 2 * SLICE_BYTES]


def _around_the_step(graph: StepGraph, s: int) -> Iterator[tuple[int, int]]:
    if graph.storages[s].persistent:
        yield graph.uses[s][-1], graph.uses[s][0]


def _inside(groups: list[UpdateGroup], a: int, b: int) -> bool:
    """Return whether a gap is within an update that runs in slices."""
    return any(group.first <= a < b <= group.last for group in groups)
