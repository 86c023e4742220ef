"""Slices, splits, zero padding and permuted channels as convolutions that only select: each
output is one input, or zero.

What a call selects is found by running it in torch on a tensor whose values are the positions of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from port_planner.mcu.ir import KernelCall, OpKind, Shape
from port_planner.mcu.torch_axes import GRAPH_AXES, TorchAxes

Places = tuple[int, ...]
"""Along one axis: the input position of each output position; PAD: zero."""
PAD = -1
BATCH = 2


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """What a call selects: positions along each axis of its input, and the input axis of each output axis.

    None for an output axis of extent 1 that corresponds to no input axis.
    """

    places: tuple[Places, ...]
    axes: tuple[int | None, ...]


def read_choice(call: Callable[[torch.Tensor], torch.Tensor], extents: Sequence[int]) -> AxisChoice | None:
    """Return what a call selects from samples of these extents; None if it does more than select along each axis.

    `call` receives a batch of two.
    """
    size = prod(extents)
    ids = torch.arange(1, BATCH * size + 1, dtype=torch.float64).reshape(BATCH, *extents)
    answer = call(ids)
    result = answer.long()
    if not torch.equal(answer, result.to(answer.dtype)):
        return None  # some values are computed, not selected
    if len(result) != BATCH or not torch.equal(result[1], torch.where(result[0] > 0, result[0] + size, 0)):
        return None
    found: NDArray[np.int64] = result[0].numpy()
    if not found.size or found.min() < 0 or found.max() > size or not found.any():
        return None
    return _separated(found, tuple(extents))


def _separated(found: NDArray[np.int64], extents: tuple[int, ...]) -> AxisChoice | None:
    """Return the choice that gives these ids (0: zero), if it can be divided into one choice for each axis."""
    coordinates = np.stack(np.unravel_index(np.maximum(found - 1, 0), extents))
    real = found > 0
    axes: list[int | None] = [None] * found.ndim
    places: list[Places] = []
    for number, along in enumerate(coordinates):
        moving = [axis for axis in range(found.ndim) if _varies(along, real, axis)]
        if len(moving) > 1 or (moving and axes[moving[0]] is not None):
            return None
        if moving:
            axes[moving[0]] = number
        places.append((int(along[real][0]),))
    _claim_still_axes(axes, found.shape, extents)
    for axis, owner in enumerate(axes):
        if owner is not None:
            others = tuple(other for other in range(found.ndim) if other != axis)
            shown = np.atleast_1d(real.any(axis=others))
            first = np.where(real, coordinates[owner], -1).max(axis=others)
            places[owner] = tuple(int(at) if there else PAD for at, there in zip(first, shown, strict=True))
        elif found.shape[axis] != 1:
            return None
    choice = AxisChoice(tuple(places), tuple(axes))
    return choice if np.array_equal(_ids(choice, extents), found) else None


def _varies(along: NDArray[np.int64], real: NDArray[np.bool_], axis: int) -> bool:
    high = np.where(real, along, -1).max(axis=axis)
    low = np.where(real, along, np.iinfo(np.int64).max).min(axis=axis)
    return bool((high > low).any())


def _claim_still_axes(axes: list[int | None], shape: tuple[int, ...], extents: tuple[int, ...]) -> None:
    """Assign output axes along which nothing moves to input axes of the same extent, in order."""
    if len(shape) != len(extents):
        return
    for axis, owner in enumerate(axes):
        if owner is None and axis not in axes:
            axes[axis] = axis


def _ids(choice: AxisChoice, extents: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the result of a choice on ids counted from 1."""
    owned = [owner for owner in choice.axes if owner is not None]
    lists = [choice.places[owner] for owner in owned]
    grid = np.meshgrid(*(np.array(places) for places in lists), indexing="ij") if lists else []
    index = [np.full(grid[0].shape if grid else (), places[0]) for places in choice.places]
    for owner, along in zip(owned, grid, strict=True):
        index[owner] = along
    real = np.all([along != PAD for along in index], axis=0)
    flat = np.ravel_multi_index([np.maximum(along, 0) for along in index], extents)
    shape = [1 if owner is None else len(choice.places[owner]) for owner in choice.axes]
    return np.asarray(np.where(real, flat + 1, 0)).reshape(shape)


