"""Optimizers of any class are recorded with the numbers of every update, or refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from port_planner.base.errors import CaptureError
from port_planner.capture.step import Capture, capture_step
from port_planner.ir.lowering.optimizer_scalars import OptimizerSpec, RecordedNumbers, StepScalars
from tests.planner import own_optimizers as own

_LINE = r"own_optimizers\.py:\d+: the optimizer \w+"

HALVING = [[{"lr": 2.0**-i}] for i in range(6)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _captured(cls: Any, schedule: Any = (), **options: Any) -> Capture:
    model = _net()
    return capture_step(model, _loss, cls(model.parameters(), **options), (torch.randn(5, 6),), schedule=schedule)


def _recorded(capture: Capture) -> RecordedNumbers:
    assert capture.optimizer is not None and capture.optimizer.recorded is not None
    return capture.optimizer.recorded


@pytest.mark.slow
def test_what_depends_on_no_count_is_known_for_all_updates() -> None:
    numbers = _recorded(_captured(own.Lion, lr=0.5, weight_decay=0.5))
    assert numbers.updates is None and 0.75 in numbers.numbers and all(isinstance(n, float) for n in numbers.numbers)
    scheduled = _recorded(_captured(own.Lion, HALVING, lr=1.0))
    assert scheduled.updates is None and tuple(-(2.0**-i) for i in range(6)) in scheduled.numbers


@pytest.mark.slow
def test_what_counts_its_steps_is_known_for_those_planned() -> None:
    capture = _captured(own.OwnAdamW, [[{}]] * 20)
    assert _recorded(capture).updates == 20 and capture.optimizer is not None
    scalars = StepScalars(OptimizerSpec.of(capture.optimizer.as_data()))
    seen = {tuple(scalars.advance()) for _ in range(20)}
    assert len(seen) == 20
    with pytest.raises(
        CaptureError,
        match=r"numbers of the optimizer OwnAdamW are known for 20 updates, .* update 21; plan the job again",
    ):
        scalars.advance()


@pytest.mark.slow
def test_neither_optimizer_nor_model_changes() -> None:
    model = _net()
    optimizer = own.OwnAdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    capture_step(model, _loss, optimizer, (torch.randn(5, 6),))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3 and scheduler.last_epoch == 0
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (own.Clipped, {}, r"own_optimizers\.py:\d+: the optimizer reads the value of a tensor in Python"),
        (own.Together, {}, rf"{_LINE} computes with several parameters"),
        (own.Lookahead, {}, rf"{_LINE} runs different operators in update 5"),
        (own.CountsParameters, {}, rf"{_LINE} has state that depends on its number of parameters"),
        (own.Replaced, {}, "'m' of 0.weight, which starts neither as a constant|in a new tensor after each step"),
        (own.CopiedLate, {}, rf"{_LINE} keeps 'mean' of 0.weight, which starts neither as a constant nor as a copy"),
        (own.Exchanged, {}, rf"{_LINE} replaces parameters by other tensors"),
        (own.Noisy, {}, r"own_optimizers\.py:\d+: .*draws random numbers"),
        (own.Hidden, {}, r"own_optimizers\.py:\d+: .*uses a tensor that is not a valid state"),
        (
            own.OwnMomentum,
            {"momentum": 0.9},
            rf"{_LINE} keeps 'momentum_buffer' of 0.weight, which starts neither as a constant",
        ),
        (torch.optim.ASGD, {"t0": 2}, "runs different operators in update 5"),  # it begins to average
        (torch.optim.Adafactor, {"foreach": True}, "made with foreach=True"),
        (torch.optim.Adafactor, {"lr": torch.tensor(0.01)}, "has a tensor for its learning rate"),
        (torch.optim.LBFGS, {}, "cannot make a step on tensors without contents"),
    ],
)
def test_what_a_bundle_cannot_repeat_is_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        _captured(cls, [[{}]] * 6, **options)
    assert "port-agent exec" in str(caught.value)


def test_a_copy_of_what_the_forward_pass_changes_first_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 4))
    with pytest.raises(
        CaptureError, match=r"keeps 'z' as a copy of 0\.weight, which the forward or backward pass changes"
    ):
        capture_step(model, _loss, own.ScheduleFree(model.parameters()), (torch.arange(9),))


def test_one_that_has_made_steps_is_refused() -> None:
    model = _net()
    optimizer = own.Lion(model.parameters())
    _loss(model, torch.randn(5, 6)).backward()
    optimizer.step()
    with pytest.raises(CaptureError, match="the optimizer Lion has already made steps"):
        capture_step(model, _loss, optimizer, (torch.randn(5, 6),))


def test_one_that_reaches_the_model_is_refused_before_it_changes_anything() -> None:
    model = _net()
    before = [p.detach().clone() for p in model.parameters()]

    class Reaching(own.Lion):
        def step(self, closure: Any = None) -> Any:
            super().step()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.01, 0.01)

    optimizer = Reaching(model.parameters())
    with pytest.raises(
        CaptureError, match=r"test_own_optimizer\.py:\d+: the optimizer's step changes tensors of the model"
    ):
        capture_step(model, _loss, optimizer, (torch.randn(5, 6),))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class _Stacked(nn.Module):
    """Two weights whose gradients are halves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.ones(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.one, self.two]).T


def test_gradients_in_one_storage_may_be_read_and_not_changed() -> None:
    model, batch = _Stacked(), (torch.randn(5, 6),)
    assert capture_step(model, _loss, own.Lion(model.parameters()), batch).graphs
    with pytest.raises(CaptureError, match="changes a gradient that shares memory with another"):
        capture_step(model, _loss, own.OldSgd(model.parameters()), batch)


class Outside:
    calls = 0


class CountsOutside(own.Lion):
    def step(self, closure: Any = None) -> Any:
        Outside.calls += 1
        return super().step(closure)


@pytest.mark.slow
def test_what_an_optimizer_counts_outside_of_itself_is_named() -> None:
    with pytest.raises(
        CaptureError,
        match=r"CountsOutside changes Outside.calls \(in step, test_own_optimizer.py:[0-9]+\) in each step, which is not part of it",
    ):
        _captured(CountsOutside)
