"""One training step as a straight list of aten operators over storages.

Memory lives in *storages*; a *value* is a view of one (offset, shape, stride, dtype). View operators do not appear,
because a value itself states its position. The remaining operators compute: they read storages, create storages, or
write to existing ones. This module is pure data and does not import torch.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from port_planner.base.bounds import Count, Text
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.allowed_operators import draws_by_shape
from port_planner.ir.device_kinds import CPU, MAX_NAME, accelerator_of
from port_planner.operators import base_name

_Found = TypeVar("_Found")


class GraphError(PortError):
    """A graph breaks its own rules; nothing may be planned or run from it."""

    exit_code = ExitCode.IMPOSSIBLE


class Role(enum.IntEnum):
    """The purpose of a storage. The numbers are part of the bundle format."""

    TEMPORARY = 0
    PARAMETER = 1
    BUFFER = 2
    STATE = 3
    """Optimizer state: momentum, Adam's moments, step counters."""
    BATCH = 4
    CONSTANT = 5
    GRADIENT = 6
    """An accumulated gradient that lives across micro-batches."""


PERSISTENT = frozenset({Role.PARAMETER, Role.BUFFER, Role.STATE, Role.GRADIENT})
"""Roles whose contents outlive a step."""


class Phase(enum.IntEnum):
    """The part of the step to which an operator belongs. The numbers are part of the bundle format."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value with this index."""

    value: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """An argument that changes from step to step: slot `index` of the per-step scalars."""

    index: int


@dataclass(frozen=True, slots=True)
class NamedArgument:
    """An argument that is one of torch's named objects, such as `dtype float32` or `device cpu`, or a
    number such as `complex 1j`.
    """

    kind: str
    name: str


RESERVED = "aten::empty_strided"
"""The operator that creates a tensor without contents."""
COPY = "aten::copy_"
"""The operator that fills such a tensor."""

Argument: TypeAlias = "bool | int | float | str | Ref | Scalar | NamedArgument | tuple[Argument, ...] | None"


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of `nbytes` bytes of memory on a kind of device, which contains values."""

    nbytes: Count
    role: Role
    name: Text
    device: Text = CPU

    @property
    def persistent(self) -> bool:
        return self.role in PERSISTENT

    @property
    def key(self) -> str:
        """The name under which the contents are stored on disk."""
        return storage_key(self.role, self.name)


def storage_key(role: Role, name: str) -> str:
    """Return the name under which the contents of a storage with this role and name are stored on disk."""
    return f"{role.name.lower()}/{name}"


@dataclass(frozen=True, slots=True)
class Value:
    """A strided view of a storage; `offset` counts elements, as in torch."""

    storage: Count
    dtype: Text
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a chain of operators that an op computes: tile `index` of `count` of chain number
    `chain`, described by `what`.

    `reordered`: whether the op sums over tiles in a different order than the whole, which was permitted; for a chain,
    whether one of its ops does.
    """

    chain: Count
    what: Text
    index: Count
    count: Count
    reordered: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call.

    `name` is the aten overload, such as `aten::addmm`, `aten::add.Tensor`.

    `outputs`: one value index per returned tensor (None if nothing reads it). `writes`: the storages that it
    changes in place. `random`: whether it draws from the default generator. `tile`: the tile of an op that runs in
    tiles, which does not change what is computed. `team`: the number of the CPU thread team that computes it, 0 for
    all threads of the bundle.
    """

    name: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int | None, ...]
    writes: tuple[int, ...]
    phase: Phase
    random: bool = False
    tile: Tile | None = None
    team: int = 0


class OperatorCall(Protocol):
    """The call of an operator, in a graph or on a tape."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def args(self) -> tuple[Argument, ...]:
        """Positional arguments."""

    @property
    def kwargs(self) -> tuple[tuple[str, Argument], ...]:
        """Keyword arguments."""


_Call = TypeVar("_Call", bound=OperatorCall)


