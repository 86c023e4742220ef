"""Steps of programs that count or keep tensors: known for as long as they are the same but for numbers, else refused by reason."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.base.errors import CaptureError
from port_planner.job import TrainingJob
from port_planner.steps_ahead import known_steps

ROWS, BATCH = 10, 4


class Program:
    """A loss that counts its calls and keeps what it gave; `of_count` makes it from the plain loss and both."""

    def __init__(self, of_count: Callable[[torch.Tensor, int, list[torch.Tensor]], torch.Tensor]) -> None:
        self.of_count, self.calls = of_count, 0
        self.kept: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.of_count(functional.cross_entropy(model(x), y), self.calls, self.kept)
        self.kept.append(loss.detach())
        return loss

    def job(self, **settings: Any) -> TrainingJob:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        data = [torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))]
        return TrainingJob(model, self, torch.optim.SGD(model.parameters(), lr=0.1), data, BATCH, **settings)


def test_each_batch_has_its_numbers_in_the_slots_of_its_shape() -> None:
    found = known_steps(Program(lambda loss, calls, kept: loss / calls).job(), 5, within_s=60)
    assert found.numbers == tuple((float(calls),) for calls in range(1, 6))
    assert [(shape.rows, len({place.slot for place in shape.places})) for shape in found.shapes] == [(4, 1), (2, 1)]
    assert all(len(shape.places) == 2 for shape in found.shapes), "the gradient is divided, too"


def test_an_update_has_the_numbers_of_all_its_batches() -> None:
    found = known_steps(Program(lambda loss, calls, kept: loss / calls).job(accumulate=2), 3, within_s=60)
    assert (found.updates, len(found.numbers)) == (3, 6)


def test_what_is_counted_and_kept_without_consequence_leaves_no_number() -> None:
    assert known_steps(Program(lambda loss, calls, kept: loss).job(), 4, within_s=60).numbers == ()


_OTHER = r"the step differs from the first of its shape: test_steps_ahead\.py:\d+: "


@pytest.mark.parametrize(
    ("of_count", "reason"),
    [
        (lambda loss, calls, kept: loss if calls < 4 else loss.abs(), rf"update 4: {_OTHER}aten::abs ran where aten::detach"),
        (lambda loss, calls, kept: loss if calls < 3 else loss * kept[0], rf"update 3: {_OTHER}|earlier step"),
        (lambda loss, calls, kept: loss * (kept or [loss])[-1], "update 2: .*an earlier step created"),
        (lambda loss, calls, kept: loss / max(float("inf") * (calls - 1), 1.0) if calls > 1 else loss / 1.0, r"test_steps_ahead\.py:\d+: .*not finite \(inf for aten::div"),
        (lambda loss, calls, kept: loss if loss > 100 else loss / calls, r"update 1 cannot be followed without contents \(test_steps_ahead\.py:\d+: "),
        (lambda loss, calls, kept: torch.add(loss, loss, alpha=3 - calls), rf"update 2: {_OTHER}aten::add.Tensor was called with \(a tensor, a tensor, alpha='a number'\) in.*with \(a tensor, a tensor\)"),
        (lambda loss, calls, kept: loss + torch.tensor(float(calls)), rf"update 2: {_OTHER}aten::add.Tensor works on different contents"),
    ],
)  # fmt: skip
def test_steps_that_are_others_or_read_contents_are_not_known(of_count: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        known_steps(Program(of_count).job(), 6, within_s=60)


class Hidden(nn.Module):
    """A body and a head; `change` is what a count in a module's attribute decides after nine steps."""

    def __init__(self, change: Callable[["Hidden", torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global seen
        seen += 1
        return self.change(self, self.body(x).relu(), seen > 9)


seen = 0


def _detached(model: Hidden, x: torch.Tensor, late: bool) -> torch.Tensor:
    if late:
        x = x.detach()  # here
    return model.head(x)


def _without_gradient(model: Hidden, x: torch.Tensor, late: bool) -> torch.Tensor:
    with torch.set_grad_enabled(not late):
        x = x.tanh()  # here
    return model.head(x)


def _of_another_layer(model: Hidden, x: torch.Tensor, late: bool) -> torch.Tensor:
    return (model.other if late else model.head)(x)  # here


def _without_hook(model: Hidden, x: torch.Tensor, late: bool) -> torch.Tensor:
    x = x.neg()
    if not late:
        x.register_hook(lambda gradient: gradient * 0.5)  # here
    return model.head(x)


def _frozen(model: Hidden, x: torch.Tensor, late: bool) -> torch.Tensor:
    model.head.weight.requires_grad_(not late)
    return model.head(x)  # here


@pytest.mark.parametrize("change", [_detached, _without_gradient, _of_another_layer, _without_hook, _frozen])
def test_the_line_is_named_where_a_step_after_nine_differs(change: Any) -> None:
    """Whether operators, views, or only the gradient's operators differ."""
    global seen
    seen = 0
    lines, first = inspect.getsourcelines(change)
    here = first + next(i for i, line in enumerate(lines) if "# here" in line)
    torch.manual_seed(0)
    model = Hidden(change)
    data = [torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))]
    job = TrainingJob(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), data, 5)
    with pytest.raises(CaptureError, match=rf"update 10: the step differs .*test_steps_ahead\.py:{here}\D") as refused:
        known_steps(job, 12, within_s=60)
    assert change is not _of_another_layer or "(other.bias instead of head.bias)" in str(refused.value)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def test_a_hook_that_does_something_else_is_named_with_its_line() -> None:
    calls = [0]

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls[0] += 1
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5) if calls[0] > 2 else parameter.clamp_(-1, 1)

    job = Program(lambda loss, *_: loss).job()
    job.optimizer.register_step_post_hook(after)
    with pytest.raises(CaptureError, match=r"update 3: the hooks .*: test_steps_ahead\.py:\d+: aten::mul_"):
        known_steps(job, 5, within_s=60)


def test_no_more_time_than_is_given_is_taken() -> None:
    with pytest.raises(CaptureError, match=r"1 of 6 updates could be followed in 0 s; plan it for fewer --epochs"):
        known_steps(Program(lambda loss, calls, kept: loss).job(), 6, within_s=0)
