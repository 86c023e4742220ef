"""The bytes that a scheme takes: lifetimes of all buffers, the arena, and the layout of the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from port_planner.base.errors import ExitCode, PortError
from port_planner.mcu.arena import Arena, Buffer, aligned, plan_arena
from port_planner.mcu.autodiff import (
    LayerUpdate,
    SampleProgram,
    SparseScheme,
    StepKind,
    TableRow,
    forward_program,
    reads,
    training_program,
    writes,
)
from port_planner.mcu.ir import Graph, KernelCall, row_bytes, scratch_bytes
from port_planner.mcu.pages import CHECKSUMS, BoardPaging, MediumLayout, Page, medium_layout, parameter_name
from port_planner.mcu.step_table import RepeatedOps, home, table_rows, tensor_of
from port_planner.mcu.tiles import TileGroup


class ArenaBudgetError(PortError):
    """Raised when a model or scheme needs more RAM than its budget.

    `least_bytes`: the least that bands, recomputation and paging reached. `note`: what else stands in the way.
    """

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(
        self,
        needed_bytes: int,
        budget_bytes: int,
        arena_bytes: int,
        parameter_bytes: int,
        least_bytes: int | None = None,
        note: str = "",
    ) -> None:
        least = "" if least_bytes is None else f", the least found is {least_bytes} B"
        super().__init__(
            f"needs {needed_bytes} B of RAM (arena {arena_bytes} B + trained parameters {parameter_bytes} B), budget "
            f"is {budget_bytes} B{least}; train fewer layers (search a scheme for this budget) or raise the budget"
            + (f". {note}" if note else "")
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Where one layer's trained values live in the parameter region; None: the values are frozen, in flash."""

    bias_offset: int | None
    weight_offset: int | None
    q88_offset: int | None


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The parameter region: int32 biases first, then int8 rows, then the Q8.8 low bytes.

    `pages`: those of paged parameters, each layer's together; empty if all of them stay in RAM.
    """

    slots: dict[str, ParameterSlot]
    size_bytes: int
    bias_bytes: int
    weight_bytes: int
    pages: dict[str, Page] = field(default_factory=dict)

    @property
    def ram_bytes(self) -> int:
        """The bytes of RAM that it takes all the time."""
        return 0 if self.pages else self.size_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One program with its step table, arena and parameters: the model's static RAM, and what it pages."""

    program: SampleProgram
    rows: tuple[TableRow, ...]
    arena: Arena
    parameters: ParameterLayout
    medium: MediumLayout | None = None

    @property
    def ram_bytes(self) -> int:
        return self.arena.peak_bytes + self.parameters.ram_bytes

    @property
    def recomputed(self) -> int:
        """The number of operators that run again in one training sample."""
        return sum(row.again for row in self.rows)

    @property
    def paged(self) -> int:
        """The number of pages of activations, gradients and parameters that one training sample reads."""
        return sum(row.kind is StepKind.PAGE_IN for row in self.rows)

    def offset(self, buffer: str) -> int:
        """Return the arena offset of a residency, or of a tensor's first one.

        The classifier's gradient lies where its logits were.
        """
        return self.arena.offsets[home(self.program.graph, buffer)]


TARGETS = "t:targets"
"""The buffer of a sample's targets: written with the input, read by the loss."""

CHANNEL_GROUP = 4
"""PORT_GROUP of the kernels: channels that a dynamic update takes or skips together."""


def scratch_of(op: str) -> str:
    """Return the name of an op's scratch buffer."""
    return f"s:{op}"