def references(argument: Any) -> Iterator[int]:
    """Yield the value indices inside an argument."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def operands(op: OperatorCall) -> Iterator[int]:
    """Yield the value indices that `op` uses, in order of appearance, with repetition."""
    return references((op.args, op.kwargs))


def with_operands(op: _Call, value_of: Callable[[int], int]) -> _Call:
    """Return an operator with other operands: `value_of` is called for each of them, in order of
    appearance, with repetition.
    """

    def changed(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(value_of(argument.value))
        return tuple(map(changed, argument)) if isinstance(argument, tuple) else argument

    return replace(op, args=changed(op.args), kwargs=changed(op.kwargs))


@dataclass(frozen=True)
class StepGraph:
    """A recorded step: forward, loss, backward and update, or only a forward pass for evaluation.

    `batch` are the values that a caller fills before the step, `loss` the scalar that it reads afterwards,
    `aux` the loss function's other results. `scalars`: number of the per-step scalars that `Scalar` arguments
    name. `draws`: random ops in the order in which they draw, if that differs from the order of ops; those of
    one tuple draw the same numbers.
    """

    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    batch: tuple[int, ...]
    loss: int
    aux: tuple[int, ...] = ()
    scalars: int = 0
    draws: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the distinct storages that it uses as operands (including written ones), ascending."""
        return tuple(tuple(sorted({self.values[v].storage for v in operands(op)})) for op in self.ops)

    @cached_property
    def creates(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the storages whose lifetime starts as its outputs."""
        seen = {s for s, storage in enumerate(self.storages) if storage.role is not Role.TEMPORARY}
        result = []
        for op in self.ops:
            fresh = []
            for v in op.outputs:
                if v is not None and (s := self.values[v].storage) not in seen:
                    seen.add(s)
                    fresh.append(s)
            result.append(tuple(fresh))
        return tuple(result)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the ops that create, read or write it, ascending."""
        lists: list[list[int]] = [[] for _ in self.storages]
        for i in range(len(self.ops)):
            for s in sorted({*self.reads[i], *self.creates[i], *self.ops[i].writes}):
                lists[s].append(i)
        return tuple(map(tuple, lists))

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the ops that create or change its contents, ascending."""
        lists: list[list[int]] = [[] for _ in self.storages]
        for i, op in enumerate(self.ops):
            for s in sorted({*self.creates[i], *op.writes}):
                lists[s].append(i)
        return tuple(map(tuple, lists))

    @cached_property
    def device(self) -> str:
        """The kind of device for whose memory the step is planned: the accelerator, if any storage is on one."""
        return accelerator_of(storage.device for storage in self.storages)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each storage, its bytes in the memory of `device`; 0 if it stays with the CPU."""
        return tuple(storage.nbytes if storage.device == self.device else 0 for storage in self.storages)

    @cached_property
    def batch_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the values that a caller fills before the step."""
        return tuple(self.values[v].shape for v in self.batch)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The storages that a caller reads after the step: loss and aux."""
        return frozenset(self.values[v].storage for v in (self.loss, *self.aux))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The chains of operators that run in tiles, each represented by its first tile, in order."""
        found: dict[int, Tile] = {}
        for tile in (op.tile for op in self.ops if op.tile is not None):
            known = found.setdefault(tile.chain, replace(tile, index=0))
            if tile.reordered and not known.reordered:
                found[tile.chain] = replace(known, reordered=True)
        return tuple(found.values())

    def operator_of_module(self, op: int) -> str:
        """Return an operator's name for readers, with its module if it has one: `addmm of layers.3.out`."""
        module = self.module_of(op)
        return f"{self.ops[op].name.removeprefix('aten::')}{' of ' * bool(module)}{module}"

    def module_of(self, op: int) -> str:
        """Return the module whose weights or buffers an operator uses.

        "" if it takes none, those of several modules, or the model's own.
        """
        of_model = (self.storages[s] for s in self.reads[op])
        names = {s.name for s in of_model if s.role in (Role.PARAMETER, Role.BUFFER)}
        modules = {name.rpartition(".")[0] for name in names}
        return modules.pop() if len(modules) == 1 else ""

    def label(self, s: int) -> str:
        """Return a storage's name for readers: its own, or the op that creates it and the shape.

        For example `mul output [8, 64]`. For a storage filled tile by tile, it is the op whose tiles are copied there.
        """
        if self.storages[s].name:
            return self.storages[s].name
        if (filled := self._label_of_filled(s)) is not None:
            return filled
        for op in (self.ops[i] for i in self.uses[s]):
            for v in op.outputs:
                if v is not None and self.values[v].storage == s:
                    name = base_name(op.name)
                    return f"{name} output {list(self.values[v].shape)}"
        return f"storage {s}"

    def _label_of_filled(self, s: int) -> str | None:
        """Return the label of a storage that is created without contents and filled by copies; None for any other."""
        first = self.ops[self.uses[s][0]] if self.uses[s] else None
        if first is None or first.name != RESERVED:
            return None
        copied = (op for op in (self.ops[i] for i in self.uses[s]) if op.name == COPY and s in op.writes)
        source = next((v for op in copied for v in references(op.args[1])), None)
        if source is None:
            return None
        makers = self.uses[self.values[source].storage]
        name = base_name(self.ops[makers[0]].name)
        taken = (self.values[v] for i in self.uses[s] for v in operands(self.ops[i]) if self.values[v].storage == s)
        whole = next((v for v in taken if len(v.shape) > 1 and _fills(v, self.storages[s].nbytes)), None)
        made = self.values[next(v for v in first.outputs if v is not None)] if whole is None else whole
        return f"{name} output {list(made.shape)}"

    def once(self, find: "Callable[[StepGraph], _Found]") -> _Found:
        """Return `find(self)`, computed only once, because a graph does not change."""
        if find not in self._findings:
            self._findings[find] = find(self)
        found: _Found = self._findings[find]
        return found

    @cached_property
    def _findings(self) -> "dict[Callable[[StepGraph], Any], Any]":
        return {}

    def reordered(self, order: tuple[int, ...]) -> "StepGraph":
        """Return the same graph with its ops in `order` (a permutation of op indices); the same
        object for the same order.
        """
        if order not in self._orders:
            self._orders[order] = self._reordered(order)
        return self._orders[order]

    @cached_property
    def _orders(self) -> "dict[tuple[int, ...], StepGraph]":
        return {}

    def _reordered(self, order: tuple[int, ...]) -> "StepGraph":
        place = {op: k for k, op in enumerate(order)}
        draws = tuple(tuple(place[i] for i in together) for together in self.draws)
        return replace(self, ops=tuple(self.ops[i] for i in order), draws=draws)


Structure: TypeAlias = tuple[tuple[Any, ...], ...]


def structure(graph: StepGraph) -> Structure:
    """Return what steps of one program on batches of different shapes have in common: the operators, and the
    connections between them.

    If structures are equal, operators and storages have the same places, so a plan of one step applies to the other.
    """
    ops = tuple(
        (op.name, op.phase, op.random, op.writes, read, created, op.tile and (op.tile.index, op.tile.count), op.team)
        for op, read, created in zip(graph.ops, graph.reads, graph.creates, strict=True)
    )
    storages = tuple((s.role, s.persistent and s.name, s.device) for s in graph.storages)
    return ops, storages, tuple(sorted(graph.kept)), graph.draws


def computed_bytes(graph: StepGraph) -> int:
    """Return the bytes of all storages that do not outlive the step, which the batch's shape determines."""
    return sum(s.nbytes for s in graph.storages if not s.persistent)


def verify_graph(graph: StepGraph) -> None:
    """Raise GraphError unless every index exists, every storage is created before its use, and views fit."""
    _verify_devices(graph)
    for v, value in enumerate(graph.values):
        _verify_view(graph, v, value)
    for v in (*graph.batch, graph.loss, *graph.aux):
        _in_range(v, len(graph.values), "value")
    alive = {s for s, storage in enumerate(graph.storages) if storage.role is not Role.TEMPORARY}
    for i, op in enumerate(graph.ops):
        for v in operands(op):
            _in_range(v, len(graph.values), f"operand of op {i} ({op.name})")
            if graph.values[v].storage not in alive:
                raise GraphError(
                    f"op {i} ({op.name}) reads storage {graph.values[v].storage} before any op creates it; "
                    "the graph is cyclic or damaged, capture the step again"
                )
        for argument in (*op.args, *(a for _, a in op.kwargs)):
            _verify_scalars(argument, graph.scalars, i)
        taken = {graph.values[v].storage for v in operands(op)}
        for s in op.writes:
            if s not in taken:
                raise GraphError(f"op {i} ({op.name}) writes storage {s}, which is not among its operands")
            if graph.storages[s].role is Role.CONSTANT:
                raise GraphError(f"op {i} ({op.name}) changes storage {s}, which is a constant; plan the job again")
        for output in op.outputs:
            if output is not None:
                _in_range(output, len(graph.values), f"output of op {i} ({op.name})")
                alive.add(graph.values[output].storage)
    _verify_draws(graph)
    for s in graph.kept:
        if s not in alive:
            raise GraphError(f"the loss or an extra output is in storage {s}, which no op creates")


def _verify_devices(graph: StepGraph) -> None:
    for s, storage in enumerate(graph.storages):
        if not 0 < len(storage.device) <= MAX_NAME or not storage.device.isidentifier():
            raise GraphError(f"storage {s} lies on {storage.device[:MAX_NAME]!r}, which is not a kind of device")
    try:
        accelerator_of(storage.device for storage in graph.storages)
    except ValueError as error:
        raise GraphError(f"{error}; move the whole model to one of them") from error


def _verify_draws(graph: StepGraph) -> None:
    """Raise GraphError unless each random operator draws by its shape alone, exactly once, or
    all draw in their own order.
    """
    drawing = sorted(i for together in graph.draws for i in together)
    if graph.draws and drawing != [i for i, op in enumerate(graph.ops) if op.random]:
        raise GraphError("the draws do not name every random op once; the graph is damaged")
    for together in graph.draws:
        names = {graph.ops[i].name for i in together}
        if len(names) != 1 or not all(map(draws_by_shape, names)):
            raise GraphError(f"ops {', '.join(sorted(names))} cannot draw in another order; the graph is damaged")


def _in_range(index: int, count: int, what: str) -> None:
    if not 0 <= index < count:
        raise GraphError(f"{what} {index} does not exist (there are {count}); the graph is damaged")


def _verify_scalars(argument: Argument, count: int, op: int) -> None:
    if isinstance(argument, Scalar):
        _in_range(argument.index, count, f"per-step scalar of op {op}")
    elif isinstance(argument, tuple):
        for item in argument:
            _verify_scalars(item, count, op)


ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element of the dtypes that a graph may hold."""

MAX_STORAGE_BYTES = 1 << 40
"""Largest size of a storage in bytes.

No supported device can hold a terabyte tensor; a larger size is in a damaged or hostile file.
"""


def view_bytes(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int:
    """Return how far a view extends into its storage, in bytes; raise GraphError for an impossible view."""
    if len(shape) != len(stride) or min((*shape, *stride, offset), default=0) < 0:
        raise GraphError(f"a view has shape {shape}, stride {stride}, offset {offset}; the graph is damaged")
    if 0 in shape:
        return 0
    return (offset + sum((n - 1) * k for n, k in zip(shape, stride, strict=True)) + 1) * ITEM_BYTES[dtype]


def _fills(value: Value, nbytes: int) -> bool:
    """Return whether a view covers a whole storage of `nbytes`, from its beginning."""
    return value.offset == 0 and view_bytes(value.dtype, value.shape, value.stride, value.offset) == nbytes


def _verify_view(graph: StepGraph, index: int, value: Value) -> None:
    _in_range(value.storage, len(graph.storages), f"storage of value {index}")
    nbytes = graph.storages[value.storage].nbytes
    if not 0 <= nbytes <= MAX_STORAGE_BYTES:
        raise GraphError(f"storage {value.storage} claims {nbytes} bytes; the limit is {MAX_STORAGE_BYTES}")
    if value.dtype not in ITEM_BYTES:
        raise GraphError(f"value {index} has dtype {value.dtype!r}, which is not supported")
    reached = view_bytes(value.dtype, value.shape, value.stride, value.offset)
    if reached > nbytes:
        raise GraphError(f"value {index} reaches byte {reached} of storage {value.storage}, which has {nbytes}")
