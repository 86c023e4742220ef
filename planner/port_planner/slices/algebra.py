"""Along which dimension an operator runs piece by piece, as data: what is cut, what stays whole, how small a piece may be.

Only the outermost dimension in memory is cut, so every piece is a contiguous stretch. Measured on torch 2.13 over many
shapes, float32 and bfloat16, by byte; since kernels differ between machines, each piece is compared there before it is used.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from port_planner.ir.graph import ITEM_BYTES, Op, Ref, StepGraph, Value, operands


class Carry(enum.Enum):
    """How an operator carries a dimension through."""

    ELEMENTS = enum.auto()
    """Each element from those at its place: every operand as large as the output along the dimension is cut."""
    ROWS = enum.auto()
    """Each row from its rows; the dimension that it works along is the argument `axis`, and is not cut."""
    FIRST = enum.auto()
    """The operands `cut` and all outputs are cut, the others whole."""
    EVERY = enum.auto()
    """All operands with more than one element are cut in their first dimension, as batches are."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """What may be cut of an operator, and the least number of rows of a piece that keeps its bits."""

    carry: Carry
    least: int = 1
    multiple: int = 1
    """Elements of a piece must be a multiple of this: vector code computes the last elements another way."""
    cut: tuple[int, ...] = ()
    axis: int | None = None


VECTOR = 64
"""Elements: a multiple of every vector that exp and its like are computed in, and of every pair of vectors of 16 bits or more each."""
PRODUCT_ROWS = 16
"""Of a matrix product: fewer rows choose another kernel."""
_CONVOLUTION_SAMPLES = 2

RULES: dict[str, CutRule] = {
    **dict.fromkeys(
        (
            "add", "add_", "sub", "mul", "mul_", "div", "div_", "neg", "where", "clone", "_to_copy", "masked_fill", "relu",
            "relu_", "threshold_backward", "zeros_like", "ones_like", "empty_like", "copy_", "eq", "ne", "lt", "gt", "le", "ge",
            "native_dropout_backward", "clamp_min", "clamp_max", "hardtanh", "hardtanh_backward", "rsub", "sub_", "neg_", "masked_fill_", "hardtanh_",
        ),
        CutRule(Carry.ELEMENTS),
    ),
    **dict.fromkeys(
        (
            "exp", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward", "silu", "silu_backward", "gelu", "gelu_backward",
            "sqrt", "rsqrt", "pow", "exp_", "tanh_", "sigmoid_", "silu_", "gelu_", "sqrt_", "rsqrt_",
        ),
        CutRule(Carry.ELEMENTS, multiple=VECTOR),
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), CutRule(Carry.ROWS, least=2, axis=1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), CutRule(Carry.ROWS, least=2, axis=2)),
    **dict.fromkeys(("mean", "sum", "amax"), CutRule(Carry.ROWS, axis=1)),
    "native_layer_norm": CutRule(Carry.FIRST, cut=(0,)),
    "mm": CutRule(Carry.FIRST, least=PRODUCT_ROWS, cut=(0,)),
    "addmm": CutRule(Carry.FIRST, least=PRODUCT_ROWS, cut=(1,)),
    "bmm": CutRule(Carry.FIRST, cut=(0, 1)),
    "nll_loss_backward": CutRule(Carry.FIRST, cut=(1, 2)),
    "convolution": CutRule(Carry.FIRST, least=_CONVOLUTION_SAMPLES, cut=(0,)),
    "_scaled_dot_product_flash_attention_for_cpu": CutRule(Carry.EVERY),
    "_scaled_dot_product_flash_attention_for_cpu_backward": CutRule(Carry.EVERY),
}  # fmt: skip

MADE_OF_NOTHING = ("zeros_like", "ones_like", "empty_like")
"""Elementwise operators that read no numbers."""

_ROOTS = ("sqrt", "rsqrt", "sqrt_", "rsqrt_")
_ROUNDED = ("float32", "float64")
"""Types in which a root and a square are rounded correctly, so are the same in vectors and one by one."""

_LABELLED = ("nll_loss_backward",)
"""Their labels are cut wherever they lie."""

LOSS = "aten::nll_loss_forward"
DRAW = "aten::bernoulli_.float"


def base_name(op: Op) -> str:
    """Return an operator's name without namespace and overload."""
    return op.name.removeprefix("aten::").partition(".")[0]


def leading(graph: StepGraph, v: int) -> int | None:
    """Return the dimension of a value that is outermost in memory and reaches over its whole storage."""
    value = graph.values[v]
    nbytes, item = graph.storages[value.storage].nbytes, ITEM_BYTES[value.dtype]
    for d, (n, stride) in enumerate(zip(value.shape, value.stride, strict=True)):
        if n > 1 and n * stride * item == nbytes:
            inner = sum((m - 1) * k for j, (m, k) in enumerate(zip(value.shape, value.stride, strict=True)) if j != d)
            return d if value.offset + inner < stride else None
    return None


