"""Convert step graphs, plans and costs to plain lists for msgpack, and back with every length and number checked."""

import enum
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from port_planner.base.bounds import Count, Figure, Text
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.allowed_operators import check_operator
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost, PackingCost
from port_planner.ir.graph import (
    Argument,
    NamedArgument,
    Op,
    Phase,
    Ref,
    Scalar,
    StepGraph,
    Storage,
    Tile,
    Value,
    verify_graph,
)
from port_planner.ir.plan import Action, Decision, Plan

MAX_OPS = 200_000
"""Largest number of operators in a graph.

The largest graph measured has 5,607; a file with far more is damaged or hostile.
"""
MAX_NESTING = 4
"""Deepest nesting of arguments, which are numbers, tensors, or lists of these; nothing in aten nests deeper."""

T = TypeVar("T")
_FLASH_BEFORE = 8
"""Fields of a medium that every bundle has; readers from before the other fields do not expect those."""

_Counts = tuple[Count, ...]
_Many = msgspec.Meta(max_length=4 * MAX_OPS)


class _TileRecord(NamedTuple):
    chain: Count
    what: Text
    place: Count
    tiles: Count
    reordered: bool = False
    """Whether a chain sums in another order; absent if it has the bits of the whole."""


class _OpRecord(NamedTuple):
    name: Text
    args: list[Any]
    kwargs: list[tuple[Text, Any]]
    outputs: tuple[Count | None, ...]
    writes: _Counts
    phase: Phase
    random: bool
    tile: _TileRecord | None = None
    """The tile of an op; absent for an op that runs whole, and in bundles from before tiles were recorded."""
    team: Count = 0
    """The thread team of an op; absent if all threads compute it, and in bundles from before there were teams."""


_Rows = tuple[list[Any], ...]
"""Values of one class as columns, one per field in order; trailing fields may be absent."""


class _GraphRecord(NamedTuple):
    storages: Annotated[_Rows, _Many]
    values: Annotated[_Rows, _Many]
    ops: Annotated[list[_OpRecord], _Many]
    batch: _Counts
    loss: Count
    aux: _Counts
    scalars: Count
    draws: Annotated[tuple[_Counts, ...], _Many] = ()
    """The order in which random operators draw; absent if that is their own order, as in older bundles."""


class _Special(msgspec.Struct, forbid_unknown_fields=True):
    """An argument that is not a plain value: the value, scalar or torch object with this number or name."""

    v: Count | None = None
    s: Count | None = None
    n: tuple[Text, Text] | None = None


class _PlanRecord(NamedTuple):
    integers: bytes
    figures: tuple[Count, Count, Figure, Figure, Figure, Figure | None]
    strategy: Text
    targets: bytes | None = None
    """Paging target of each decision; absent if all are 0, as in bundles from before there were several targets."""


class _DeviceRecord(NamedTuple):
    name: Text
    base_bytes: Count
    static_watts: Figure
    compute_watts: Figure
    threads: Count
    host_base_bytes: Count = 0
    """Bytes of the host's memory; absent if operators compute in it."""
    shares_pages: bool = False
    """Whether pages are shared; absent if they are copied on their way."""


class _CostRecord(NamedTuple):
    device: _DeviceRecord
    flash: list[Any]
    ops: _Rows
    scratch_targets: _Rows = ()
    packings: Annotated[_Rows, _Many] = ()
    """Costs of packing; absent in bundles from before plans could pack."""
    elsewhere: Annotated[tuple[list[Any] | None, ...], _Many] = ()
    """Costs on the other device; absent if operators are not divided between devices."""


class WireError(PortError):
    """The data is not a graph, a plan or a cost table."""

    exit_code = ExitCode.IMPOSSIBLE


# -- graphs


def pack_graph(graph: StepGraph) -> list[Any]:
    """Return a graph as nested lists."""
    return [
        [_row(storage, least=3) for storage in graph.storages],
        [_row(value) for value in graph.values],
        [
            [
                op.name, [_pack(a) for a in op.args], [[k, _pack(a)] for k, a in op.kwargs], list(op.outputs),
                list(op.writes), int(op.phase), op.random, *_pack_rest(op),
            ]
            for op in graph.ops
        ],
        list(graph.batch), graph.loss, list(graph.aux), graph.scalars,
        *([[list(together) for together in graph.draws]] if graph.draws else []),
    ]  # fmt: skip


