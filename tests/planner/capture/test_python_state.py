"""Python's own numbers that a step may decide by are found wherever the step's code can reach them."""

import functools
import itertools
import os
import random
import threading
import weakref
from argparse import Namespace
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from port_planner.capture.python_state import StateOfCode, changed, python_state
from tests import their_modules

count = 0


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, *_: Any) -> None:
        self.calls += 1

    def __call__(self, *_: Any) -> None:
        self.calls += 1


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.steps, self.rate = nn.Linear(1, 1), 0, 0.5


def in_a_list() -> Callable[..., None]:
    calls = [0]

    def loss(*_: Any) -> None:
        calls[0] += 1

    return loss


def in_a_variable() -> Callable[..., None]:
    calls = 0

    def loss(*_: Any) -> None:
        nonlocal calls
        calls += 1

    return loss


def in_a_global(*_: Any) -> None:
    global count
    count += 1


def in_an_object() -> Callable[..., None]:
    counter = Counter()

    def loss(*_: Any) -> None:
        counter.calls += 1

    return loss


def behind_others() -> Callable[..., None]:
    inner = in_a_list()

    def loss(*arguments: Any) -> None:
        inner(*arguments)

    return functools.partial(loss)


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *_: Any) -> None:
        self.calls += 1


def in_a_module_of_its_own() -> Callable[..., None]:
    criterion = CountingLoss()

    def loss(*_: Any) -> None:
        criterion()

    return loss


def counted_in(calls: list[int], *_: Any) -> None:
    calls[0] += 1


class Holder:
    def __init__(self) -> None:
        self.parts: list[Any] = [Counter(), {"calls": 0}]

    def __call__(self, *_: Any) -> None:
        self.parts[0].calls += 1


def drawing(draw: Any, *_: Any) -> None:
    draw.random()


def next_of(numbers: Any, *_: Any) -> None:
    next(numbers)


def of_torchs_own(generator: torch.Generator, *_: Any) -> None:
    torch.rand(3, generator=generator)


COUNTS: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (in_a_list, "calls"),
    "variable": (in_a_variable, "calls"),
    "global": (lambda: in_a_global, "count"),
    "object": (in_an_object, "counter.calls"),
    "method": (lambda: Counter().loss, "calls"),
    "callable": (Counter, "calls"),
    "behind others": (behind_others, "calls"),
    "module": (in_a_module_of_its_own, "criterion.calls"),
    "object in a list of an object": (Holder, "parts[0].calls"),
    "generator of Python's": (lambda: functools.partial(drawing, random.Random(0)), "argument 0"),
    "generator of numpy's": (lambda: functools.partial(drawing, np.random.default_rng(0)), "argument 0"),
    "older generator of numpy's": (lambda: functools.partial(drawing, np.random.RandomState(0)), "argument 0"),
    "generator of torch's": (lambda: functools.partial(of_torchs_own, torch.Generator()), "argument 0"),
    "iterator": (lambda: functools.partial(next_of, itertools.cycle([1, 1, 1, 2])), "argument 0"),
    "argument": (lambda: functools.partial(counted_in, [0]), "argument 0"),
}


@pytest.mark.parametrize("where", COUNTS)
def test_a_count_is_found(where: str) -> None:
    made, name = COUNTS[where]
    loss_fn = made()
    before = python_state(Module(), loss_fn)
    loss_fn()
    assert changed(before, python_state(Module(), loss_fn)) == {name}


def test_a_count_is_found_in_a_model_of_many_layers() -> None:
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3) for _ in range(200)), Module())
    model[-1].calls = [0]  # type: ignore[assignment]
    before = python_state(model, print)
    model[-1].calls[0] += 1  # type: ignore[index, operator]
    assert changed(before, python_state(model, print)) == {"200.calls"}


def test_an_optimizer_counts_where_a_schedule_changes_it() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def loss(*_: Any) -> float:
        return float(optimizer.param_groups[0]["lr"])

    assert changed(python_state(Module(), loss), python_state(Module(), loss)) == frozenset()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    assert changed(python_state(Module(), loss), python_state(Module(), loss)) == {"optimizer"}
    model = Module()
    model.optimizer = optimizer  # type: ignore[assignment]  # as a module of lightning may have it
    assert changed(python_state(model, print), python_state(model, print)) == frozenset()
    of_schedule = functools.partial(loss, schedule)
    assert "argument 0" in changed(python_state(Module(), of_schedule), python_state(Module(), of_schedule))


def test_so_is_an_attribute_of_a_module_and_nothing_that_stays() -> None:
    model = nn.Sequential(Module())
    model[0].least = float("nan")  # type: ignore[assignment]  # which does not equal itself
    before = python_state(model, print)
    assert changed(before, python_state(model, print)) == frozenset()
    model[0].steps += 1  # type: ignore[assignment, operator]
    model.eval()
    model[0].inner.weight.data.add_(1)  # type: ignore[union-attr, operator]
    assert changed(before, python_state(model, print)) == {"0.steps"}


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Counted:
    calls = 0


@dataclass
class Kept:
    deep: dict[str, dict[str, Any]]


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Doubled.calls += 1
        return gradient * 2


