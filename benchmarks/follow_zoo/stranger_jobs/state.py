"""State in Python and in the process that decides something in a later step, `LATE` steps after the first."""

import argparse
import collections
import contextvars
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.stranger_jobs.making import Jobs, classify, job, perceptron
from port_planner.job import TrainingJob

JOBS = Jobs("state")
LATE = 28
_steps = 0
_calls: list[int] = []
_by_name: dict[str, int] = {}


def _later(model: nn.Module, x: Tensor, y: Tensor, late: object) -> Tensor:
    return classify(model, x, y) * (0.5 if late else 1.0)


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _namespace() -> Loss:
    arguments = argparse.Namespace(step=0)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        arguments.step += 1
        return _later(m, x, y, arguments.step > LATE)

    return loss


def _function_attribute() -> Loss:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        setattr(loss, "n", getattr(loss, "n", 0) + 1)  # noqa: B010
        return _later(m, x, y, getattr(loss, "n") > LATE)  # noqa: B009

    return loss


def _mutable_default() -> Loss:
    def loss(m: nn.Module, x: Tensor, y: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return _later(m, x, y, len(seen) > LATE)

    return loss


def _class_attribute() -> Loss:
    class Count:
        n = 0

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        Count.n += 1
        return _later(m, x, y, Count.n > LATE)

    return loss


def _global_of_a_helper() -> Loss:
    def count() -> bool:
        global _steps
        _steps += 1
        return _steps > LATE

    return lambda m, x, y: _later(m, x, y, count())


def _list_of_a_module() -> Loss:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _calls.append(len(_calls))
        return _later(m, x, y, len(_calls) > LATE)

    return loss


def _dictionary_by_default() -> Loss:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _by_name["n"] = _by_name.get("n", 0) + 1
        return _later(m, x, y, _by_name["n"] > LATE)

    return loss


def _enclosing_variable() -> Loss:
    n = 0

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return _later(m, x, y, n > LATE)

    return loss


def _count_of_itertools() -> Loss:
    steps = itertools.count()
    return lambda m, x, y: _later(m, x, y, next(steps) > LATE)


def _generator_function() -> Loss:
    def warm() -> Any:
        for n in itertools.count():
            yield n > LATE

    late = warm()
    return lambda m, x, y: _later(m, x, y, next(late))


def _whole_number_of_numpy() -> Loss:
    n = np.zeros(1, dtype=np.int64)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        n[0] += 1
        return _later(m, x, y, n[0] > LATE)

    return loss


def _window_of_losses() -> Loss:
    window = collections.deque(maxlen=4)  # type: ignore[var-annotated]

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = classify(m, x, y)
        window.append(found.detach())
        return found / torch.stack(list(window)).mean()

    return loss


def _random_of_python() -> Loss:
    return lambda m, x, y: _later(m, x, y, random.random() > 0.9)


def _random_of_numpy() -> Loss:
    draw = np.random.default_rng(0)
    return lambda m, x, y: _later(m, x, y, draw.random() > 0.9)


def _generator_of_ones_own() -> Loss:
    own = torch.Generator().manual_seed(3)
    return lambda m, x, y: classify(m, x + 0.1 * torch.randn(x.shape, generator=own), y)


def _kept_by_a_cache() -> Loss:
    @functools.cache
    def known(key: int) -> int:
        return key

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        known(known.cache_info().currsize)
        return _later(m, x, y, known.cache_info().currsize > LATE)

    return loss


def _context_variable() -> Loss:
    n = contextvars.ContextVar("n", default=0)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        n.set(n.get() + 1)
        return _later(m, x, y, n.get() > LATE)

    return loss


def _local_of_the_thread() -> Loss:
    local = threading.local()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        local.n = getattr(local, "n", 0) + 1
        return _later(m, x, y, local.n > LATE)

    return loss


def _environment() -> Loss:
    os.environ.pop("STRANGER_STEP", None)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        os.environ["STRANGER_STEP"] = str(int(os.environ.get("STRANGER_STEP", "0")) + 1)
        return _later(m, x, y, int(os.environ["STRANGER_STEP"]) > LATE)

    return loss


def _object_in_an_object() -> Loss:
    state = SimpleNamespace(trainer=SimpleNamespace(progress={"step": 0}))

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        state.trainer.progress["step"] += 1
        return _later(m, x, y, state.trainer.progress["step"] > LATE)

    return loss


def _method_of_an_object() -> Loss:
    class Criterion:
        __slots__ = ("n",)

        def __init__(self) -> None:
            self.n = 0

        def __call__(self, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            self.n += 1
            return _later(m, x, y, self.n > LATE)

    return Criterion()


def _tensor_outside_of_the_model() -> Loss:
    n = torch.zeros(())

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        n.add_(1)
        return classify(m, x, y) * (n / 10).clamp(max=1)

    return loss


def _gradients_switched_off_later() -> Loss:
    seen: list[None] = []

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(None)
        if len(seen) == LATE:
            next(m.parameters()).requires_grad_(False)
        return classify(m, x, y)

    return loss


def _evaluated_later() -> Loss:
    seen: set[int] = set()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.add(len(seen))
        m.train(len(seen) < LATE)
        return classify(m, x, y)

    return loss


def _table_made_once() -> Loss:
    kept: dict[int, Tensor] = {}

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) not in kept:
            kept[len(x)] = torch.linspace(0.5, 1.5, len(x))[:, None]
        return classify(m, x * kept[len(x)], y)

    return loss


def _first_batch_remembered() -> Loss:
    kept: list[Tensor] = []

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if not kept:
            kept.append(x.mean(0))
        return classify(m, x - kept[0], y)

    return loss


def _weight_by_the_step() -> Loss:
    config = SimpleNamespace(step=0)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        config.step += 1
        return classify(m, x, y) + min(1.0, config.step / LATE) * m(x).square().mean()

    return loss


_LOSSES = (
    _namespace, _function_attribute, _mutable_default, _class_attribute, _global_of_a_helper, _list_of_a_module, _dictionary_by_default,
    _enclosing_variable, _count_of_itertools, _generator_function, _whole_number_of_numpy, _window_of_losses, _random_of_python,
    _random_of_numpy, _generator_of_ones_own, _kept_by_a_cache, _context_variable, _local_of_the_thread, _environment, _object_in_an_object,
    _method_of_an_object, _tensor_outside_of_the_model, _gradients_switched_off_later, _evaluated_later, _table_made_once, _first_batch_remembered,
    _weight_by_the_step,
)  # fmt: skip


def _with_loss(make: Callable[[], Loss]) -> TrainingJob:
    global _steps
    _steps = 0
    _calls.clear()
    _by_name.clear()
    return job(nn.Sequential(nn.Dropout(0.1), *perceptron()), make())


for _make in _LOSSES:
    JOBS.named(_make.__name__.lstrip("_"), lambda make=_make: _with_loss(make))  # type: ignore[misc]


def _hooked(register: Callable[[nn.Sequential, Callable[[], bool]], object]) -> TrainingJob:
    n = itertools.count()
    model = perceptron()
    register(model, lambda: next(n) > LATE)
    return job(model, classify)


@JOBS.add
def hook_on_forward() -> TrainingJob:
    return _hooked(lambda m, late: m[1].register_forward_hook(lambda _, x, y: y * 0.5 if late() else None))


@JOBS.add
def hook_before_forward() -> TrainingJob:
    return _hooked(lambda m, late: m[1].register_forward_pre_hook(lambda _, x: (x[0] * 0.5,) if late() else None))


def _halved(late: Callable[[], bool]) -> Any:
    return lambda _, gradients, of_results: (gradients[0] * 0.5,) if late() else None


@JOBS.add
def hook_on_backward() -> TrainingJob:
    return _hooked(lambda m, late: m[1].register_full_backward_hook(_halved(late)))


@JOBS.add
def hook_on_a_gradient() -> TrainingJob:
    return _hooked(lambda m, late: m[0].weight.register_hook(lambda g: g * 0.5 if late() else g))  # type: ignore[operator]


@JOBS.add
def hook_after_accumulation() -> TrainingJob:
    def halve(parameter: Tensor, late: Callable[[], bool]) -> None:
        if late() and parameter.grad is not None:
            parameter.grad.mul_(0.5)

    return _hooked(lambda m, late: m[0].weight.register_post_accumulate_grad_hook(lambda p: halve(p, late)))  # type: ignore[operator]


@JOBS.add
def rate_changed_by_the_loss() -> TrainingJob:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        return classify(m, x, y)

    return job(model, loss, optimizer=optimizer)


@JOBS.add
def gradients_left_over() -> TrainingJob:
    made = job(perceptron(), classify)
    classify(made.model, made.data[0][:8], made.data[1][:8]).backward()
    return made


@JOBS.add
def weights_exchanged() -> TrainingJob:
    def loss(m: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            m[0].weight.data = m[0].weight.data * 0.999  # type: ignore[operator,assignment]
        return classify(m, x, y)

    return job(perceptron(), loss)


@JOBS.add
def weights_decayed_in_forward() -> TrainingJob:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(0.999)
        return classify(m, x, y)

    return job(perceptron(), loss)


@JOBS.add
def small_numbers_flushed() -> TrainingJob:
    torch.set_flush_denormal(True)
    return job(perceptron(), lambda m, x, y: classify(m, x * 1e-38, y))
