"""Operators that only move elements: a contiguous copy of a view, the gradient of a slice.

A language model's logits without those of the last token are copied this way, and their gradient is put back among
zeros. Both are described as runs of consecutive elements, which can be moved a part at a time.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_COPY = "aten::clone"
_OF_SLICE = "aten::slice_backward"

_SHORTEST_RUN_BYTES = 64 << 10
"""Bytes below which runs are not tiled, because each run takes a call."""


@dataclass(frozen=True, slots=True)
class ElementRun:
    """The next `count` elements of a result: those from element `start` of the operand's
    storage, or, if None, zeros.
    """

    start: int | None
    count: int


def only_copies(func: Any) -> bool:
    """Return whether an operator can be described as runs."""
    return func._schema.name in (_COPY, _OF_SLICE)


def element_runs(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ElementRun, ...]:
    """Return the runs that make up a call's result, in order; empty if it cannot be described as runs."""
    source = args[0]
    if source.layout is not torch.strided or source.is_conj() or source.is_neg() or 0 in source.shape:
        return ()
    if func._schema.name == _COPY:
        return _of_view(source) if kwargs.get("memory_format") is torch.contiguous_format else ()
    return _of_slice(source, *args[1:])


def _of_view(source: torch.Tensor) -> tuple[ElementRun, ...]:
    count, outer = 1, source.dim()
    while outer > 0 and (source.stride(outer - 1) == count or source.shape[outer - 1] == 1):
        outer -= 1
        count *= source.shape[outer]
    if count * source.element_size() < _SHORTEST_RUN_BYTES:
        return ()
    places = itertools.product(*(range(size) for size in source.shape[:outer]))
    strides = source.stride()[:outer]
    return tuple(
        ElementRun(int(source.storage_offset()) + sum(map(operator.mul, place, strides)), count) for place in places
    )


def _of_slice(
    grad: torch.Tensor, sizes: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> tuple[ElementRun, ...]:
    dim %= len(sizes)
    inner, length = math.prod(sizes[dim + 1 :]), grad.shape[dim]
    count = length * inner
    if step != 1 or not grad.is_contiguous() or count * grad.element_size() < _SHORTEST_RUN_BYTES:
        return ()
    first = min(max((start or 0) + (sizes[dim] if (start or 0) < 0 else 0), 0), sizes[dim])
    around = [ElementRun(None, first * inner), ElementRun(None, (sizes[dim] - first - length) * inner)]
    runs = list[ElementRun]()
    for number in range(math.prod(sizes[:dim])):
        runs += [around[0], ElementRun(int(grad.storage_offset()) + number * count, count), around[1]]
    return tuple(run for run in runs if run.count > 0)
