"""Update groups: runs of elementwise operators that update one parameter and may run slice by slice.

An elementwise operator over whole contiguous tensors gives the same bits on consecutive slices that start at multiples
of the vector width. The tail elements are then the same as before.
"""

import math

from port_planner.ir.graph import ITEM_BYTES, Op, Phase, Ref, Role, StepGraph, Value, operands
from port_planner.ir.program import UpdateGroup
from port_planner.operators import base_name, operator_of, overload_name

_HALVES = ("float16", "bfloat16")
_COMPLEX = "complex"
SLICE_BYTES = 1 << 20
"""Bytes of which slices begin at multiples: a multiple of every vector width, and efficient for flash."""


def update_groups(graph: StepGraph) -> tuple[UpdateGroup, ...]:
    """Return the update groups of `graph` that may run sliced, in order."""
    return graph.once(_update_groups)


def _update_groups(graph: StepGraph) -> tuple[UpdateGroup, ...]:
    groups = []
    i = 0
    while i < len(graph.ops):
        if graph.ops[i].phase is not Phase.UPDATE:
            i += 1
            continue
        first = i
        last_write: dict[int, int] = {}
        while i < len(graph.ops) and graph.ops[i].phase is Phase.UPDATE:
            for s in graph.ops[i].writes:
                if graph.storages[s].role is Role.PARAMETER:
                    last_write[s] = i
            i += 1
        for parameter, last in sorted(last_write.items(), key=lambda item: item[1]):
            if group := _group(graph, parameter, first, last):
                groups.append(group)
            first = last + 1
    return tuple(groups)


def slice_bounds(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Return the (start, stop) byte ranges of at most `count` slices of a storage of `nbytes` bytes."""
    step = math.ceil(nbytes / count / SLICE_BYTES) * SLICE_BYTES
    return [(a, min(a + step, nbytes)) for a in range(0, nbytes, step)]


def _group(graph: StepGraph, parameter: int, first: int, last: int) -> UpdateGroup | None:
    if not graph.storages[parameter].nbytes:
        return None  # nothing to cut
    whole: list[int] = []
    storages: set[int] = set()
    for i in range(first, last + 1):
        kinds = [_kind(graph, graph.values[v], parameter) for v in _touched(graph.ops[i])]
        if None in kinds or not kinds:
            return None
        if not any(kinds):
            if storages & {graph.values[v].storage for v in operands(graph.ops[i])}:
                return None
            whole.append(i)
            continue
        if not runs_in_slices(graph.ops[i].name) or graph.ops[i].random or may_round_apart(graph, graph.ops[i]):
            return None
        for v, full in zip(_touched(graph.ops[i]), kinds, strict=True):
            if full:
                storages.add(graph.values[v].storage)
    if not storages:
        return None
    inside = set(range(first, last + 1))
    temporaries = {
        s
        for s in storages
        if graph.storages[s].role is Role.TEMPORARY and inside.issuperset(graph.uses[s]) and s not in graph.kept
    }
    if any(storages & set(graph.creates[i]) - temporaries for i in inside):
        return None  # tensors created by slices would later be read whole
    return UpdateGroup(
        parameter,
        first,
        last,
        tuple(sorted(storages)),
        tuple(sorted(temporaries)),
        tuple(whole),
        graph.storages[parameter].nbytes,
    )


def runs_in_slices(name: str) -> bool:
    """Return whether an operator computes each element from the elements at the same place only.

    The larger of two zeros may be either in vectors and number by number; `maximum.out` takes those of torch's
    optimizers alone, which keep squares and absolute values and have no negative zero.
    """
    return overload_name(name) in operator_of(name).sliced


def _touched(op: Op) -> list[int]:
    return [*operands(op), *(v for v in op.outputs if v is not None)]


def may_round_apart(graph: StepGraph, op: Op) -> bool:
    """Return whether an elementwise operator may round differently in vectors than number by number.

    The amount that is computed at once determines how many numbers are left for the latter at the ends of threads'
    shares. A worker may lower a plan that another machine made, so this covers kernels of any processor;
    `port_planner.exactness.vector_ends` covers those of this one.
    """
    kinds = {graph.values[v].dtype for v in operands(op)}
    if any(kind.startswith(_COMPLEX) for kind in kinds):
        return True
    plain = base_name(op.name).removesuffix("_")
    if plain == "lerp":
        weight = op.args[-1]
        return _count(graph.values[weight.value]) > 1 if isinstance(weight, Ref) else weight == 1
    by_third = (
        plain == "add" and overload_name(op.name) == "Scalar" and len(op.args) > 2
    )  # sums of tensors use it by name
    scale = op.args[2] if by_third else dict(op.kwargs).get("alpha", 1)
    return scale != 1 and not kinds.isdisjoint(_HALVES)


def _count(value: Value) -> int:
    count = 1
    for n in value.shape:
        count *= n
    return count


def _kind(graph: StepGraph, value: Value, parameter: int) -> bool | None:
    """Return the kind of an operand: True for a whole contiguous tensor of the parameter's size.

    False for a single element, None for anything else.
    """
    if _count(value) == 1:
        return False
    nbytes = graph.storages[parameter].nbytes
    if (
        graph.storages[value.storage].nbytes != nbytes
        or value.offset
        or _count(value) * ITEM_BYTES[value.dtype] != nbytes
    ):
        return None
    stride = 1
    for n, k in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if n != 1 and k != stride:
            return None
        stride *= n
    return True
