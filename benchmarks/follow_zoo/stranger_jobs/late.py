"""Changes that a program makes in a late step by other means than torch's operators."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.stranger_jobs.making import ROWS, WIDTH, Jobs, classify, job, perceptron, targets
from port_planner.job import TrainingJob

JOBS = Jobs("late")
LATE = 30
Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def _changed(change: Change, *, in_hook: bool = False, dropout: float = 0.0, data: Any = ()) -> TrainingJob:
    """Return a job whose loss, or hook after the update, makes the change once."""
    model, calls = nn.Sequential(nn.Dropout(dropout), *perceptron()), itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def late(*_: Any) -> None:
        if next(calls) == LATE:
            change(model, optimizer)

    if in_hook:
        optimizer.register_step_post_hook(late)
        return job(model, classify, data, optimizer)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        late()
        return classify(m, x, y)

    return job(model, loss, data, optimizer)


def _empties_state(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _lowers_rate(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.1


def _lowers_momentum(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.1


def _seeds(*_: Any) -> None:
    torch.manual_seed(5)


def _takes_other_memory(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1].weight.data = _FIRST.clone()


def _takes_another_layer(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1] = nn.Linear(WIDTH, 24)


_FIRST = torch.linspace(-0.1, 0.1, 24 * WIDTH).view(24, WIDTH)

for _change in (_empties_state, _lowers_rate, _lowers_momentum, _takes_other_memory, _takes_another_layer):
    JOBS.named(_change.__name__.lstrip("_"), lambda change=_change: _changed(change))  # type: ignore[misc]
    JOBS.named(f"{_change.__name__.lstrip('_')}_in_a_hook", lambda change=_change: _changed(change, in_hook=True))  # type: ignore[misc]


@JOBS.add
def seeds_the_generator() -> TrainingJob:
    return _changed(_seeds, dropout=0.2)


@JOBS.add
def writes_to_data_through_numpy() -> TrainingJob:
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return _changed(lambda *_: np.multiply(rows, 0.3, out=rows), data=(torch.from_numpy(rows), targets()))


@JOBS.add
def writes_to_weights_through_numpy() -> TrainingJob:
    views: list[Any] = []
    made = _changed(lambda *_: np.multiply(views[0], 0.5, out=views[0]))
    views.append(next(made.model.parameters()).detach().numpy())
    return made
