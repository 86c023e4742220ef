"""What a scheme costs in bytes.

Lifetimes of every buffer, the arena, and the layout of the trainable parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.mcu.arena import Arena, Buffer, aligned, plan
from planner.mcu.autodiff import (
    SampleProgram,
    SparseScheme,
    StepKind,
    forward_program,
    gradient_of,
    reads,
    training_program,
    writes,
)
from planner.mcu.ir import Graph, KernelCall, OpKind


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
    """One program with its arena and parameters: the static RAM of the model."""

    program: SampleProgram
    arena: Arena
    parameters: ParameterLayout

    @property
    def ram_bytes(self) -> int:
        return self.arena.peak_bytes + self.parameters.size_bytes

    def offset(self, buffer: str) -> int:
        """Return a buffer's arena offset.

        The classifier's gradient lives where its logits were.
        """
        return self.arena.offsets[_home(self.program.graph, buffer)]


def _home(graph: Graph, buffer: str) -> str:
    last = graph.ops[-1].name
    return last if buffer == gradient_of(last) else buffer


def row_bytes(op: KernelCall) -> int:
    """Return the bytes of one output channel's weights."""
    return op.weight_count // op.out_shape.channels


def scratch_bytes(op: KernelCall) -> int:
    """Return the scratch of the SIMD convolution: two im2col columns of int16, padded to four channels."""
    if op.kind is not OpKind.CONV:
        return 0
    return 2 * 2 * (-(-row_bytes(op) // 4) * 4)


def scratch_of(op: str) -> str:
    """Return the name of an op's scratch buffer."""
    return f"s:{op}"


def _size(graph: Graph, buffer: str, scheme: SparseScheme) -> int:
    kind, _, name = buffer.rpartition(":")
    if kind == "":
        return graph.shape(buffer).elements * (4 if buffer == graph.ops[-1].name else 1)
    if kind == "d":
        return 4 * graph.shape(name).elements
    op = graph.op(name)
    if kind == "s":
        return scratch_bytes(op)
    return 4 * (scheme.of(name).rows * row_bytes(op) if kind == "dw" else op.out_shape.channels)


def buffers_of(program: SampleProgram, scheme: SparseScheme, simd: bool = True) -> list[Buffer]:
    """Return every buffer with the steps it is alive in.

    The input is written before step 0.
    """
    graph = program.graph
    first: dict[str, int] = {graph.input_name: -1}
    last: dict[str, int] = {graph.input_name: -1}
    for index, step in enumerate(program.steps):
        touched = [*reads(graph, step), *writes(graph, step)]
        if simd and step.kind is StepKind.FORWARD and scratch_bytes(graph.op(step.op)):
            touched.append(scratch_of(step.op))
        for name in touched:
            home = _home(graph, name)
            first.setdefault(home, index)
            last[home] = index
    return [Buffer(name, _size(graph, name, scheme), first[name], last[name]) for name in first]


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


def plan_memory(
    graph: Graph, scheme: SparseScheme | None, *, q88: bool = False, simd: bool = True, rounds: int = 400
) -> MemoryPlan:
    """Return the memory plan of a scheme; None plans inference only."""
    scheme = scheme or SparseScheme({})
    trains = any(update.bias or update.rows for update in scheme.updates.values())
    program = training_program(graph, scheme) if trains else forward_program(graph)
    arena = plan(buffers_of(program, scheme, simd), rounds)
    return MemoryPlan(program, arena, parameter_layout(graph, scheme, q88))
