"""Split the backward pass of a convolution into halves: the weight's gradient, then the input's.

As one operator it holds output gradient, input, both results and the workspace of both at once. The weight's half needs
no memory for the input's gradient, and the input's half does not read the input. The latter is a convolution of the
output's gradient with the weight (transposed if the original was not), by the kernel that the backward pass runs. The
halves may run at different times, and between them the input may be evicted, recomputed or stay evicted.

Kernels of some processors (Arm's) compute the backward pass in a different order than such a convolution. There
the input's half is the backward operator itself, called for that gradient alone. It uses only the shape of the
input, so a stand-in suffices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from port_planner.ir.graph import Op, Ref, StepGraph, Tile, Value
from port_planner.tiling.rewriting import GraphBuilder, Replacement, RewrittenGraph, row_major

CONVOLUTION_BACKWARD = "aten::convolution_backward"
CONVOLUTION = "aten::convolution"
WHAT = "convolution_backward in halves"
_TILES = "convolution_backward, gradient by gradient"


@dataclass(frozen=True, slots=True)
class _Backward:
    """The arguments of `convolution_backward`, by name (native_functions.yaml of torch 2)."""

    gradient: Value
    input: Value
    weight: Value
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    wanted: tuple[bool, ...]


_InputHalf: TypeAlias = Callable[[GraphBuilder, Op, _Backward], Op | None]
"""Creates the op that computes only the input's gradient; returns None if the result would differ from the whole's."""


def split_gradients(graph: StepGraph, without: frozenset[int] = frozenset()) -> RewrittenGraph:
    """Return the graph with every convolution's backward pass in halves, except the ops in `without`."""
    return _split(graph, without, _as_convolution)


def split_gradients_by_mask(graph: StepGraph, without: frozenset[int] = frozenset()) -> RewrittenGraph:
    """Return the graph with the remaining whole backward passes in halves that both use that operator,
    except the ops in `without`.
    """
    return _split(graph, without, _as_backward)


def _split(graph: StepGraph, without: frozenset[int], input_half: _InputHalf) -> RewrittenGraph:
    builder = GraphBuilder(graph)
    replacements = list[Replacement]()
    for i, op in enumerate(graph.ops):
        halves = None if i in without else _halves(graph, op, builder, input_half)
        if halves is None:
            builder.add(op)
            continue
        if len(halves) > 1:
            chain, count = len(replacements), len(halves)
            halves = tuple(replace(half, tile=Tile(chain, _TILES, k, count)) for k, half in enumerate(halves))
        replacements.append(Replacement((i,), tuple(builder.add(half) for half in halves), WHAT))
    return RewrittenGraph(builder.graph(), tuple(replacements))


def saved_bytes(graph: StepGraph, rewritten: RewrittenGraph, replacement: Replacement) -> int:
    """Return how much less the fullest of the new ops touches than the fullest of the old ones."""
    return _fullest(graph, replacement.old) - _fullest(rewritten.graph, replacement.new)


def _fullest(graph: StepGraph, ops: tuple[int, ...]) -> int:
    return max(sum(graph.storages[s].nbytes for s in {*graph.reads[i], *graph.creates[i]}) for i in ops)


def _halves(graph: StepGraph, op: Op, builder: GraphBuilder, input_half: _InputHalf) -> tuple[Op, ...] | None:
    """Return the ops that compute `op` in halves; None if it is not such an op or is already one half."""
    call = _backward(graph, op)
    if call is None or not call.wanted[0] or len(op.outputs) != sum(call.wanted) or op.outputs[0] is None:
        return None
    out = graph.values[op.outputs[0]]
    if any(v.stride != row_major(v.shape) for v in (call.gradient, call.input, call.weight, out)):
        return None  # a layout that torch chooses by its operands' could be another without the input among them
    by_input = input_half(builder, op, call)
    if by_input is None:
        return None
    if not any(call.wanted[1:]):
        return (by_input,)
    by_weight = Op(op.name, (*op.args[:-1], (False, *call.wanted[1:])), op.kwargs, op.outputs[1:], (), op.phase)
    return by_weight, by_input


def _as_convolution(_: GraphBuilder, op: Op, call: _Backward) -> Op | None:
    padding = tuple(_output_padding(call))
    if any(not 0 <= p < max(s, d) for p, s, d in zip(padding, call.stride, call.dilation, strict=True)):
        return None
    gradient, _input, weight = op.args[:3]
    return Op(
        CONVOLUTION,
        (
            gradient, weight, None, call.stride, call.padding, call.dilation, not call.transposed,
            (0,) * len(padding) if call.transposed else padding, call.groups,
        ),
        (), (op.outputs[0],), (), op.phase,
    )  # fmt: skip


def _as_backward(builder: GraphBuilder, op: Op, call: _Backward) -> Op | None:
    if not any(call.wanted[1:]) or call.input.dtype != call.weight.dtype:
        return None
    shape = call.input.shape
    stand_in = builder.value(replace(call.weight, shape=shape, stride=(0,) * len(shape)))
    gradient, _input, weight, *others = op.args[:-1]
    args = (gradient, Ref(stand_in), weight, *others, (True, False, False))
    return Op(op.name, args, op.kwargs, op.outputs[:1], (), op.phase)


def _backward(graph: StepGraph, op: Op) -> _Backward | None:
    if op.name != CONVOLUTION_BACKWARD or op.kwargs:
        return None
    gradient, source, weight = (graph.values[a.value] for a in op.args[:3] if isinstance(a, Ref))
    stride, padding, dilation, transposed, output_padding, groups, wanted = op.args[4:]
    return _Backward(
        gradient,
        source,
        weight,
        tuple(_numbers(stride)),
        tuple(_numbers(padding)),
        tuple(_numbers(dilation)),
        transposed is True,
        tuple(_numbers(output_padding)),
        next(_numbers((groups,))),
        tuple(w is True for w in _items(wanted)),
    )


def _items(argument: object) -> tuple[object, ...]:
    return argument if isinstance(argument, tuple) else ()


def _numbers(argument: object) -> Iterator[int]:
    for number in _items(argument):
        if isinstance(number, int):
            yield number


def _output_padding(call: _Backward) -> Iterator[int]:
    """Yield, per dimension, how far the input extends beyond the size that the output implies."""
    if call.transposed:
        yield from (0 for _ in call.stride)
        return
    sizes = zip(
        call.input.shape[2:],
        call.gradient.shape[2:],
        call.weight.shape[2:],
        call.stride,
        call.padding,
        call.dilation,
        strict=True,
    )
    for whole, out, kernel, stride, padding, dilation in sizes:
        yield whole - ((out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
