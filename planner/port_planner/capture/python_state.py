"""Python values that may influence a step, wherever they are stored.

A bundle has none of the code that reads them. A value that changes in every step, such as a step count, may later
decide something that no recording shows. They are searched for where the running code can reach them. That is in the
model's modules, in what the loss function sees, and in the variables of each function of the program that runs
meanwhile, including hooks and helpers. Tensors do not count: a recording contains them.
"""

import array
import contextvars
import functools
import io
import pickle
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from port_planner.base.errors import of_the_program
from port_planner.ir.torch_device import own_device_file
from port_planner.torch_compat.optimizers import is_scheduled_step

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BYTES = (bytearray, memoryview, array.array)
_MAX_BYTES = 1 << 20
"""Largest size of an inspected array; a larger one is data."""
_MAX_ITEMS = 1 << 16
"""Maximum length of an inspected list."""
_MAX_MET = 4000
"""Largest number of functions and objects reachable from one root; a root that leads to more is in effect a library."""
_MAX_CALLS = 64
"""Largest number of calls of one function in a step whose variables are inspected."""
_OWN_REFERENCES = 3
"""Number of references to an object that is held only here, as `sys.getrefcount` counts them: in a list, a
variable and its argument.
"""
_TRAINERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes whose objects train, even if the loss reads them."""
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has. `training` is among them, because the operators that run show its value."""
_NO_STATE = frozenset({"logging", "typing", "re", "inspect", "importlib", "warnings"})
"""Modules of the standard library whose objects hold no relevant state."""
_OPEN = object()

Variables = Iterator[tuple[str, Any]]
"""Values by names that a reader knows."""


def other_generators() -> bytes:
    """Return the states of the global generators of Python and numpy."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))


def python_state(model: torch.nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Return the plain values that a step may change, by names that a reader knows."""
    return {**dict(_of_modules("", model, _Walk(follows=True))), **dict(_seen_by(loss_fn, _Walk(follows=True)))}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of values that have changed, appeared or gone.

    A count may be created by the first step that counts.
    """
    there = ((name, before.get(name, _OPEN), after.get(name, _OPEN)) for name in {**before, **after})
    return frozenset(
        name for name, value, now in there if now is not value and now != value
    )  # NaN does not equal itself


@dataclass(slots=True)
class _Walk:
    """A traversal of objects that visits each one once.

    `follows`: whether functions lead to the variables that they name.
    """

    follows: bool = False
    met: set[int] = field(default_factory=set)

    def meets(self, value: Any) -> bool:
        """Return whether a function or an object is new in the traversal, and there were not too many before it."""
        if id(value) in self.met or len(self.met) > _MAX_MET:
            return False
        self.met.add(id(value))
        return True


@dataclass(frozen=True, slots=True)
class _Root:
    """A root of the traversal, and the code that reaches it.

    `held`: the object itself, if only the step may have it.
    """

    code: CodeType
    look: Callable[[], Variables]
    before: dict[str, Any]
    held: list[Any]


class StateOfCode:
    """The state that the program's code in a block can reach, when that code started and now.

    `arguments`: whether arguments of functions also count, if they outlive the block.
    """

    def __init__(self, *, arguments: bool = True) -> None:
        self._arguments = arguments
        self._roots: dict[Any, _Root] = {}
        self._calls = Counter[CodeType]()
        self._running: dict[int, dict[str, Any]] = {}
        """Variables of enclosing functions at the start of each unfinished call."""
        self._rebound: dict[CodeType, set[str]] = {}
        """Variables whose values had changed at the end, for each running code object."""
        self.drew_in = ""
        """The first of the program's functions that drew from Python's or numpy's generator, as "loss, train.py:12"."""
        self._generators = b""
        self._device_file: str | None = None
        """The driver of the program's own device, whose counters are not part of the step."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inspect each of the program's functions that starts in the block, in this thread."""
        before, self._device_file = sys.getprofile(), own_device_file()
        self._generators = other_generators()
        sys.setprofile(self._profiled)
        try:
            yield
        finally:
            sys.setprofile(before)

    def changed(self) -> frozenset[str]:
        """Return the names, with the code that reaches them, of values that have changed since that code
        began and that outlive it.

        Afterwards the inspected values are released, because tensors of a step would otherwise outlive it.
        """
        found = set[str]()
        for root in self._roots.values():
            names = changed(root.before, dict(root.look()))
            if names and not (root.held and _is_held_here_alone(root.held)):
                found |= _placed(names, root.code)
        self._roots.clear()
        self._running.clear()
        enclosed = {inner for code in self._calls for inner in code.co_consts if isinstance(inner, CodeType)}
        of_enclosing = (_placed(names, code) for code, names in self._rebound.items() if code not in enclosed)
        return frozenset(found.union(*of_enclosing))

    def _profiled(self, frame: FrameType, event: str, _: Any) -> None:
        code, names = frame.f_code, frame.f_globals
        if event == "return":
            self._ended(frame)
            if of_the_program(code.co_filename):
                self._note_draws(frame)
        if event != "call" or not of_the_program(code.co_filename) or code.co_filename == self._device_file:
            return
        self._calls[code] += 1
        self._note_draws(frame.f_back)
        if self._calls[code] == 1:
            self._add((code, id(names)), code, lambda: _globals_of(code, names, _Walk()))
        if code.co_freevars and self._calls[code] <= _MAX_CALLS:
            self._running[id(frame)] = dict(_free_of(frame))
        if self._arguments:
            count = code.co_argcount + code.co_kwonlyargcount
            for name in code.co_varnames[:count]:
                self._add_argument(name, frame.f_locals.get(name), code)

    def _note_draws(self, frame: FrameType | None) -> None:
        """Record that the code of a function since the last look may have drawn from a generator other than torch's."""
        while frame is not None and not of_the_program(frame.f_code.co_filename):
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        if code is None or self.drew_in or self._calls[code] > _MAX_CALLS or self._generators == other_generators():
            return
        self.drew_in = f"{code.co_name}, {Path(code.co_filename).name}:{code.co_firstlineno}"

    def _ended(self, frame: FrameType) -> None:
        before = self._running.pop(id(frame), None)
        if before is not None and (names := changed(before, dict(_free_of(frame)))):
            self._rebound.setdefault(frame.f_code, set()).update(names)

    def _add_argument(self, name: str, value: Any, code: CodeType) -> None:
        if id(value) in self._roots or isinstance(value, (*_PLAIN, torch.nn.Module)) or not _is_open(value):
            return
        held = [value]
        self._add(id(value), code, lambda: _behind(name, held[0], _Walk()), held)

    def _add(self, key: Any, code: CodeType, look: Callable[[], Variables], held: list[Any] | None = None) -> None:
        self._roots[key] = _Root(code, look, dict(look()), held or [])