def unpack_graph(data: Any) -> StepGraph:
    """Return the graph that `data` describes.

    Raises WireError, GraphError or OperatorError for one that is not valid.
    """
    record = _read(data, _GraphRecord, "a graph")
    graph = StepGraph(
        storages=_of_rows(Storage, record.storages, "a graph"),
        values=_of_rows(Value, record.values, "a graph"),
        ops=tuple(
            Op(
                op.name, tuple(map(_unpack, op.args)), tuple((k, _unpack(a)) for k, a in op.kwargs), op.outputs,
                op.writes, op.phase, op.random, None if op.tile is None else Tile(*op.tile), op.team,
            )
            for op in record.ops
        ),
        batch=record.batch, loss=record.loss, aux=record.aux, scalars=record.scalars, draws=record.draws,
    )  # fmt: skip
    verify_graph(graph)
    for op in graph.ops:
        check_operator(op.name)
    return graph


def _pack_rest(op: Op) -> list[Any]:
    """Return the fields that most operators lack: a tile and a thread team."""
    tile = None if op.tile is None else _row(op.tile, least=4)
    return [tile, op.team] if op.team else [tile] if tile is not None else []


def _pack(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"v": argument.value}
    if isinstance(argument, Scalar):
        return {"s": argument.index}
    if isinstance(argument, NamedArgument):
        return {"n": [argument.kind, argument.name]}
    if isinstance(argument, tuple):
        return [_pack(a) for a in argument]
    return argument


def _unpack(data: Any, depth: int = 0) -> Argument:
    if depth > MAX_NESTING:
        raise WireError(f"an argument is nested deeper than {MAX_NESTING} lists")
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return tuple(_unpack(a, depth + 1) for a in data)
    if isinstance(data, dict) and len(data) == 1:
        special = _read(data, _Special, "an argument")
        if special.v is not None:
            return Ref(special.v)
        if special.s is not None:
            return Scalar(special.s)
        if special.n is not None:
            return NamedArgument(*special.n)
    raise WireError(f"an argument is {str(data)[:60]!r}, which is not a valid number, tensor or list")


# -- plans


def pack_plan(plan: Plan) -> list[Any]:
    """Return a plan as nested lists.

    Decisions are stored column by column as compressed differences, a few bytes each.
    """
    decisions = plan.decisions
    columns = (
        _differences([d.storage for d in decisions]),
        _differences([d.after for d in decisions]),
        [d.before - d.after for d in decisions],
        [int(d.action) for d in decisions],
        _differences(plan.order),
        [n for pair in plan.sliced for n in pair],
    )
    figures = [plan.ram_bytes, plan.peak_bytes, plan.seconds, plan.joules, plan.overhead_joules, plan.bound_joules]
    targets = [pack_integers(d.target for d in decisions)] if any(d.target for d in decisions) else []
    integers = pack_integers([len(decisions), len(plan.order), *itertools.chain(*columns)])
    return [integers, figures, plan.strategy, *targets]


def unpack_plan(data: Any) -> Plan:
    """Return the plan that `data` describes.

    `port_planner.ir.lowering.lower.lower` checks whether it fits a graph.

    Raises WireError for data that is not a valid plan.
    """
    packed, figures, strategy, packed_targets = _read(data, _PlanRecord, "a plan")
    numbers = iter(unpack_integers(packed, most=16 * MAX_OPS))
    count, length = next(numbers, 0), next(numbers, 0)
    if not (0 <= count <= 3 * MAX_OPS and 0 <= length <= MAX_OPS):
        raise WireError(f"a plan claims {count} decisions over an order of {length} operators")
    storages, after, before, actions = (list(itertools.islice(numbers, count)) for _ in range(4))
    order, pairs = list(itertools.islice(numbers, length)), list(numbers)
    if len(actions) != count or len(order) != length or len(pairs) % 2:
        raise WireError(f"a plan ends before its {count} decisions and {length} operators do")
    targets = [0] * count if packed_targets is None else unpack_integers(packed_targets, most=count)
    if len(targets) != count or min(targets, default=0) < 0:
        raise WireError(f"a plan of {count} decisions names {len(targets)} paging targets, or one below 0")
    ram, peak, seconds, joules, overhead, bound = figures
    after = list(itertools.accumulate(after))
    before = [a + b for a, b in zip(after, before, strict=True)]
    return Plan(
        decisions=tuple(
            Decision(s, a, b, _read(action, Action, "an action"), target)
            for s, a, b, action, target in zip(
                itertools.accumulate(storages), after, before, actions, targets, strict=True
            )
        ),
        order=_permutation(tuple(itertools.accumulate(order))),
        sliced=tuple((pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)),
        ram_bytes=ram,
        peak_bytes=peak,
        seconds=seconds,
        joules=joules,
        overhead_joules=overhead,
        bound_joules=bound,
        strategy=strategy,
    )


