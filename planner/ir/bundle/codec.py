"""Step graphs, plans and costs as plain lists, for msgpack.

And back, with every length and number checked.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import Argument, Named, Op, Phase, Ref, Role, Scalar, StepGraph, Storage, Value, verify_graph
from planner.ir.operators import check_operator
from planner.ir.plan import Action, Decision, Plan

MAX_OPS = 200_000
"""The largest graph measured has 5,607 operators; a file with far more is damaged or hostile."""
MAX_NESTING = 4
"""Arguments are numbers, tensors, or lists of them; nothing in aten nests deeper."""

T = TypeVar("T")


class WireError(PortError):
    """Data that is not a graph, a plan or a cost table."""

    exit_code = ExitCode.IMPOSSIBLE


# -- graphs


def pack_graph(graph: StepGraph) -> list[Any]:
    """Return a graph as nested lists."""
    return [
        [[s.nbytes, int(s.role), s.name] for s in graph.storages],
        [[v.storage, v.dtype, list(v.shape), list(v.stride), v.offset] for v in graph.values],
        [
            [
                op.name, [_pack(a) for a in op.args], [[k, _pack(a)] for k, a in op.kwargs], list(op.outputs),
                list(op.writes), int(op.phase), op.random,
            ]
            for op in graph.ops
        ],
        list(graph.batch), graph.loss, list(graph.aux), graph.scalars,
    ]  # fmt: skip


def unpack_graph(data: Any) -> StepGraph:
    """Return the graph that `data` describes.

    Raises WireError, GraphError or OperatorError for one that is not valid.
    """
    storages, values, ops, batch, loss, aux, scalars = _list(data, 7)
    if max(len(_list(storages)), len(_list(values)), len(_list(ops))) > 4 * MAX_OPS:
        raise WireError(
            f"the graph has {len(ops)} operators and {len(values)} values; the limit is {MAX_OPS} operators"
        )
    graph = StepGraph(
        storages=tuple(_storage(s) for s in storages),
        values=tuple(_value(v) for v in values),
        ops=tuple(_op(o) for o in ops),
        batch=_ints(batch), loss=_int(loss), aux=_ints(aux), scalars=_int(scalars),
    )  # fmt: skip
    verify_graph(graph)
    for op in graph.ops:
        check_operator(op.name)
    return graph


def _storage(data: Any) -> Storage:
    nbytes, role, name = _list(data, 3)
    return Storage(_int(nbytes), _enum(Role, role), _text(name))


def _value(data: Any) -> Value:
    storage, dtype, shape, stride, offset = _list(data, 5)
    return Value(_int(storage), _text(dtype), _ints(shape), _ints(stride), _int(offset))


def _op(data: Any) -> Op:
    name, args, kwargs, outputs, writes, phase, random = _list(data, 7)
    pairs = [_list(pair, 2) for pair in _list(kwargs)]
    return Op(
        _text(name), tuple(_unpack(a) for a in _list(args)), tuple((_text(k), _unpack(a)) for k, a in pairs),
        tuple(None if v is None else _int(v) for v in _list(outputs)), _ints(writes), _enum(Phase, phase),
        _bool(random),
    )  # fmt: skip


def _pack(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"v": argument.value}
    if isinstance(argument, Scalar):
        return {"s": argument.index}
    if isinstance(argument, Named):
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
        (kind, content), *_ = data.items()
        if kind == "v":
            return Ref(_int(content))
        if kind == "s":
            return Scalar(_int(content))
        if kind == "n":
            name, value = _list(content, 2)
            return Named(_text(name), _text(value))
    raise WireError(f"an argument is {str(data)[:60]!r}, which is no number, tensor or list")


# -- plans


def pack_plan(plan: Plan) -> list[Any]:
    """Return a plan as nested lists.

    Decisions column by column, as compressed differences: a few bytes each.
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
    return [pack_integers([len(decisions), len(plan.order), *itertools.chain(*columns)]), figures, plan.strategy]


def unpack_plan(data: Any) -> Plan:
    """Return the plan that `data` describes.

    Whether it fits a graph, `planner.ir.lowering.lower.lower` tells.

    Raises WireError for data that is no plan.
    """
    packed, figures, strategy = _list(data, 3)
    numbers = iter(unpack_integers(packed, most=16 * MAX_OPS))
    count, length = next(numbers, 0), next(numbers, 0)
    if not (0 <= count <= 3 * MAX_OPS and 0 <= length <= MAX_OPS):
        raise WireError(f"a plan claims {count} decisions over an order of {length} operators")
    storages, after, before, actions = (list(itertools.islice(numbers, count)) for _ in range(4))
    order, pairs = list(itertools.islice(numbers, length)), list(numbers)
    if len(actions) != count or len(order) != length or len(pairs) % 2:
        raise WireError(f"a plan ends before its {count} decisions and {length} operators do")
    ram, peak, seconds, joules, overhead, bound = _list(figures, 6)
    after = list(itertools.accumulate(after))
    before = [a + b for a, b in zip(after, before, strict=True)]
    return Plan(
        decisions=tuple(
            Decision(s, a, b, _enum(Action, action))
            for s, a, b, action in zip(itertools.accumulate(storages), after, before, actions, strict=True)
        ),
        order=_permutation(tuple(itertools.accumulate(order))),
        sliced=tuple((pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)),
        ram_bytes=_int(ram), peak_bytes=_int(peak), seconds=_number(seconds), joules=_number(joules),
        overhead_joules=_number(overhead), bound_joules=None if bound is None else _number(bound),
        strategy=_text(strategy),
    )  # fmt: skip