def cut_dimensions(graph: StepGraph, op: Op) -> dict[int, int] | None:
    """Return, for each value that is cut when the op runs in pieces, the dimension; None where it cannot.

    All that it makes or changes is cut; what is not named is taken whole.
    """
    rule = RULES.get(base_name(op))
    outputs = [v for v in op.outputs if v is not None]
    if rule is None or not outputs or op.random:
        return None
    found = _carried(graph, op, rule, outputs)
    return found if found is not None and has_two_pieces(graph, rule, found) else None


def multiple_of(graph: StepGraph, op: Op, rule: CutRule) -> int:
    """Return what elements of a piece must be a multiple of."""
    first = next((graph.values[v] for v in operands(op)), None)
    exact = base_name(op) in _ROOTS or (base_name(op) == "pow" and op.args[1:] == (2,))
    return 1 if exact and first is not None and first.dtype in _ROUNDED else rule.multiple


def has_two_pieces(graph: StepGraph, rule: CutRule, found: dict[int, int]) -> bool:
    """Say whether all that is cut has enough rows for two pieces."""
    return all(rows_of(rule, graph.values[v], d) >= 2 * rule.least for v, d in found.items())


def rows_of(rule: CutRule, value: Value, d: int) -> int:
    """Return how many rows a value that is cut along dimension `d` has, as `least` counts them."""
    return math.prod(value.shape[:-1]) if rule.carry is Carry.ROWS else value.shape[d]


def _carried(graph: StepGraph, op: Op, rule: CutRule, outputs: list[int]) -> dict[int, int] | None:
    match rule.carry:
        case Carry.ELEMENTS:
            return _elements(graph, op, outputs)
        case Carry.ROWS:
            found = all_leading(graph, [*operands(op), *outputs])
            axes = _axes(op, rule, len(graph.values[outputs[0]].shape))
            return found if axes and found is not None and axes.isdisjoint(found.values()) else None
        case Carry.FIRST:
            chosen = [a.value for k in rule.cut if isinstance(a := op.args[k], Ref)]
            wholes = set(operands(op)) - set(chosen)
            ahead = [v for v in chosen if _is_label(graph, op, v) or _is_repeated(graph, op, v)]
            found = all_leading(graph, [*chosen, *outputs], ahead) if len(chosen) == len(rule.cut) else None
            if found is None or wholes & set(chosen) or not _fits(graph, op, found):
                return None
            return found
        case Carry.EVERY:
            found = all_leading(graph, [*operands(op), *outputs])
            return found if found is not None and set(found.values()) == {0} else None


def _axes(op: Op, rule: CutRule, rank: int) -> set[int]:
    """Return the dimensions that an op of rows works along, which its results must still have; none where they are not told so."""
    axis = op.args[rule.axis] if rule.axis is not None and rule.axis < len(op.args) else None
    if isinstance(axis, tuple):
        kept = len(op.args) > len(("self", "dim")) and op.args[-1] is True
        return {a % rank for a in axis if isinstance(a, int)} if kept else set()
    return {axis % rank} if isinstance(axis, int) else set()


def _is_label(graph: StepGraph, op: Op, v: int) -> bool:
    """Say whether a value is a row of labels, one behind the other: they may be such a part of more, shifted by one."""
    value = graph.values[v]
    return base_name(op) in _LABELLED and len(value.shape) == 1 and value.stride == (1,)


def _is_repeated(graph: StepGraph, op: Op, v: int) -> bool:
    """Say whether a value is one matrix that is taken for each sample."""
    value = graph.values[v]
    return base_name(op) == "bmm" and value.stride[0] == 0 and value.shape[0] > 1


def all_leading(graph: StepGraph, values: Sequence[int], stretches: Sequence[int] = ()) -> dict[int, int] | None:
    """Return the outermost dimension of each of these values, of `stretches` the first; None where one has none."""
    found = {v: 0 if v in stretches else leading(graph, v) for v in values}
    return None if None in found.values() else {v: d for v, d in found.items() if d is not None}


def _fits(graph: StepGraph, op: Op, found: dict[int, int]) -> bool:
    """Say whether the dimension that is cut is one that the operator carries through."""
    name = base_name(op)
    rows = {d for v, d in found.items() if len(graph.values[v].shape) > 1}
    if name in ("mm", "addmm", "bmm", "convolution", "nll_loss_backward"):
        plain = isinstance(op.args[0], Ref) and name == "addmm" and len(graph.values[op.args[0].value].shape) > 1
        return rows == {0} and not plain
    if name == "native_layer_norm":
        kept = op.args[1]
        shape = graph.values[op.args[0].value].shape if isinstance(op.args[0], Ref) else ()
        return isinstance(kept, tuple) and all(d < len(shape) - len(kept) for d in rows)
    return True


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
            continue  # broadcast along the dimension: taken whole
        if own[k] != shape[d] or leading(graph, v) != k:
            return None
        found[v] = k
    return found
