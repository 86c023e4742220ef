"""Operators over lists of tensors, `_foreach_*` and `_fused_*`, run element by element.

Their CPU kernels are loops over the lists, so the bits are the same, and not every parameter of the model has to be
resident at once.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_PREFIXES = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")

_WHOLE_FRACTION = 16
"""Lists that together take less than this part of the limit run whole: a call per element has its price."""

Call = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def runs_by_element(func: Any, args: Sequence[Any], limit_bytes: float) -> bool:
    """Tell whether a call is one over lists that are too large to be resident together."""
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
    """Tell whether an operator is a loop over lists of tensors."""
    return bool(func._schema.name.startswith(_PREFIXES))


def split_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], call: Call) -> Any:
    """Run a call over lists for each element; return what the whole call would."""
    count = max((len(a) for a in args if isinstance(a, (list, tuple))), default=0)
    if count == 0:
        return call(func, args, kwargs)

    def part(argument: Any, index: int) -> Any:
        whole = isinstance(argument, (list, tuple)) and len(argument) == count
        return argument[index : index + 1] if whole else argument

    results = [
        call(func, tuple(part(a, i) for a in args), {k: part(v, i) for k, v in kwargs.items()}) for i in range(count)
    ]
    first = results[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple([o for result in results for o in result[k]] for k in range(len(first)))
    return [output for result in results for output in result]