def choosing_ops(choice: AxisChoice, source: str, seen: TorchAxes) -> tuple[list[KernelCall], TorchAxes] | None:
    """Return the ops of a choice, unnamed, each reading the one before, and what torch sees of the last.

    None if an axis of torch corresponds to several of the graph, or the positions do not form a window.
    """
    whole = {name: tuple(range(extent)) for name, extent in zip("CHW", _extents(seen.shape), strict=True)}
    chosen = dict(whole)
    for axis, places in zip(seen.axes, choice.places, strict=True):
        if (axis == "" and places != (0,)) or len(axis) > 1:
            return None
        if axis:
            chosen[axis] = places
    ops, shape = [], seen.shape
    if any(chosen[name] != whole[name] for name in "HW"):
        window = _window(source, shape, chosen["H"], chosen["W"])
        if window is None:
            return None
        ops.append(window)
        shape = window.out_shape
    if chosen["C"] != whole["C"]:
        ops.append(_channels(source, shape, chosen["C"]))
        shape = ops[-1].out_shape
    axes = ["" if owner is None else seen.axes[owner] for owner in choice.axes]
    return ops, TorchAxes.of(shape, axes)


def _extents(shape: Shape) -> tuple[int, int, int]:
    return shape.channels, shape.height, shape.width


@dataclass(frozen=True, slots=True)
class _Taps:
    """A window along one axis: of `kernel` taps, the tap at `tap` is 1 and the others are 0."""

    kernel: int
    tap: int
    stride: int
    padding: int


def _taps(places: Places, extent: int) -> _Taps | None:
    real = [at for at in places if at != PAD]
    lead = next(index for index, at in enumerate(places) if at != PAD)
    steps = {after - before for before, after in pairwise(real)} or {max(1, real[0] + 1)}
    stride, trail = steps.pop(), len(places) - lead - len(real)
    if steps or stride < 1 or PAD in places[lead : lead + len(real)]:
        return None
    if (lead and real[0] - stride >= 0) or (trail and real[-1] + stride < extent):
        return None
    start = real[0] - lead * stride
    padding = max(0, -start, start + (len(places) - 1) * stride - extent + 1)
    return _Taps(extent + 2 * padding - (len(places) - 1) * stride, padding + start, stride, padding)


def _window(source: str, shape: Shape, rows: Places, columns: Places) -> KernelCall | None:
    down, across = _taps(rows, shape.height), _taps(columns, shape.width)
    if down is None or across is None:
        return None
    weight = np.zeros((down.kernel, across.kernel, shape.channels), np.float32)
    weight[down.tap, across.tap] = 1.0
    return KernelCall(
        "", OpKind.DEPTHWISE, (source,), shape, Shape(len(rows), len(columns), shape.channels), weight.shape[:2],
        (down.stride, across.stride), (down.padding, across.padding), weight=weight,
        bias=np.zeros(shape.channels, np.float32), fixed=True,
    )  # fmt: skip


def _channels(source: str, shape: Shape, chosen: Places) -> KernelCall:
    weight = np.zeros((len(chosen), 1, 1, shape.channels), np.float32)
    for row, channel in enumerate(chosen):
        if channel != PAD:
            weight[row, 0, 0, channel] = 1.0
    out = replace(shape, channels=len(chosen))
    return KernelCall(
        "", OpKind.CONV, (source,), shape, out, weight=weight, bias=np.zeros(len(chosen), np.float32), fixed=True
    )


def identity_layer(source: str, seen: TorchAxes) -> KernelCall:
    """Return the linear layer that passes the values of a tensor with one axis in torch through unchanged."""
    (axis,), elements = seen.axes, seen.shape.elements
    extents = [dict(zip(GRAPH_AXES, _extents(seen.shape), strict=True))[name] for name in axis]
    order = (0, *(1 + axis.index(name) for name in "HWC" if name in axis))
    weight = np.eye(elements, dtype=np.float32).reshape(elements, *extents).transpose(order)
    return KernelCall(
        "",
        OpKind.CONV,
        (source,),
        Shape(1, 1, elements),
        Shape(1, 1, elements),
        weight=np.ascontiguousarray(weight.reshape(elements, 1, 1, elements)),
        bias=np.zeros(elements, np.float32),
        fixed=True,
    )


def image_layer(source: str, extents: Sequence[int]) -> KernelCall:
    """Return the layer that makes an image [C, H, W] or [C, W] from a tensor that has only
    channels, in torch's order.
    """
    channels, *spatial = extents
    height, width = (1, *spatial)[-2:]
    places = height * width
    window = np.eye(places, dtype=np.float32).reshape(height, width, places)
    return KernelCall(
        "",
        OpKind.TRANSPOSED,
        (source,),
        Shape(1, 1, channels * places),
        Shape(height, width, channels),
        (height, width),
        weight=np.repeat(window[None], channels, 0),
        bias=np.zeros(channels, np.float32),
        groups=channels,
        fixed=True,
    )


__all__ = ["AxisChoice", "choosing_ops", "identity_layer", "image_layer", "read_choice"]
