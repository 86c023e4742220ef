"""Python's own numbers that a step may decide by are found wherever the step's code can reach them."""

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from port_planner.capture.python_state import changed, python_state

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


def test_what_is_of_libraries_or_data_is_not_looked_at() -> None:
    kept, rows = SimpleNamespace(calls=0), [0.0] * 1000

    def loss(*_: Any) -> torch.Tensor:
        return torch.tensor(rows) * kept.calls

    assert python_state(nn.Identity(), loss) == python_state(nn.Identity(), print)
