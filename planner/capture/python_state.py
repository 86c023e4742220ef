"""Python's own numbers that a step may decide by: attributes of the model's modules, and variables that its loss function sees.

A bundle has none of the code that reads them. One that changes in every step, as a count of steps does, may decide something later that
no recording shows.
"""

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from planner.ir.errors import of_the_program

_PLAIN = (bool, int, float, str, type(None))
_MOST_ITEMS = 64
"""Of a list or dictionary that is looked at: a longer one is data."""
_MOST_CALLS = 8
"""Functions that a function reaches through its variables, one behind the other."""


def python_state(model: torch.nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Return the plain values that a step may change, by what a reader knows them by."""
    return {**dict(_attributes(model)), **dict(_seen_by(loss_fn, set()))}


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module and of those within."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "training" and isinstance(value, _PLAIN):  # which operators run shows that
                yield f"{name}.{key}".lstrip("."), value


def changed(before: dict[str, Any], after: dict[str, Any]) -> frozenset[str]:
    """Return the names of what is another value than before."""
    there = ((name, value, after[name]) for name, value in before.items() if name in after)
    return frozenset(name for name, value, now in there if now is not value and now != value)  # a NaN is not what it is


def _seen_by(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the plain variables that a function sees, and those of functions behind them."""
    if id(function) in seen or len(seen) > _MOST_CALLS:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        given = {**{f"argument {i}": value for i, value in enumerate(function.args)}, **function.keywords}
        yield from _variables(given, seen)
        yield from _seen_by(function.func, seen)
    elif isinstance(function, MethodType):
        yield from _variables(vars(function.__self__) if _is_own(function.__self__) else {}, seen)
        yield from _seen_by(function.__func__, seen)
    elif isinstance(function, FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from _variables({name: _content(cell) for name, cell in cells}, seen)
        if of_the_program(function.__code__.co_filename):
            names = (name for name in function.__code__.co_names if name in function.__globals__)
            yield from _variables({name: function.__globals__[name] for name in names}, seen)
    elif _is_own(function):
        yield from _variables(vars(function), seen)


def _variables(named: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in named.items():
        if isinstance(value, _PLAIN):
            yield name, value
        elif isinstance(value, list | dict) and len(value) <= _MOST_ITEMS:
            items = value.values() if isinstance(value, dict) else value
            if all(isinstance(item, _PLAIN) for item in items):
                yield name, tuple(items)
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            yield from _seen_by(value, seen)
        elif isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{key}", one) for key, one in _attributes(value))
        elif _is_own(value):
            yield from ((f"{name}.{key}", one) for key, one in vars(value).items() if isinstance(one, _PLAIN))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _is_own(value: Any) -> bool:
    """Say whether a value is an object of the program's own classes, which is no module of the model."""
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    own = file is not None and of_the_program(file)
    return own and not isinstance(value, type | torch.nn.Module) and hasattr(value, "__dict__")