NAMESPACE, SIMPLE, SLOTS, KEPT = Namespace(calls=0), SimpleNamespace(calls=0), Slots(), Kept({"a": {"b": [None, 0]}})
LOCAL, CONTEXT, LONG = threading.local(), ContextVar("CONTEXT", default=0), [0] * 1000
COUNTED, SEEN, NUMBER, NUMBERS, BYTES, ITEMS = (
    Counter(),
    set[int](),
    np.int64(0),
    np.zeros(2),
    bytearray(),
    array("l", [0]),
)
LOCAL.calls = 0


@functools.lru_cache
def cached(number: int) -> int:
    return number


def helper() -> None:
    helper.calls += 1  # type: ignore[attr-defined]


helper.calls = 0  # type: ignore[attr-defined]


def with_default(box: list[int] = [0], *, more: dict[str, int] = {"n": 0}) -> None:  # noqa: B006
    box[0] += 1
    more["n"] += 1


def of_numpy() -> None:
    global NUMBER
    NUMBER = NUMBER + np.int64(1)


def of_another_module() -> None:
    their_modules.calls = getattr(their_modules, "calls", 0) + 1  # type: ignore[attr-defined]


def of_the_environment() -> None:
    os.environ["PORT_TEST_CALLS"] = str(int(os.environ.get("PORT_TEST_CALLS", "0")) + 1)


def backward() -> None:
    Doubled.apply(torch.ones(1, requires_grad=True)).backward()


def hooked() -> None:
    HOOKED(torch.ones(1, 1, requires_grad=True)).sum().backward()


def counting_hook() -> Callable[..., None]:
    hooks = 0

    def hook(*_: Any) -> None:
        nonlocal hooks
        hooks += 1

    return hook


HOOKED = nn.Linear(1, 1)
HOOKED.register_full_backward_hook(counting_hook())
PLACES: dict[str, tuple[Callable[[], Any], str]] = {
    "argparse's namespace": (lambda: setattr(NAMESPACE, "calls", NAMESPACE.calls + 1), "NAMESPACE.calls"),
    "simple namespace": (lambda: setattr(SIMPLE, "calls", SIMPLE.calls + 1), "SIMPLE.calls"),
    "slot": (lambda: setattr(SLOTS, "calls", SLOTS.calls + 1), "SLOTS.calls"),
    "class": (lambda: setattr(Counted, "calls", Counted.calls + 1), "Counted.calls"),
    "depth": (lambda: KEPT.deep["a"]["b"].append(1), "KEPT.deep['a']['b']"),
    "thread's own": (lambda: setattr(LOCAL, "calls", LOCAL.calls + 1), "LOCAL.calls"),
    "context": (lambda: CONTEXT.set(CONTEXT.get() + 1), "CONTEXT"),
    "long list": (lambda: LONG.append(0), "LONG"),
    "method": (lambda: COUNTED.loss(), "COUNTED.calls"),
    "set": (lambda: SEEN.add(len(SEEN)), "SEEN"),
    "number of numpy's": (of_numpy, "NUMBER"),
    "array": (lambda: np.add(NUMBERS, 1, out=NUMBERS), "NUMBERS"),
    "bytes": (lambda: BYTES.append(1), "BYTES"),
    "array of Python's": (lambda: ITEMS.append(1), "ITEMS"),
    "cache": (lambda: cached(cached.cache_info().currsize), "cached"),
    "function": (helper, "helper.calls"),
    "default": (with_default, "box"),
    "default by name": (with_default, "more"),
    "another module": (of_another_module, "their_modules.calls"),
    "environment": (of_the_environment, "os.environ"),
    "backward pass": (backward, "Doubled.calls"),
    "hook": (hooked, "hooks"),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_count_is_found_where_the_code_that_runs_reaches_it(where: str) -> None:
    count, name = PLACES[where]
    for _ in range(2):
        state = StateOfCode()
        with state.watched():
            count()
    assert any(found.startswith(f"{name} (in ") and "test_python_state.py:" in found for found in state.changed())


def test_a_count_that_the_first_step_creates_is_found() -> None:
    def count() -> None:
        KEPT.deep["calls"] = KEPT.deep.get("calls", 0) + 1  # type: ignore[operator, assignment]

    KEPT.deep.pop("calls", None)
    for _ in range(2):
        state = StateOfCode()
        with state.watched():
            count()
        assert any(found.startswith("KEPT.deep['calls'] (in ") for found in state.changed())


def test_what_lives_and_ends_within_the_block_is_none_of_its_state() -> None:
    def add(found: list[int], known: dict[str, int]) -> None:
        found.append(1)
        known["n"] = 1

    def total() -> int:
        count = 0

        def more() -> None:
            nonlocal count
            count += 1

        more()
        return count

    state = StateOfCode()
    with state.watched():
        found = list[int]()
        add(found, {})
        del found
        total()
    assert state.changed() == frozenset()


def test_nothing_that_was_looked_at_is_held() -> None:
    def take(kept: Kept, many: list[Kept]) -> None:
        many.append(kept)

    kept, state = Kept({}), StateOfCode()
    gone = weakref.ref(kept)
    with state.watched():
        take(kept, [])
    state.changed()
    del kept
    assert gone() is None


def test_what_is_of_libraries_is_not_looked_at() -> None:
    """They keep what is their own, and more of it than anyone can look through."""
    tensor = torch.zeros(1)

    def loss(*_: Any) -> torch.Tensor:
        return tensor.add_(1) * float(np.float64(1))

    assert python_state(nn.Identity(), loss) == python_state(nn.Identity(), print)
