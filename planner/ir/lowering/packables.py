"""What of a step could be stored packed while it waits for its next use."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.costs import Codec
from planner.ir.graph import ITEM_BYTES, Op, Ref, Role, StepGraph, Value, references

_CODECS = {"bool": Codec.BITS, "int64": Codec.NARROW}
THRESHOLD_BACKWARD = "aten::threshold_backward"
"""ReLU's backward pass: of gradient, activation and threshold."""
SHAPE_READERS = ("aten::max_pool2d_with_indices_backward",)
"""Operators that take an activation, their second argument as above, for its shape alone."""
_ACTIVATION = 1

_NUMBERS = {"float16", "bfloat16", "float32"}
"""What pages are packed of."""
_PACKED_ITEMS = (1, 2, 4, 8)
"""Sizes of items that the codecs take."""


@dataclass(frozen=True, slots=True)
class Packable:
    """Contents of a storage that lie idle after op `after`, the last to touch their `version`, and the codec for their type."""

    storage: int
    version: int
    after: int
    codec: Codec
    item_bytes: int


def packables(graph: StepGraph, *, least_bytes: int = 1) -> Iterator[Packable]:
    """Yield what could be packed somewhere: contents of temporaries of one type that lie idle for more than one op."""
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
            if signs_suffice(graph, s, afters[0]):
                codec = Codec.SIGN
            yield Packable(s, version, afters[-1], codec, item_bytes)


def number_bytes(graph: StepGraph) -> dict[int, int]:
    """Return the size of the floating-point numbers of each storage that holds nothing else."""
    types: dict[int, set[str]] = defaultdict(set)
    for value in graph.values:
        types[value.storage].add(value.dtype)
    return {s: ITEM_BYTES[next(iter(kinds))] for s, kinds in types.items() if len(kinds) == 1 and kinds <= _NUMBERS}


def signs_suffice(graph: StepGraph, s: int, after: int) -> bool:
    """Say whether all that happens to storage `s` after op `after` needs no more of its items than `not (item <= 0)`."""
    following = [graph.ops[u] for u in graph.uses[s] if u > after]
    return bool(following) and all(_asks_signs(graph, op, s) for op in following)


def _asks_signs(graph: StepGraph, op: Op, s: int) -> bool:
    places = [k for k, a in enumerate(op.args) if any(graph.values[v].storage == s for v in references(a))]
    named = any(graph.values[v].storage == s for _, a in op.kwargs for v in references(a))
    if places != [_ACTIVATION] or named or s in op.writes:
        return False
    read = [graph.values[a.value] for a in op.args[:2] if isinstance(a, Ref)]
    if len(read) < 2 or not _in_rows(read[_ACTIVATION]):
        return False
    if op.name in SHAPE_READERS:
        return True
    if op.name != THRESHOLD_BACKWARD or op.args[2] != 0 or op.outputs[0] is None:
        return False
    values = [*read, graph.values[op.outputs[0]]]
    whole = math.prod(values[1].shape) * ITEM_BYTES["float32"] == graph.storages[s].nbytes
    return whole and all(v.dtype == "float32" and v.shape == values[1].shape and _in_rows(v) for v in values)


def _in_rows(value: Value) -> bool:
    """Say whether a value's items lie one after the other, the last dimension's first."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
