"""Run one operator of a step graph on tensors of the caller.

The caller passes functions that fetch the tensor of a value and the optimizer's numbers of a step. It receives the
results at once (`call`), or through a function that is created once and called in each step (`compiled`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from port_planner.ir.graph import Argument, Op, Ref, Scalar, Value
from port_planner.ir.torch_operators import dtype, function_of, literal

Fetch: TypeAlias = Callable[[int], torch.Tensor]
"""Returns the tensor of a value."""

Fetcher: TypeAlias = Callable[[], Any]
"""Returns the current contents of an argument."""


def usual_number(_: int) -> float:
    """Return a placeholder for a number that the optimizer supplies in each step."""
    return 0.5


def fill(
    argument: Argument,
    fetch: Fetch,
    number: Callable[[int], float] = usual_number,
    constant: Callable[[Argument], Any] = literal,
) -> Any:
    """Return an argument with tensors for values and numbers for scalars.

    It creates no closure, which would keep its contents until cycles are collected.
    """
    if isinstance(argument, Ref):
        return fetch(argument.value)
    if isinstance(argument, Scalar):
        return number(argument.index)
    if isinstance(argument, tuple):
        return [fill(part, fetch, number, constant) for part in argument]
    return constant(argument)


def fill_all(
    op: Op, fetch: Fetch, number: Callable[[int], float] = usual_number, constant: Callable[[Argument], Any] = literal
) -> tuple[list[Any], dict[str, Any]]:
    """Return an operator's arguments, filled, and those by name."""
    args = [fill(a, fetch, number, constant) for a in op.args]
    return args, {name: fill(a, fetch, number, constant) for name, a in op.kwargs}


def flatten(result: Any) -> Sequence[torch.Tensor]:
    """Return the tensors that an operator returned, including those in lists; none if it works in place on a
    list, or returns a number.
    """
    if isinstance(result, torch.Tensor):
        return (result,)
    return [tensor for part in result for tensor in flatten(part)] if isinstance(result, list | tuple) else ()


def call(op: Op, fetch: Fetch, number: Callable[[int], float] = usual_number) -> Sequence[torch.Tensor]:
    """Return the tensors that an operator returns for its fetched operands."""
    args, kwargs = fill_all(op, fetch, number)
    return flatten(function_of(op)(*args, **kwargs))


def fetcher(argument: Argument, value: Callable[[int], Fetcher], number: Callable[[int], Fetcher]) -> Fetcher:
    """Return a function that returns an argument's current value, given fetchers of values and numbers."""
    if isinstance(argument, Ref):
        return value(argument.value)
    if isinstance(argument, Scalar):
        return number(argument.index)
    if isinstance(argument, tuple) and any(isinstance(a, Ref | Scalar | tuple) for a in argument):
        parts = [fetcher(a, value, number) for a in argument]
        return lambda: [fetch() for fetch in parts]
    constant = literal(argument)
    return lambda: constant


def compiled(op: Op, positional: Sequence[Fetcher], keywords: Iterable[tuple[str, Fetcher]]) -> Fetcher:
    """Return a function that calls an operator on the current values of these fetchers."""
    function, named = function_of(op), list(keywords)
    if not named:
        return lambda: function(*[fetch() for fetch in positional])
    return lambda: function(*[fetch() for fetch in positional], **{k: fetch() for k, fetch in named})


def view(base: torch.Tensor, value: Value) -> torch.Tensor:
    """Return the value's view of the storage that `base` lies in."""
    kind = dtype(value.dtype)
    if base.dtype == kind:
        return base.as_strided(value.shape, value.stride, value.offset)
    empty = torch.empty(0, dtype=kind, device=base.device)
    return empty.set_(base.untyped_storage(), value.offset, value.shape, value.stride)