def _differences(numbers: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise((0, *numbers))]


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Return integers as compressed base-128 numbers, least significant digits first, the sign in the lowest bit."""
    data = bytearray()
    for number in numbers:
        rest = -2 * number - 1 if number < 0 else 2 * number
        while rest > 127:
            data.append(rest & 127 | 128)
            rest >>= 7
        data.append(rest)
    return zlib.compress(bytes(data), 9)


def unpack_integers(data: Any, *, most: int) -> list[int]:
    """Return the integers of `pack_integers`.

    Raises WireError for other data, or for more than `most` of them.
    """
    if not isinstance(data, bytes):
        raise WireError(f"expected packed integers, found {str(data)[:60]!r}")
    decompressor = zlib.decompressobj()
    try:
        digits = decompressor.decompress(data, 5 * most)
    except zlib.error as error:
        raise WireError(f"packed integers are damaged ({error})") from error
    if not decompressor.eof or (digits and digits[-1] > 127):
        raise WireError("packed integers are cut off, or there are too many of them")
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
        raise WireError(f"there are {len(numbers)} packed integers, at most {most} are read")
    return numbers


def _permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(order) != list(range(len(order))):
        raise WireError("a plan's order is not a permutation of the operators")
    return order


# -- costs


def pack_costs(costs: CostTable) -> list[Any]:
    """Return a cost table as nested lists."""
    device, flash = costs.device, costs.device.flash
    return [
        [device.name, device.base_bytes, device.static_watts, device.compute_watts, device.threads],
        [
            flash.name, flash.read_bytes_per_s, flash.write_bytes_per_s, flash.latency_s, flash.read_joules_per_byte,
            flash.write_joules_per_byte, flash.endurance_bytes,
        ],
        [[op.seconds, op.workspace_bytes, op.joules] for op in costs.ops],
    ]  # fmt: skip


def unpack_costs(data: Any) -> CostTable:
    """Return the cost table that `data` describes."""
    device, flash, ops = _list(data, 3)
    name, base, static, compute, threads = _list(device, 5)
    medium, read, write, latency, read_j, write_j, endurance = _list(flash, 7)
    return CostTable(
        DeviceCosts(
            _text(name), _int(base), _number(static), _number(compute),
            Flash(
                _text(medium), _positive(read), _positive(write), _number(latency), _number(read_j), _number(write_j),
                None if endurance is None else _positive(endurance),
            ),
            max(1, _int(threads)),
        ),
        tuple(OpCost(_number(s), _int(w), _number(j)) for s, w, j in (_list(op, 3) for op in _list(ops))),
    )  # fmt: skip


# -- pieces


def _list(data: Any, length: int | None = None) -> list[Any]:
    if not isinstance(data, list) or (length is not None and len(data) != length):
        what = f"a list of {length}" if length is not None else "a list"
        raise WireError(f"expected {what}, found {str(data)[:60]!r}")
    return data


def _int(data: Any) -> int:
    if isinstance(data, bool) or not isinstance(data, int) or not 0 <= data < 1 << 62:
        raise WireError(f"expected a whole number from 0 on, found {str(data)[:60]!r}")
    return data


def _ints(data: Any) -> tuple[int, ...]:
    return tuple(_int(n) for n in _list(data))


def _number(data: Any) -> float:
    if isinstance(data, bool) or not isinstance(data, int | float) or not 0 <= data < 1e30:
        raise WireError(f"expected a number from 0 on, found {str(data)[:60]!r}")
    return float(data)


def _positive(data: Any) -> float:
    if (number := _number(data)) <= 0:
        raise WireError("expected a number above 0, found 0")
    return number


def _text(data: Any) -> str:
    if not isinstance(data, str) or len(data) > 1000:
        raise WireError(f"expected a short text, found {str(data)[:60]!r}")
    return data


def _bool(data: Any) -> bool:
    if not isinstance(data, bool):
        raise WireError(f"expected true or false, found {str(data)[:60]!r}")
    return data


def _enum(cls: Callable[[int], T], data: Any) -> T:
    try:
        return cls(_int(data))
    except ValueError:
        raise WireError(f"{data} is not a known {getattr(cls, '__name__', 'number')}") from None
