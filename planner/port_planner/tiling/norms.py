"""Run the backward pass of a batch norm by channels, with its result in the output gradient's memory.

As one operator it holds the input, the gradient of the output and that of the input whole, and its kernel copies as
workspace. A channel's gradients depend on that channel alone, so tiles of channels, each copied to contiguous memory,
give the same bits; if nothing else reads the output's gradient, each tile's result overwrites it.
"""

import math
from dataclasses import replace

from port_planner.ir.graph import ITEM_BYTES, Op, Ref, StepGraph, Tile, Value
from port_planner.operators.row import PRODUCT_ROWS
from port_planner.tiling.chains import touched_bytes
from port_planner.tiling.in_place import is_last_reader, lies_as
from port_planner.tiling.rewriting import GraphBuilder, Replacement, RewrittenGraph, lying, row_major
from port_planner.tiling.tiles import even_bounds

NORM_BACKWARD = "aten::native_batch_norm_backward"
_CHANNELS = 1
"""The dimension of channels."""
_VECTORS = slice(2, 7)
"""Arguments with a number for each channel: weight, running and saved statistics."""
_MULTIPLE = PRODUCT_ROWS
"""Number of which the channels of a tile are a multiple, so that channel offsets are at vector boundaries."""


def norms_by_channels(
    graph: StepGraph, fat_bytes: int, count: int, without: frozenset[int] = frozenset()
) -> RewrittenGraph:
    """Return the graph with large batch norm backward passes (over `fat_bytes`) in at most `count` tiles.

    Ops in `without` stay whole.
    """
    builder, moved, replacements = GraphBuilder(graph), dict[int, int](), list[Replacement]()
    chain = 1 + max((op.tile.chain for op in graph.ops if op.tile is not None), default=-1)
    for i, op in enumerate(graph.ops):
        fat = i not in without and touched_bytes(graph, i) > fat_bytes and _is_by_channels(graph, op)
        bounds = even_bounds(_values(graph, op)[0].shape[_CHANNELS], count, _MULTIPLE) if fat else ()
        if len(bounds) <= 1:
            builder.add(lying(builder, graph, op, moved))
            continue
        gradient, result = _values(graph, op)[0], _outputs(graph, op)[0]
        in_place = is_last_reader(graph, i, gradient.storage) and lies_as(graph, gradient, result)
        if in_place and result.storage not in graph.kept:
            moved[result.storage] = moved.get(gradient.storage, gradient.storage)
        what, first = "native_batch_norm_backward by channels", len(builder.ops)
        _add_tiles(builder, lying(builder, graph, op, moved), bounds, Tile(chain, what, 0, len(bounds)))
        replacements.append(Replacement((i,), tuple(range(first, len(builder.ops))), f"{what} in {len(bounds)} tiles"))
        chain += 1
    return RewrittenGraph(builder.graph(), tuple(replacements), moved=moved)


def _values(graph: StepGraph, op: Op) -> list[Value]:
    return [graph.values[a.value] for a in op.args if isinstance(a, Ref)]


def _outputs(graph: StepGraph, op: Op) -> list[Value]:
    return [graph.values[v] for v in op.outputs if v is not None]


def _is_by_channels(graph: StepGraph, op: Op) -> bool:
    """Return whether an op is such a backward pass, on row-major tensors, with all three gradients required."""
    if op.name != NORM_BACKWARD or op.kwargs or not all(isinstance(a, Ref) for a in op.args[:2]):
        return False
    tensors = [*_values(graph, op), *_outputs(graph, op)]
    channels = tensors[0].shape[_CHANNELS]
    images = [v for v in tensors if len(v.shape) > 1]
    alike = all(v.shape == tensors[0].shape and v.stride == row_major(v.shape) for v in images)
    vectors = all(v.shape == (channels,) and v.stride == (1,) for v in tensors if len(v.shape) == 1)
    return alike and vectors and len(images) == len(("gradient", "input", "result")) and None not in op.outputs


def _add_tiles(builder: GraphBuilder, op: Op, bounds: tuple[tuple[int, int], ...], tile: Tile) -> None:
    """Add the tiles of an op, whose results are copied to their places."""
    places = [builder.known(v) for v in op.outputs if v is not None]
    there = {builder.known(a.value).storage for a in op.args if isinstance(a, Ref)}
    for place in places:
        if place.storage not in there:
            builder.reserve(place, op.phase)
    for k, (begin, end) in enumerate(bounds):
        first = len(builder.ops)
        args = [*op.args]
        for at, argument in enumerate(op.args):
            if isinstance(argument, Ref):
                part = _tile(builder.known(argument.value), begin, end)
                args[at] = Ref(builder.value(part) if at in range(7)[_VECTORS] else _copied(builder, op, part))
        results = [_like(builder, _tile(place, begin, end)) for place in places]
        builder.add(replace(op, args=tuple(args), outputs=tuple(results)))
        for place, result in zip(places, results, strict=True):
            target = builder.value(_tile(place, begin, end))
            builder.add(Op("aten::copy_", (Ref(target), Ref(result)), (), (target,), (place.storage,), op.phase))
        builder.mark(first, replace(tile, index=k))


def _tile(value: Value, begin: int, end: int) -> Value:
    """Return channels of a tensor, or of a vector with one number per channel."""
    d = min(_CHANNELS, len(value.shape) - 1)
    shape = (*value.shape[:d], end - begin, *value.shape[d + 1 :])
    return replace(value, shape=shape, offset=value.offset + begin * value.stride[d])


def _copied(builder: GraphBuilder, op: Op, part: Value) -> int:
    """Add a contiguous copy of channels: the kernel for strided ones differs."""
    made = _like(builder, part)
    builder.add(Op("aten::clone", (Ref(builder.value(part)),), (), (made,), (), op.phase))
    return made


def _like(builder: GraphBuilder, part: Value) -> int:
    nbytes = math.prod(part.shape) * ITEM_BYTES[part.dtype]
    return builder.value(replace(part, storage=builder.storage(nbytes), stride=row_major(part.shape), offset=0))