def _differences(numbers: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise((0, *numbers))]


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Return integers as compressed base-128 numbers.

    The least significant digits go first, the sign is in the lowest bit.
    """
    data = bytearray()
    for number in numbers:
        rest = -2 * number - 1 if number < 0 else 2 * number
        while rest > 127:
            data.append(rest & 127 | 128)
            rest >>= 7
        data.append(rest)
    return zlib.compress(bytes(data), 9)


def unpack_integers(data: bytes, *, most: int) -> list[int]:
    """Return the integers of `pack_integers`.

    Raises WireError for invalid data, or for more than `most` integers.
    """
    decompressor = zlib.decompressobj()
    try:
        digits = decompressor.decompress(data, 5 * most)
    except zlib.error as error:
        raise WireError(f"the packed integers are damaged ({error})") from error
    if not decompressor.eof or (digits and digits[-1] > 127):
        raise WireError("the packed integers are truncated, or there are too many")
    numbers, number, shift = [], 0, 0
    for digit in digits:
        number |= (digit & 127) << shift
        shift += 7
        if shift > 70:
            raise WireError("a packed integer has more than 64 bits")
        if digit < 128:
            numbers.append(-(number >> 1) - 1 if number & 1 else number >> 1)
            number = shift = 0
    if len(numbers) > most:
        raise WireError(f"there are {len(numbers)} packed integers; the maximum is {most}")
    return numbers


def _permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(order))):
        raise WireError("a plan's order is not a permutation of the operators")
    return order


# -- costs


def pack_costs(costs: CostTable) -> list[Any]:
    """Return a cost table as nested lists."""
    device = costs.device
    further: list[list[Any] | None] = []
    if device.scratch_targets or costs.packings or costs.elsewhere:
        further.append([_row(target, least=_FLASH_BEFORE) for target in device.scratch_targets])
    if costs.packings or costs.elsewhere:
        further.append([_row(packing) for packing in costs.packings])
    if costs.elsewhere:
        further.append([None if op is None else _row(op, least=3) for op in costs.elsewhere])
    beside: list[Any] = [device.host_base_bytes] if device.host_base_bytes or device.shares_pages else []
    if device.shares_pages:
        beside.append(True)
    return [
        [device.name, device.base_bytes, device.static_watts, device.compute_watts, device.threads, *beside],
        _row(device.flash, least=_FLASH_BEFORE),
        [_row(op, least=3) for op in costs.ops],
        *further,
    ]


def unpack_costs(data: Any) -> CostTable:
    """Return the cost table that `data` describes; raises WireError if it is not a valid one."""
    (name, base, static, compute, threads, beside, shares), flash, ops, further, packings, elsewhere = _read(
        data, _CostRecord, "a cost table"
    )
    if elsewhere and len(elsewhere) != len(ops):
        raise WireError(f"a cost table has {len(ops)} operators on their devices and {len(elsewhere)} on the others")
    target, *targets = _of_rows(Flash, (flash, *further), "a cost table")
    device = DeviceCosts(name, base, static, compute, target, max(1, threads), tuple(targets), beside, shares)
    others = iter(_of_rows(OpCost, tuple(op for op in elsewhere if op is not None), "a cost table"))
    return CostTable(
        device,
        _of_rows(OpCost, ops, "a cost table"),
        _of_rows(PackingCost, packings, "a cost table"),
        tuple(None if op is None else next(others) for op in elsewhere),
    )


# -- values of one class


def _row(item: Any, least: int | None = None) -> list[Any]:
    """Return the fields of a value. Of those after the `least` first ones, trailing defaults are left out."""
    row = [_plain(getattr(item, field.name)) for field in fields(item)]
    defaults = [field.default for field in fields(item)]
    while least is not None and len(row) > least and row[-1] == defaults[len(row) - 1]:
        row.pop()
    return row


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _of_rows(kind: type[T], rows: _Rows, what: str) -> tuple[T, ...]:
    """Return the values of a class from the columns of its fields, checking each against its annotation."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    least = sum(field.default is MISSING for field in fields(kind))  # type: ignore[arg-type]
    for row in rows:
        if not least <= len(row) <= len(names):
            raise WireError(
                f"{what} cannot be read: a {kind.__name__} has length {len(row)}, not {least} to {len(names)}"
            )
    return _read([dict(zip(names, row, strict=False)) for row in rows], tuple[kind, ...], what)  # type: ignore[valid-type]


def _read(data: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"{what} cannot be read: {error}") from error