def board_tensor_bytes(graph: Graph, tensor: str, scheme: SparseScheme) -> int:
    """Return the bytes of a tensor by its name.

    It names an activation, a gradient (`d:`), scratch (`s:`), a whole parameter gradient (`dw:`, `db:`), or the norms
    of the channel groups (`norm:`).
    """
    kind, _, name = tensor.rpartition(":")
    if kind == "":
        return graph.shape(tensor).elements * (4 if tensor == graph.ops[-1].name else 1)
    if kind == "d":
        return 4 * graph.shape(name).elements
    op = graph.op(name)
    if kind == "s":
        return scratch_bytes(op)
    if kind == "norm":
        return 4 * -(-scheme.of(name).rows // CHANNEL_GROUP)
    return 4 * (scheme.of(name).rows * row_bytes(op) if kind == "dw" else op.rows)


def mse_target_bytes(graph: Graph) -> int:
    """Return the bytes of a sample's targets, fp32; 0 if it has a label."""
    return 4 * graph.targets


def _lifetimes(
    graph: Graph,
    kinds: Sequence[StepKind],
    touched: Iterable[Iterable[str]],
    scheme: SparseScheme,
    sizes: Mapping[str, int],
    carried: Mapping[str, int] = {},
) -> list[Buffer]:
    """Return a buffer for every name, alive from the first step that touches it to the last;
    `kinds`: the kinds of the steps.

    The `carried` are alive before the first step, and from the given step, which reads them again, to the end. They are
    alive all the time if nothing touches them before that step.
    """
    first: dict[str, int] = {graph.input_name: -1}
    last: dict[str, int] = {graph.input_name: -1}
    count = 0
    for count, names in enumerate(touched, 1):
        for name in names:
            first.setdefault(name, count - 1)
            if count - 1 < carried.get(name, count):
                last[name] = count - 1

    def size(name: str) -> int:
        return sizes[name] if name in sizes else board_tensor_bytes(graph, tensor_of(name), scheme)

    found = [
        Buffer(name, size(name), first[name], last[name])
        if name not in carried
        else Buffer(name, size(name), -1, last[name], (carried[name], count - 1))
        if name in last
        else Buffer(name, size(name), -1, count - 1)
        for name in first
    ]
    if graph.targets:
        judged = kinds.index(StepKind.LOSS) if StepKind.LOSS in kinds else count
        found.append(Buffer(TARGETS, mse_target_bytes(graph), -1, judged))
    if CHECKSUMS in sizes:
        found.append(Buffer(CHECKSUMS, sizes[CHECKSUMS], -1, count - 1))
    return found


def buffers_of(program: SampleProgram, scheme: SparseScheme, simd: bool = True) -> list[Buffer]:
    """Return every buffer of a program that keeps everything, with the steps it is alive in.

    The input is written before step 0.
    """
    graph = program.graph
    steps = []
    for step in program.steps:
        touched = [home(graph, name) for name in (*reads(graph, step), *writes(graph, step))]
        if step.kind is StepKind.FORWARD and scratch_bytes(graph.op(step.op), simd):
            touched.append(scratch_of(step.op))
        steps.append(touched)
    return _lifetimes(graph, [step.kind for step in program.steps], steps, scheme, {})


def table_buffers(
    graph: Graph, rows: Iterable[TableRow], scheme: SparseScheme, sizes: Mapping[str, int]
) -> list[Buffer]:
    """Return every residency of a step table with the rows in which it is alive; `sizes`: of those
    that exist only in bands.
    """
    rows = tuple(rows)
    carried = {row.output: -1 for row in rows if row.carried}
    for index, row in enumerate(rows):
        if row.kind is StepKind.PAGE_IN and row.output in carried:
            carried[row.output] = index
    kinds = [row.kind for row in rows]
    return _lifetimes(graph, kinds, (row.touched for row in rows), scheme, sizes, carried)


def parameter_layout(graph: Graph, scheme: SparseScheme) -> ParameterLayout:
    """Return where every trained bias and weight lives."""
    trained = [(op, scheme.of(op.name)) for op in graph.weighted()]
    bias_at = weight_at = low_at = 0
    bias_offsets: dict[str, int] = {}
    weight_offsets: dict[str, int] = {}
    low_offsets: dict[str, int] = {}
    for op, update in trained:
        if update.bias:
            bias_offsets[op.name] = bias_at
            bias_at += 4 * op.rows
    for op, update in trained:
        if update.rows:
            weight_offsets[op.name] = bias_at + weight_at
            weight_at += update.rows * row_bytes(op)
    for op, update in trained:
        if update.q88:
            low_offsets[op.name] = bias_at + weight_at + low_at
            low_at += update.rows * row_bytes(op)
    slots = {
        op.name: ParameterSlot(bias_offsets.get(op.name), weight_offsets.get(op.name), low_offsets.get(op.name))
        for op, _ in trained
    }
    return ParameterLayout(slots, aligned(bias_at + weight_at + low_at), bias_at, weight_at)


def parameter_block_bytes(op: KernelCall, update: LayerUpdate) -> int:
    """Return the bytes of all trained parameters of a layer."""
    weights = update.rows * row_bytes(op) * (2 if update.q88 else 1)
    return aligned((4 * op.rows if update.bias else 0) + weights)


def paged_layout(graph: Graph, scheme: SparseScheme) -> ParameterLayout:
    """Return the parameter region with each layer's values together: bias, rows, Q8.8 low bytes."""
    slots: dict[str, ParameterSlot] = {}
    pages: dict[str, Page] = {}
    at = bias_bytes = weight_bytes = 0
    for op in graph.weighted():
        update = scheme.of(op.name)
        bias, weight = 4 * op.rows * update.bias, update.rows * row_bytes(op)
        slots[op.name] = ParameterSlot(
            at if bias else None, at + bias if weight else None, at + bias + weight if update.q88 else None
        )
        if bias or weight:
            name, size = parameter_name(op.name), parameter_block_bytes(op, update)
            pages[name] = Page(name, at, size)
            at, bias_bytes, weight_bytes = at + size, bias_bytes + bias, weight_bytes + weight
    size = -(-at // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
    if pages:  # the last page covers the padding too: every byte of a copy must be checked
        name, last = pages.popitem()
        pages[name] = Page(name, last.offset, size - last.offset)
    return ParameterLayout(slots, size, bias_bytes, weight_bytes, pages)


PARAMETER_ALIGNMENT = 8
"""PORT_ALIGNMENT of the headers: where a copy of the parameters may start."""


def program_of(graph: Graph, scheme: SparseScheme) -> SampleProgram:
    """Return the program of a scheme: inference if it trains nothing."""
    trains = any(update.bias or update.rows for update in scheme.updates.values())
    return training_program(graph, scheme) if trains else forward_program(graph)


@dataclass(frozen=True, slots=True)
class PageUse:
    """The medium of the pages, its block in bytes, and every page transfer."""

    medium: str
    block_bytes: int
    paging: BoardPaging


def plan_memory(
    graph: Graph,
    scheme: SparseScheme | None,
    *,
    simd: bool = True,
    rounds: int = 400,
    repeated: RepeatedOps | None = None,
    groups: Sequence[TileGroup] = (),
    pages: PageUse | None = None,
) -> MemoryPlan:
    """Return the memory plan of a scheme; None plans inference only.

    The step table is verified against its program, and the arena by comparing every pair of residencies.
    """
    scheme = scheme or SparseScheme({})
    program = program_of(graph, scheme)
    table = table_rows(
        program,
        repeated,
        simd=simd,
        groups=groups,
        paging=None if pages is None else pages.paging,
        chooses=scheme.chosen is not None,
    )
    if pages is None:
        arena = plan_arena(table_buffers(graph, table.rows, scheme, table.sizes), rounds)
        return MemoryPlan(program, table.rows, arena, parameter_layout(graph, scheme))
    paged = pages.paging.parameters
    layout = paged_layout(graph, scheme) if paged else parameter_layout(graph, scheme)
    sizes = dict(table.sizes)
    for row in table.rows:
        for name in row.touched:
            tensor = tensor_of(name)
            if tensor in layout.pages:
                sizes[name] = layout.pages[tensor].size_bytes
            elif row.page:
                sizes[name] = aligned(board_tensor_bytes(graph, tensor, scheme))
    medium = medium_layout(pages.medium, table.rows, sizes, layout.pages, layout.size_bytes, pages.block_bytes)
    sizes[CHECKSUMS] = 4 * (len(medium.pages) + medium.parameter_pages)
    arena = plan_arena(table_buffers(graph, table.rows, scheme, sizes), rounds)
    return MemoryPlan(program, table.rows, arena, layout, medium)
