"""Rules for tiling operators as data: the dimension, what is cut, what stays whole, and the least tile size.

Only the outermost dimension in memory is cut, so every tile is contiguous. Measured on torch 2.13 over many shapes,
float32 and bfloat16, by byte; since kernels differ between machines, each tile is compared there before it is used.
"""

import math
from collections.abc import Sequence

from port_planner.ir.graph import ITEM_BYTES, Op, Ref, StepGraph, Value, operands
from port_planner.operators import base_name, operator_of
from port_planner.operators.row import CutDimension, TileRule

_ROUNDED = ("float32", "float64")
"""Types whose square roots and squares are rounded correctly, so vector and scalar results agree."""

_LABELLED = "nll_loss_backward"
"""Operator whose labels are cut regardless of their layout."""

LOSS = "aten::nll_loss_forward"
DRAW = "aten::bernoulli_.float"


def leading(graph: StepGraph, v: int) -> int | None:
    """Return the dimension of a value that is outermost in memory and extends over its whole storage."""
    value = graph.values[v]
    nbytes, item = graph.storages[value.storage].nbytes, ITEM_BYTES[value.dtype]
    for d, (n, stride) in enumerate(zip(value.shape, value.stride, strict=True)):
        if n > 1 and n * stride * item == nbytes:
            inner = sum((m - 1) * k for j, (m, k) in enumerate(zip(value.shape, value.stride, strict=True)) if j != d)
            return d if value.offset + inner < stride else None
    return None


def tile_dimensions(graph: StepGraph, op: Op) -> dict[int, int] | None:
    """Return the cut dimension of each value that is cut when the op runs in tiles, or None if it cannot.

    Everything it creates or changes is cut; values not listed are used whole.
    """
    rule = operator_of(op.name).cut
    outputs = [v for v in op.outputs if v is not None]
    if rule is None or not outputs or op.random:
        return None
    found = _carried(graph, op, rule, outputs)
    return found if found is not None and has_two_tiles(graph, rule, found) else None


def multiple_of(graph: StepGraph, op: Op, rule: TileRule) -> int:
    """Return the number of which a tile's elements must be a multiple."""
    first = next((graph.values[v] for v in operands(op)), None)
    exact = rule.rounded or (base_name(op.name) == "pow" and op.args[1:] == (2,))
    return 1 if exact and first is not None and first.dtype in _ROUNDED else rule.multiple


def has_two_tiles(graph: StepGraph, rule: TileRule, found: dict[int, int]) -> bool:
    """Return whether everything that is cut has enough rows for two tiles."""
    return all(rows_of(rule, graph.values[v], d) >= 2 * rule.least for v, d in found.items())


def rows_of(rule: TileRule, value: Value, d: int) -> int:
    """Return how many rows a value that is cut along dimension `d` has, in the units of `least`."""
    return math.prod(value.shape[:-1]) if rule.dimension is CutDimension.ROWS else value.shape[d]


def _carried(graph: StepGraph, op: Op, rule: TileRule, outputs: list[int]) -> dict[int, int] | None:
    match rule.dimension:
        case CutDimension.ELEMENTS:
            return _elements(graph, op, outputs)
        case CutDimension.ROWS:
            found = all_leading(graph, [*operands(op), *outputs])
            axes = _axes(op, rule, len(graph.values[outputs[0]].shape))
            return found if axes and found is not None and axes.isdisjoint(found.values()) else None
        case CutDimension.FIRST:
            chosen = [a.value for k in rule.cut if isinstance(a := op.args[k], Ref)]
            wholes = set(operands(op)) - set(chosen)
            ahead = [v for v in chosen if _is_label(graph, op, v) or _is_repeated(graph, op, v)]
            found = all_leading(graph, [*chosen, *outputs], ahead) if len(chosen) == len(rule.cut) else None
            if found is None or wholes & set(chosen) or not _fits(graph, op, found):
                return None
            return found
        case CutDimension.EVERY:
            found = all_leading(graph, [*operands(op), *outputs])
            return found if found is not None and set(found.values()) == {0} else None


def _axes(op: Op, rule: TileRule, rank: int) -> set[int]:
    """Return the dimensions along which an op on rows works, which its results must keep;
    empty if the rule names none.
    """
    axis = op.args[rule.axis] if rule.axis is not None and rule.axis < len(op.args) else None
    if isinstance(axis, tuple):
        kept = len(op.args) > len(("self", "dim")) and op.args[-1] is True
        return {a % rank for a in axis if isinstance(a, int)} if kept else set()
    return {axis % rank} if isinstance(axis, int) else set()


def _is_label(graph: StepGraph, op: Op, v: int) -> bool:
    """Return whether a value is a contiguous row of labels, which may be a part of a longer one, shifted by one."""
    value = graph.values[v]
    return base_name(op.name) == _LABELLED and len(value.shape) == 1 and value.stride == (1,)


def _is_repeated(graph: StepGraph, op: Op, v: int) -> bool:
    """Return whether a value is one matrix that is reused for each sample."""
    value = graph.values[v]
    return base_name(op.name) == "bmm" and value.stride[0] == 0 and value.shape[0] > 1


def all_leading(graph: StepGraph, values: Sequence[int], spans: Sequence[int] = ()) -> dict[int, int] | None:
    """Return the outermost dimension of each of these values, and of the first of `spans`; None if one has none."""
    found = {v: 0 if v in spans else leading(graph, v) for v in values}
    return None if None in found.values() else {v: d for v, d in found.items() if d is not None}


def _fits(graph: StepGraph, op: Op, found: dict[int, int]) -> bool:
    """Return whether the cut dimension is one that the operator preserves."""
    name = base_name(op.name)
    rows = {d for v, d in found.items() if len(graph.values[v].shape) > 1}
    if name == "native_layer_norm":
        kept = op.args[1]
        shape = graph.values[op.args[0].value].shape if isinstance(op.args[0], Ref) else ()
        return isinstance(kept, tuple) and all(d < len(shape) - len(kept) for d in rows)
    plain = isinstance(op.args[0], Ref) and name == "addmm" and len(graph.values[op.args[0].value].shape) > 1
    return rows == {0} and not plain


def _elements(graph: StepGraph, op: Op, outputs: list[int]) -> dict[int, int] | None:
    out = outputs[0]
    d, shape = leading(graph, out), graph.values[out].shape
    if d is None:
        return None
    found = {}
    for v in {*operands(op), *outputs}:
        own = graph.values[v].shape
        k = d - len(shape) + len(own)
        if k < 0 or own[k] == 1:
            continue  # broadcast along the dimension: used whole
        if own[k] != shape[d] or leading(graph, v) != k:
            return None
        found[v] = k
    return found
