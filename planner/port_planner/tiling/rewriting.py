"""A step graph under construction: another graph's contents plus additions.

Storages and values of the original keep their numbers, so common ones are compared by number.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from port_planner.ir.graph import (
    Argument,
    NamedArgument,
    Op,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tile,
    Value,
    operands,
    with_operands,
)

_CPU = (("device", NamedArgument("device", "cpu")), ("layout", NamedArgument("layout", "strided")))


@dataclass(frozen=True, slots=True)
class Replacement:
    """Which ops of the original (`old`, ascending) became which of the new graph (`new`, ascending), and how.

    `sums`: storages of the original whose contents are summed in another order, so may differ in their last digits.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    what: str
    sums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RewrittenGraph:
    """A graph that computes the same as its original, and their differences."""

    graph: StepGraph
    replacements: tuple[Replacement, ...]
    sources: Mapping[int, Value] = field(default_factory=dict)
    """Part of an original storage that a new one initially holds, as a value of the original."""
    moved: Mapping[int, int] = field(default_factory=dict)
    """Storage that now contains an original one."""


def form_of(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> Any:
    """Return a key that is equal for equal replacements: the same operators, shapes and layouts before and after."""
    taken = {s for i in replacement.new for s in rewritten.graph.reads[i]} & rewritten.sources.keys()
    sources = [rewritten.sources[s] for s in sorted(taken)]
    parts = tuple((v.dtype, v.shape, v.stride, v.offset) for v in sources)
    forms = _form(graph, replacement.old), _form(rewritten.graph, replacement.new)
    return (*forms, parts) if parts else forms


def _form(graph: StepGraph, ops: Sequence[int]) -> Any:
    """Return what two sequences of ops have in common if they do the same to tensors of the same layout."""
    numbers: dict[int, int] = {}

    def value_form(v: int) -> Any:
        value = graph.values[v]
        number = numbers.setdefault(value.storage, len(numbers))
        return number, value.dtype, value.shape, value.stride, value.offset, graph.storages[value.storage].nbytes

    def form(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return value_form(argument.value)
        if isinstance(argument, tuple):
            return tuple(form(a) for a in argument)
        return type(argument).__name__, argument

    def op_form(op: Op) -> Any:
        outputs = tuple(None if v is None else value_form(v) for v in op.outputs)
        return op.name, tuple(map(form, op.args)), tuple((k, form(a)) for k, a in op.kwargs), outputs

    return tuple(op_form(graph.ops[i]) for i in ops)


class GraphBuilder:
    """Collects the ops of a new graph in order."""

    def __init__(self, graph: StepGraph) -> None:
        self._original = graph
        self._storages = list(graph.storages)
        self._values = list(graph.values)
        self._known = {value: v for v, value in enumerate(graph.values)}
        self.ops: list[Op] = []

    def storage(self, nbytes: int, role: Role = Role.TEMPORARY, name: str = "") -> int:
        """Add a storage and return its number."""
        self._storages.append(Storage(nbytes, role, name))
        return len(self._storages) - 1

    def known(self, v: int) -> Value:
        """Return the value of this number."""
        return self._values[v]

    def reserve(self, value: Value, phase: Phase) -> None:
        """Add an op that creates a value without contents, to be filled in parts."""
        kwargs = (("dtype", NamedArgument("dtype", value.dtype)), *_CPU)
        made = Op("aten::empty_strided", (value.shape, value.stride), kwargs, (self.value(value),), (), phase)
        self.add(made)

    def value(self, value: Value) -> int:
        """Return the number of a value, adding it if it is new."""
        if value not in self._known:
            self._known[value] = len(self._values)
            self._values.append(value)
        return self._known[value]

    def add(self, op: Op) -> int:
        """Add an op at the end and return its number."""
        self.ops.append(op)
        return len(self.ops) - 1

    def mark(self, first: int, tile: Tile, sums: Container[int] = ()) -> None:
        """Mark the ops from number `first` on as computing this tile, and those in `sums` as summed over tiles."""
        for i in range(first, len(self.ops)):
            self.ops[i] = replace(self.ops[i], tile=replace(tile, reordered=i in sums))

    def graph(self) -> StepGraph:
        """Return the collected graph, without storages that no op touches."""
        whole = StepGraph(
            tuple(self._storages),
            tuple(self._values),
            tuple(self.ops),
            self._original.batch,
            self._original.loss,
            self._original.aux,
            self._original.scalars,
        )
        return whole


def compacted(graph: StepGraph) -> StepGraph:
    """Return a graph without the storages and values that neither an op nor a caller touches."""
    outputs = {v for op in graph.ops for v in op.outputs if v is not None}
    touched = {v for op in graph.ops for v in operands(op)} | outputs | {*graph.batch, graph.loss, *graph.aux}
    old_values = sorted(touched)
    values = {v: k for k, v in enumerate(old_values)}
    old_storages = sorted({graph.values[v].storage for v in old_values})
    storages = {s: k for k, s in enumerate(old_storages)}
    ops = tuple(
        replace(
            with_operands(op, values.__getitem__),
            outputs=tuple(None if v is None else values[v] for v in op.outputs),
            writes=tuple(storages[s] for s in op.writes),
        )
        for op in graph.ops
    )
    return replace(
        graph,
        storages=tuple(graph.storages[s] for s in old_storages),
        ops=ops,
        values=tuple(replace(graph.values[v], storage=storages[graph.values[v].storage]) for v in old_values),
        batch=tuple(values[v] for v in graph.batch),
        loss=values[graph.loss],
        aux=tuple(values[v] for v in graph.aux),
    )


def lying(builder: GraphBuilder, graph: StepGraph, op: Op, moved: Mapping[int, int]) -> Op:
    """Return an op of `graph` with every value in the storage to which it was moved."""
    values = {
        v: builder.value(replace(value, storage=moved[value.storage]))
        for v in (*operands(op), *(v for v in op.outputs if v is not None))
        if (value := graph.values[v]).storage in moved
    }
    return replace(
        with_operands(op, lambda v: values.get(v, v)),
        outputs=tuple(None if v is None else values.get(v, v) for v in op.outputs),
        writes=tuple(moved.get(s, s) for s in op.writes),
    )


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Return torch's strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