def _placed(names: Iterable[str], code: CodeType) -> set[str]:
    return {f"{name} (in {code.co_name}, {Path(code.co_filename).name}:{code.co_firstlineno})" for name in names}


def _free_of(frame: FrameType) -> Variables:
    """Yield the variables of enclosing functions that running code has."""
    return _variables({name: frame.f_locals.get(name) for name in frame.f_code.co_freevars}, _Walk())


def _is_held_here_alone(held: list[Any]) -> bool:
    value = held[0]
    return sys.getrefcount(value) <= _OWN_REFERENCES


def _of_modules(name: str, model: torch.nn.Module, walk: _Walk) -> Variables:
    """Yield the attributes of a module and its submodules, and what their own `forward` methods see."""
    for inner, module in model.named_modules(prefix=name):
        own = {
            f"{inner}.{key}".lstrip("."): value for key, value in _attributes(module).items() if key not in _OF_TORCH
        }
        yield from _variables(own, walk)
        if _is_own_class(type(module)):
            yield from _seen_by(type(module).forward, walk)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, and of its class if the program defines it, except
    code and objects that train.
    """
    kinds = [kind for kind in type(value).__mro__ if _is_own_class(kind)]
    slots = {name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)}
    found = {name: getattr(value, name) for name in sorted(slots)}
    for kind in reversed(kinds):
        found |= {name: one for name, one in vars(kind).items() if _is_data(name, one)}
    found |= getattr(value, "__dict__", {})
    return {key: one for key, one in found.items() if not isinstance(one, _TRAINERS)}


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_data(name: str, value: Any) -> bool:
    """Return whether a class attribute is data: neither code nor Python's own bookkeeping."""
    code = callable(value) or isinstance(value, property | staticmethod | classmethod | ModuleType)
    return not (name.startswith("__") or code or hasattr(value, "__get__"))


