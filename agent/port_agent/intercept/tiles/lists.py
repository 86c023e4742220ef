"""Operators over lists of tensors, `_foreach_*` and `_fused_*`, run element by element.

Their CPU kernels are loops over the lists, so the bits are the same, and not every parameter of the model
must be resident at once.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from port_planner.operators import operator_of

_LISTS = "aten::_foreach_"

_WHOLE_FRACTION = 16
"""Fraction of the limit: lists that together take less run whole, because a call per element has a cost."""

Call = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def runs_by_element(func: Any, args: Sequence[Any], limit_bytes: float) -> bool:
    """Return whether a call is over lists that are too large to be resident together."""
    if not takes_lists(func):
        return False
    total = sum(
        t.numel() * t.element_size()
        for a in args
        if isinstance(a, (list, tuple))
        for t in a
        if isinstance(t, torch.Tensor)
    )
    return total * _WHOLE_FRACTION > limit_bytes


@cache
def takes_lists(func: Any) -> bool:
    """Return whether an operator is a loop over lists of tensors."""
    known = operator_of(func._schema.name)
    return known.over_lists or known.fused_update or bool(func._schema.name.startswith(_LISTS))


def split_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> Any:
    """Run a call over lists element by element; return, or raise, what the whole call would."""
    listed = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a) > 0]
    count = max(map(len, listed), default=0)
    numbers = _numbers_argument(func)
    if (
        any(len(a) != count for a in listed)
        or count == 0
        or (numbers is not None and not _one_each(args[numbers], count))
    ):
        return call(func, args, kwargs)  # nothing to do, or an error before anything is changed

    def one(argument: Any, index: int) -> Any:
        whole = isinstance(argument, (list, tuple)) and len(argument) > 0
        return argument[index : index + 1] if whole else argument

    def arguments(index: int) -> list[Any]:
        return [a[index : index + 1] if k == numbers else one(a, index) for k, a in enumerate(args)]

    results = [call(func, arguments(i), {k: one(v, i) for k, v in kwargs.items()}) for i in range(count)]
    first = results[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple([o for result in results for o in result[k]] for k in range(len(first)))
    return [output for result in results for output in result]


@cache
def _numbers_argument(func: Any) -> int | None:
    """Return the argument that is a tensor with one number for each element, if there is one."""
    return next(
        (k for k, a in enumerate(func._schema.arguments) if a.name == "scalars" and str(a.type) == "Tensor"), None
    )


def _one_each(numbers: torch.Tensor, count: int) -> bool:
    """Return whether there is one number for each of `count` elements, in the form that the whole call accepts."""
    return numbers.dim() == 1 and len(numbers) == count and numbers.is_contiguous()
