"""Python's own numbers that a step may decide by: attributes of the model's modules, and variables that its loss function sees.

A bundle has none of the code that reads them. One that changes in every step, as a count of steps does, may decide something later that
no recording shows.
"""

import functools
import io
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from port_planner.base.errors import of_the_program
from port_planner.torch_compat.optimizers import is_scheduled_step

_PLAIN = (bool, int, float, str, type(None))
_MAX_ITEMS = 64
"""Of a list or dictionary that is looked at: a longer one is data."""
_MAX_MET = 256
"""Functions and objects that one reaches the other through: what is behind more of them is a library in all but its name."""
_TRAINERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""What an object that trains has, whatever its loss reads."""
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; `training` among them: which operators run shows that."""


def python_state(model: torch.nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Return the plain values that a step may change, by what a reader knows them by."""
    return {**dict(_of_modules("", model, set())), **dict(_seen_by(loss_fn, set()))}


def changed(before: dict[str, Any], after: dict[str, Any]) -> frozenset[str]:
    """Return the names of what is another value than before."""
    there = ((name, value, after[name]) for name, value in before.items() if name in after)
    return frozenset(name for name, value, now in there if now is not value and now != value)  # a NaN is not what it is


def _of_modules(name: str, model: torch.nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and of those within, and what their own `forward` sees."""
    for inner, module in model.named_modules(prefix=name):
        own = {
            f"{inner}.{key}".lstrip("."): value for key, value in _attributes(module).items() if key not in _OF_TORCH
        }
        yield from _variables(own, seen)
        if _is_own_class(type(module)):
            yield from _seen_by(type(module).forward, seen)


def _attributes(value: Any) -> dict[str, Any]:
    return {key: one for key, one in vars(value).items() if not isinstance(one, _TRAINERS)}


def _met(value: Any, seen: set[int]) -> bool:
    """Return whether a function or an object was looked at before, or too many were."""
    if id(value) in seen or len(seen) > _MAX_MET:
        return True
    seen.add(id(value))
    return False


def _seen_by(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the plain variables that a function sees, and those of functions behind them."""
    if _met(function, seen):
        return
    if isinstance(function, functools.partial):
        given = {**{f"argument {i}": value for i, value in enumerate(function.args)}, **function.keywords}
        yield from _variables(given, seen)
        yield from _seen_by(function.func, seen)
    elif isinstance(function, MethodType):
        yield from _variables(_attributes(function.__self__) if _is_own(function.__self__) else {}, seen)
        yield from _seen_by(function.__func__, seen)
    elif isinstance(function, FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from _variables({name: _content(cell) for name, cell in cells}, seen)
        if of_the_program(function.__code__.co_filename):
            names = (name for name in function.__code__.co_names if name in function.__globals__)
            yield from _variables({name: function.__globals__[name] for name in names}, seen)
    elif _is_own(function):
        yield from _variables(_attributes(function), seen)


def _variables(named: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in named.items():
        if isinstance(value, _PLAIN):
            yield name, value
        elif isinstance(value, list | tuple | deque | dict):
            if len(value) <= _MAX_ITEMS:
                yield from _items(name, value, seen)
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            yield from _seen_by(value, seen)
        elif isinstance(value, torch.nn.Module):
            if not _met(value, seen):
                yield from _of_modules(name, value, seen)
        elif (state := _state_of(value)) is not None:
            yield name, state
        elif _is_own(value) and not _met(value, seen):
            yield from _variables({f"{name}.{key}": one for key, one in _attributes(value).items()}, seen)


def _items(
    name: str, items: "list[Any] | tuple[Any, ...] | deque[Any] | dict[Any, Any]", seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield items that are plain values as one, and what is within the others."""
    pairs = list(items.items() if isinstance(items, dict) else enumerate(items))
    if all(isinstance(item, _PLAIN) for _, item in pairs):
        yield name, tuple(item for _, item in pairs)
    elif not _met(items, seen):
        yield from _variables({f"{name}[{key!r}]": item for key, item in pairs}, seen)


def _state_of(value: Any) -> Any:
    """Return what tells how far a generator of random numbers is; None for what keeps no count.

    Of any other iterator, and of a schedule or the optimizer that one changes, it is something new each time.
    """
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, _TRAINERS):
        # as torch's schedulers mark their optimizers
        scheduled = not isinstance(value, torch.optim.Optimizer) or is_scheduled_step(value.step)
        return object() if scheduled else None
    return object() if isinstance(value, Iterator) and not isinstance(value, io.IOBase) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _is_own(value: Any) -> bool:
    """Return whether a value is an object of the program's own classes, which is no module of the model."""
    return _is_own_class(type(value)) and not isinstance(value, type | torch.nn.Module) and hasattr(value, "__dict__")


def _is_own_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and of_the_program(file)