def _seen_by(function: Any, walk: _Walk) -> Variables:
    """Yield the plain variables that a function sees, and those of functions reachable from it."""
    if not walk.meets(function):
        return
    if isinstance(function, functools.partial):
        given = {**{f"argument {i}": value for i, value in enumerate(function.args)}, **function.keywords}
        yield from _variables(given, walk)
        yield from _seen_by(function.func, walk)
    elif isinstance(function, MethodType):
        yield from _variables(_attributes(function.__self__) if _is_open(function.__self__) else {}, walk)
        yield from _seen_by(function.__func__, walk)
    elif isinstance(function, FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from _variables({name: _content(cell) for name, cell in cells}, walk)
        if of_the_program(function.__code__.co_filename):
            if walk.follows:
                yield from _globals_of(function.__code__, function.__globals__, walk)
            by_place: dict[Any, Any] = dict(enumerate(function.__defaults__ or ()))
            defaults = {**by_place, **(function.__kwdefaults__ or {})}
            kept = {key: value for key, value in vars(function).items() if key != "__wrapped__"}
            name = function.__name__
            yield from _variables({f"{name}(default {key})": value for key, value in defaults.items()}, walk)
            yield from _variables({f"{name}.{key}": value for key, value in kept.items()}, walk)
    elif _is_open(function) and not isinstance(function, torch.nn.Module):
        yield from _variables(_attributes(function), walk)


def _globals_of(code: CodeType, names: Mapping[str, Any], walk: _Walk) -> Variables:
    """Yield the variables of its module, and of modules that it knows, that code names."""
    named = {name: names[name] for name in code.co_names if name in names}
    for name, value in named.items():
        if isinstance(value, ModuleType) and _holds_state(value.__name__, getattr(value, "__file__", None)):
            own = vars(value)
            inner = {key: own[key] for key in code.co_names if key in own and _is_data(key, own[key])}
            yield from _variables({f"{name}.{key}": one for key, one in inner.items()}, walk)
    yield from _variables(named, walk)


def _variables(named: Mapping[str, Any], walk: _Walk) -> Variables:
    for name, value in named.items():
        yield from _behind(name, value, walk)


def _behind(name: str, value: Any, walk: _Walk) -> Variables:
    """Yield a value, or the plain values inside it."""
    if (leaf := _leaf(value)) is not _OPEN:
        yield name, leaf
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        yield from _seen_by(value, walk)
    elif isinstance(value, torch.nn.Module):
        if walk.meets(value):
            yield from _of_modules(name, value, walk)
    elif not _is_open(value) or not walk.meets(value):
        return
    elif isinstance(value, Mapping):
        items = [*value.items()][:_MAX_ITEMS]
        keys = [repr(key) if isinstance(key, _PLAIN) else str(i) for i, (key, _) in enumerate(items)]
        yield from _variables({f"{name}[{key}]": one for key, (_, one) in zip(keys, items, strict=True)}, walk)
    elif isinstance(value, list | tuple | deque | Set):
        yield from _variables({f"{name}[{i}]": one for i, one in enumerate([*value][:_MAX_ITEMS])}, walk)
    elif isinstance(value, type):
        own = {key: one for key, one in vars(value).items() if _is_data(key, one)}
        yield from _variables({f"{name}.{key}": one for key, one in own.items()}, walk)
    else:
        yield from _variables({f"{name}.{key}": one for key, one in _attributes(value).items()}, walk)


def _leaf(value: Any) -> Any:
    """Return a value that compares equal while the item is unchanged; `_OPEN` for containers, None for items that are
    not inspected.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _MAX_BYTES and not value.dtype.hasobject else None
    if isinstance(value, _BYTES):
        return bytes(value) if len(value) <= _MAX_BYTES else len(value)
    if isinstance(value, Mapping | list | tuple | deque | Set) and _is_walked(type(value)):
        items = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
        if not all(isinstance(item, _PLAIN) for item in items):
            return _OPEN
        return frozenset(items) if isinstance(value, Set) else (len(items), tuple(items[:_MAX_ITEMS]))
    if isinstance(value, contextvars.ContextVar):
        return _leaf(value.get(None))
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().currsize
    state = _state_of(value)
    return _OPEN if state is None else state


def _state_of(value: Any) -> Any:
    """Return the state of a random generator; None for an object without a position.

    For any other iterator, and for a schedule or the optimizer that it changes, the state is different each time.
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


def _is_open(value: Any) -> bool:
    """Return whether a value has parts that are inspected: an object or a class of the program or of Python."""
    if isinstance(value, type):
        return _is_own_class(value)
    return not isinstance(value, (torch.Tensor, ModuleType, *_TRAINERS)) and _is_walked(type(value))


def _is_own_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and of_the_program(file)


def _is_walked(kind: type) -> bool:
    return _holds_state(kind.__module__, getattr(sys.modules.get(kind.__module__), "__file__", None))


def _holds_state(module: str, file: str | None) -> bool:
    """Return whether a module's definitions may hold the program's state: the program's own and Python's can; libraries
    are excluded.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package not in _NO_STATE
    return file is not None and of_the_program(file)
