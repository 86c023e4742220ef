"""The contents in a step that could be stored packed while they wait for their next use."""

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from port_planner.ir.costs import Codec
from port_planner.ir.graph import ITEM_BYTES, Argument, Op, Ref, Role, StepGraph, Value, references
from port_planner.operators import operator_of
from port_planner.operators.row import Filling

_CODECS = {"bool": Codec.BITS, "int64": Codec.NARROW}
_DRAW = "aten::bernoulli_.float"
_DIVIDE = "aten::div_.Scalar"
"""Operator by which dropout scales its mask."""
_CAST = "aten::_to_copy"
"""The operator that converts a tile of a mask, which was drawn whole, to numbers stored as bytes."""

_NUMBERS = {"float16", "bfloat16", "float32"}
"""Types of numbers whose pages are packed."""
_PACKED_ITEMS = (1, 2, 4, 8)
"""Item sizes that the codecs accept."""


@dataclass(frozen=True, slots=True)
class Packable:
    """Contents of a storage that are idle after op `after`, the last one to touch this `version`, and
    the codec for their type.
    """

    storage: int
    version: int
    after: int
    codec: Codec
    item_bytes: int


def packables(graph: StepGraph, *, least_bytes: int = 1) -> Iterator[Packable]:
    """Yield the contents that could be packed: temporaries of one type that are idle for more than one op."""
    types: dict[int, set[str]] = defaultdict(set)
    for value in graph.values:
        types[value.storage].add(value.dtype)
    for s, storage in enumerate(graph.storages):
        item_bytes = ITEM_BYTES[next(iter(types[s]))] if len(types[s]) == 1 else 0
        usable = storage.role is Role.TEMPORARY and s not in graph.kept and storage.nbytes >= least_bytes
        if not usable or item_bytes not in _PACKED_ITEMS or storage.nbytes % item_bytes:
            continue
        starts: dict[int, list[int]] = defaultdict(list)
        for a, b in itertools.pairwise(graph.uses[s]):
            if b > a + 1:
                starts[sum(w <= a for w in graph.writers[s])].append(a)
        for version, afters in starts.items():
            codec = _CODECS.get(next(iter(types[s])), Codec.BITMAP)
            asked = next((c for c in Codec if not c.comes_back and read_packed(graph, s, afters[0], c)), None)
            if asked is not None:
                codec = asked
            elif types[s] == {"float32"} and holds_pair(graph, s, afters[0]):
                codec = Codec.PAIR
            yield Packable(s, version, afters[-1], codec, item_bytes)


def number_bytes(graph: StepGraph) -> dict[int, int]:
    """Return the size of the floating-point numbers of each storage that contains nothing else."""
    types: dict[int, set[str]] = defaultdict(set)
    for value in graph.values:
        types[value.storage].add(value.dtype)
    return {s: ITEM_BYTES[next(iter(kinds))] for s, kinds in types.items() if len(kinds) == 1 and kinds <= _NUMBERS}


class PackedReading(enum.Enum):
    """How an operator computes on a packed form."""

    SHAPE = enum.auto()
    """Only the tensor's shape is needed."""
    SELECT = enum.auto()
    """Gradients where a bit is set, +0 elsewhere."""
    SELECT_OTHERS = enum.auto()
    """Gradients where no bit is set."""
    MULTIPLY = enum.auto()
    """Products with the items."""
    SCATTER = enum.auto()
    """Sums of gradients at the places that the items name."""


def read_packed(graph: StepGraph, s: int, after: int, codec: Codec) -> bool:
    """Return whether all uses of storage `s` after op `after` are computed on its packed form, so
    that it is never unpacked.
    """
    following = [graph.ops[u] for u in graph.uses[s] if u > after]
    return bool(following) and all(packed_reading(graph, op, s, codec) is not None for op in following)


def packed_reading(graph: StepGraph, op: Op, s: int, codec: Codec) -> tuple[PackedReading, int] | None:
    """Return how an operator reads storage `s` in packed form, and the index of its gradient argument; None if it needs
    the items.

    Everything is contiguous 32-bit floats, and the results are bit-identical to torch's.
    """
    places = [k for k, a in enumerate(op.args) if any(graph.values[v].storage == s for v in references(a))]
    named = any(graph.values[v].storage == s for _, a in op.kwargs for v in references(a))
    if len(places) != 1 or named or op.writes:
        return None
    read = op.args[places[0]]
    reading, gradient = _reading(graph, op, places[0], codec)
    if reading is None or not isinstance(read, Ref):
        return None
    item = graph.values[read.value]
    whole = math.prod(item.shape) * ITEM_BYTES[item.dtype] == graph.storages[s].nbytes
    if not whole or not _in_rows(item):
        return None
    if reading is PackedReading.SHAPE:
        return reading, gradient
    given, made = op.args[gradient], op.outputs[0]
    if not isinstance(given, Ref) or made is None:
        return None
    values = [graph.values[given.value], graph.values[made]]
    same = values[:1] if reading is PackedReading.SCATTER else values
    if any(v.dtype != "float32" or not _in_rows(v) for v in values) or any(v.shape != item.shape for v in same):
        return None
    return reading, gradient


