"""What a scheme costs in bytes.

Lifetimes of every buffer, the arena, and the layout of the trainable parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.errors import ExitCode, PortError
from planner.mcu.arena import Arena, Buffer, aligned, plan
from planner.mcu.autodiff import (
    SampleProgram,
    SparseScheme,
    StepKind,
    TableRow,
    forward_program,
    reads,
    training_program,
    writes,
)
from planner.mcu.bands import BandGroup
from planner.mcu.ir import Graph, row_bytes, scratch_bytes
from planner.mcu.step_table import RepeatedOps, home, table_rows, tensor_of


class ArenaBudgetError(PortError):
    """A model or scheme that needs more RAM than it was given. `least_bytes`: what recomputation was found to reach."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(
        self,
        needed_bytes: int,
        budget_bytes: int,
        arena_bytes: int,
        parameter_bytes: int,
        least_bytes: int | None = None,
    ) -> None:
        least = "" if least_bytes is None else f", and recomputation was found to bring that down to {least_bytes} B"
        super().__init__(
            f"needs {needed_bytes} B of RAM (arena {arena_bytes} B + trained parameters {parameter_bytes} B), budget is "
            f"{budget_bytes} B{least}; train fewer layers (search a scheme for this budget) or raise the budget"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Where one layer's trained values live in the parameter region.

    None: frozen, in flash.
    """

    bias_offset: int | None
    weight_offset: int | None
    q88_offset: int | None


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The parameter region: int32 biases first, then int8 rows, then the Q8.8 low bytes."""

    slots: dict[str, ParameterSlot]
    size_bytes: int
    bias_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One program with its step table, its arena and its parameters: the static RAM of the model."""

    program: SampleProgram
    rows: tuple[TableRow, ...]
    arena: Arena
    parameters: ParameterLayout

    @property
    def ram_bytes(self) -> int:
        return self.arena.peak_bytes + self.parameters.size_bytes

    @property
    def recomputed(self) -> int:
        """How many operators run again in one training sample."""
        return sum(row.again for row in self.rows)

    def offset(self, buffer: str) -> int:
        """Return the arena offset of a residency, or of a tensor's first one.

        The classifier's gradient lives where its logits were.
        """
        return self.arena.offsets[home(self.program.graph, buffer)]


def scratch_of(op: str) -> str:
    """Return the name of an op's scratch buffer."""
    return f"s:{op}"


def board_tensor_bytes(graph: Graph, tensor: str, scheme: SparseScheme) -> int:
    """Return the bytes of an activation, a gradient (`d:`), scratch (`s:`) or a whole parameter gradient (`dw:`, `db:`)."""
    kind, _, name = tensor.rpartition(":")
    if kind == "":
        return graph.shape(tensor).elements * (4 if tensor == graph.ops[-1].name else 1)
    if kind == "d":
        return 4 * graph.shape(name).elements
    op = graph.op(name)
    if kind == "s":
        return scratch_bytes(op)
    return 4 * (scheme.of(name).rows * row_bytes(op) if kind == "dw" else op.out_shape.channels)


def _lifetimes(
    graph: Graph, touched: Iterable[Iterable[str]], scheme: SparseScheme, sizes: Mapping[str, int]
) -> list[Buffer]:
    """Return a buffer for every name, alive from the first step that touches it to the last."""
    first: dict[str, int] = {graph.input_name: -1}
    last: dict[str, int] = {graph.input_name: -1}
    for index, names in enumerate(touched):
        for name in names:
            first.setdefault(name, index)
            last[name] = index

    def size(name: str) -> int:
        return sizes[name] if name in sizes else board_tensor_bytes(graph, tensor_of(name), scheme)

    return [Buffer(name, size(name), first[name], last[name]) for name in first]


def buffers_of(program: SampleProgram, scheme: SparseScheme, simd: bool = True) -> list[Buffer]:
    """Return every buffer of a program that keeps everything, with the steps it is alive in.

    The input is written before step 0.
    """
    graph = program.graph
    steps = []
    for step in program.steps:
        touched = [home(graph, name) for name in (*reads(graph, step), *writes(graph, step))]
        if simd and step.kind is StepKind.FORWARD and scratch_bytes(graph.op(step.op)):
            touched.append(scratch_of(step.op))
        steps.append(touched)
    return _lifetimes(graph, steps, scheme, {})


def table_buffers(
    graph: Graph, rows: Iterable[TableRow], scheme: SparseScheme, sizes: Mapping[str, int]
) -> list[Buffer]:
    """Return every residency of a step table with the rows it is alive in; `sizes` of what exists in bands only."""
    return _lifetimes(graph, (row.touched for row in rows), scheme, sizes)


def parameter_layout(graph: Graph, scheme: SparseScheme, q88: bool = False) -> ParameterLayout:
    """Return where every trained bias and weight lives."""
    trained = [(op, scheme.of(op.name)) for op in graph.weighted()]
    bias_at = weight_at = 0
    bias_offsets: dict[str, int] = {}
    weight_offsets: dict[str, int] = {}
    for op, update in trained:
        if update.bias:
            bias_offsets[op.name] = bias_at
            bias_at += 4 * op.out_shape.channels
    for op, update in trained:
        if update.rows:
            weight_offsets[op.name] = bias_at + weight_at
            weight_at += update.rows * row_bytes(op)
    size = bias_at + weight_at * (2 if q88 else 1)
    slots = {}
    for op, _ in trained:
        weight = weight_offsets.get(op.name)
        low = None if weight is None or not q88 else weight + weight_at
        slots[op.name] = ParameterSlot(bias_offsets.get(op.name), weight, low)
    return ParameterLayout(slots, aligned(size), bias_at, weight_at)


def program_of(graph: Graph, scheme: SparseScheme) -> SampleProgram:
    """Return the program of a scheme: inference where it trains nothing."""
    trains = any(update.bias or update.rows for update in scheme.updates.values())
    return training_program(graph, scheme) if trains else forward_program(graph)


def plan_memory(
    graph: Graph,
    scheme: SparseScheme | None,
    *,
    q88: bool = False,
    simd: bool = True,
    rounds: int = 400,
    repeated: RepeatedOps | None = None,
    groups: Sequence[BandGroup] = (),
) -> MemoryPlan:
    """Return the memory plan of a scheme; None plans inference only.

    The step table is verified against its program, the arena by comparing every pair of residencies.
    """
    scheme = scheme or SparseScheme({})
    program = program_of(graph, scheme)
    table = table_rows(program, repeated, simd=simd, groups=groups)
    arena = plan(table_buffers(graph, table.rows, scheme, table.sizes), rounds)
    return MemoryPlan(program, table.rows, arena, parameter_layout(graph, scheme, q88))
