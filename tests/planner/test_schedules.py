"""A schedule that depends on more than the count of updates is refused, with its line; the optimizer is as before."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from port_planner.base.errors import CaptureError, PortError
from port_planner.job import TrainingJob
from port_planner.schedules import difference, spelled, step_watched, tabulated
from port_planner.steps_ahead import known_steps
from port_planner.torch_compat.optimizers import note_step

LATE = 5
Rate = Callable[[TrainingJob, int], float]


class Own(LRScheduler):
    """A scheduler that sets the rate to what a function of job and count gives."""

    def __init__(self, job: TrainingJob, rate: Rate) -> None:
        self._job, self._rate = job, rate
        super().__init__(job.optimizer)

    def get_lr(self) -> list[Any]:
        return [base * self._rate(self._job, self.last_epoch) for base in self.base_lrs]


def made(rate: Rate) -> TrainingJob:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = TrainingJob(model, lambda m, x: m(x).square().mean(), optimizer, [torch.randn(8, 4)], 4)
    job.scheduler = Own(job, rate)
    return job


def _adds_a_group(job: TrainingJob, count: int) -> float:
    if count == LATE and len(job.optimizer.param_groups) == 1:
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        job.scheduler.base_lrs.append(0.1)
    return 1.0


TABLE = torch.linspace(1.0, 0.5, 40)
OTHERS: dict[str, tuple[Rate, str]] = {
    "weights": (lambda job, n: 1.0 if n < LATE else float(job.model.weight.detach().norm()), "tensors that training changes"),  # type: ignore[operator]
    "state": (lambda job, n: 1.0 if n < LATE else 1.0 + len(job.optimizer.state), "the optimizer's state"),
    "random of torch": (lambda job, n: float(torch.rand(())), "draws random numbers"),
    "random of Python": (lambda job, n: random.random(), "the scheduler draws random numbers from Python's"),
    "a group": (_adds_a_group, "step 5 adds a parameter group"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_schedule_of_more_than_the_count_is_refused_and_leaves_the_optimizer_as_it_was(what: str) -> None:
    rate, named = OTHERS[what]
    job = made(lambda *_: 1.0)
    job.scheduler._rate = rate
    state, rates = job.optimizer.state, [group["lr"] for group in job.optimizer.param_groups]
    with pytest.raises(PortError, match=named):
        tabulated(job, 2 * LATE, 0)
    assert job.optimizer.state is state
    assert [group["lr"] for group in job.optimizer.param_groups] == rates


def test_constants_of_the_program_and_rates_in_tensors_are_tabulated() -> None:
    job = made(lambda job, n: float(TABLE[n]))
    assert [row[0]["lr"] for row in tabulated(job, 3, 0)] == [0.1 * float(TABLE[n]) for n in range(3)]
    weights = [nn.Parameter(torch.zeros(2))]
    job.optimizer = torch.optim.Adam(weights, lr=torch.tensor(0.5), capturable=True)
    job.scheduler = ExponentialLR(job.optimizer, 0.5)
    assert [row[0]["lr"]["number"] for row in tabulated(job, 3, 0)] == [0.5, 0.25, 0.125]
    assert float(job.optimizer.param_groups[0]["lr"]) == 0.5


def test_gradients_are_no_part_of_a_schedule() -> None:
    job = made(lambda job, n: 1.0 if job.model.weight.grad is None else float(job.model.weight.grad.norm()))  # type: ignore[operator]
    job.model(torch.ones(1, 4)).sum().backward()
    note_step(job.optimizer)
    with pytest.raises(CaptureError, match=r"test_schedules\.py:\d+: the scheduler uses tensors that training changes"):
        step_watched(job)


def test_a_schedule_that_counts_its_own_calls_is_named() -> None:
    job, calls = made(lambda *_: 1.0), iter(range(100))
    job.scheduler = LambdaLR(job.optimizer, lambda _: 0.9 ** next(calls))
    with pytest.raises(
        CaptureError, match=r"test_schedules\.py:\d+: the scheduler gives other numbers .*port-agent exec"
    ):
        tabulated(job, 8, 0)


def test_what_the_programs_steps_do_to_a_schedule_is_told() -> None:
    """A scheduler that depends on a counter of the loss function."""
    steps: list[int] = []

    def counting() -> TrainingJob:
        steps.clear()
        job = made(lambda *_: 1.0)
        job.loss_fn = lambda m, x: (steps.append(1), m(x).square().mean())[1]
        job.scheduler = LambdaLR(job.optimizer, lambda _: 1.0 if len(steps) < 3 else 0.5)
        return job

    job = counting()
    table = spelled(job.optimizer, tabulated(job, 8, 0))
    assert difference(table, job.optimizer, 0) == ""
    with pytest.raises(CaptureError, match=r"update 4: the scheduler sets lr to 0\.05, but to 0\.1"):
        known_steps(counting(), 8, 60.0, table)