def _reading(graph: StepGraph, op: Op, place: int, codec: Codec) -> tuple[PackedReading | None, int]:
    match codec, op.name, place:
        case Codec.SIGN, "aten::max_pool2d_with_indices_backward", 1:
            return PackedReading.SHAPE, 0
        case Codec.SIGN, "aten::threshold_backward", 1 if op.args[2] == 0:
            return PackedReading.SELECT, 0
        case Codec.INSIDE, "aten::hardtanh_backward", 1 if _asks_as_others_do(graph, op):
            return PackedReading.SELECT, 0
        case Codec.PAIR, "aten::mul.Tensor", (0 | 1):
            return PackedReading.MULTIPLY, 1 - place
        case Codec.BITS, "aten::masked_fill.Scalar", 1 if _is_zero(op.args[2]):
            return PackedReading.SELECT_OTHERS, 0
        case Codec.BITS, "aten::where.self", 0 if _is_zero(_scalar(graph, op.args[2])):
            return PackedReading.SELECT, 1
        case Codec.BITS, "aten::where.self", 0 if _is_zero(_scalar(graph, op.args[1])):
            return PackedReading.SELECT_OTHERS, 2
        case Codec.NARROW, "aten::max_pool2d_with_indices_backward", 7 if _pools_rows(graph, op):
            return PackedReading.SCATTER, 0
    return None, 0


def asked_interval(graph: StepGraph, s: int) -> tuple[float, float] | None:
    """Return the interval for which the first backward pass of a hardtanh tests storage `s`; None if there is none."""
    asking = (graph.ops[u] for u in graph.uses[s] if graph.ops[u].name == "aten::hardtanh_backward")
    return next((found for op in asking if (found := _interval(op)) is not None), None)


def _asks_as_others_do(graph: StepGraph, op: Op) -> bool:
    (read,) = references(op.args[1])
    return _interval(op) == asked_interval(graph, graph.values[read].storage)


def _interval(op: Op) -> tuple[float, float] | None:
    low, high = op.args[2:4]
    return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None


def _is_zero(argument: object) -> bool:
    number = isinstance(argument, int | float) and not isinstance(argument, bool)
    return number and argument == 0 and math.copysign(1.0, float(argument)) > 0


def _scalar(graph: StepGraph, argument: Argument) -> Argument:
    """Return the number in a zero-dimensional tensor; None for other arguments."""
    if not isinstance(argument, Ref) or graph.values[argument.value].dtype != "float32":
        return None
    made = next((op for op in graph.ops if argument.value in op.outputs), None)
    once = len(graph.writers[graph.values[argument.value].storage]) == 1
    return made.args[0] if made is not None and made.name == "aten::scalar_tensor" and once else None


def _pools_rows(graph: StepGraph, op: Op) -> bool:
    """Return whether a pool's planes are contiguous."""
    pooled = op.args[1]
    return isinstance(pooled, Ref) and _in_rows(graph.values[pooled.value])


def holds_pair(graph: StepGraph, s: int, after: int) -> bool:
    """Return whether storage `s` contains the factors of a dropout after op `after`: zeros and ones,
    drawn or from a mask, divided.
    """
    made = [graph.ops[w] for w in graph.writers[s] if w <= after]
    names = [op.name for op in made]
    fresh = [name for name in names if name not in (_DRAW, _DIVIDE)]
    drawn = _DRAW in names and all(operator_of(name).fill is Filling.NOTHING for name in fresh)
    return names[-1] in (_DRAW, _DIVIDE) and (drawn or (fresh == [_CAST] and _of_mask(graph, made[0])))


def _of_mask(graph: StepGraph, op: Op) -> bool:
    """Return whether an operator casts truth values."""
    cast = op.args[0]
    return isinstance(cast, Ref) and graph.values[cast.value].dtype == "bool"


def _in_rows(value: Value) -> bool:
    """Return whether a value's items are contiguous in row-major order."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
