"""Plain PyTorch's first steps: the job is as before, and what a bundle lacks shows."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agent.prepare.reference import compared_steps, with_reference
from agent.train.comparison import MismatchError
from agent.train.trainer import Trainer, TrainOptions
from planner.ir.bundle.bundle import Bundle
from planner.ir.errors import CaptureError, PortError
from planner.job import TrainingJob
from planner.make_bundle import plain_losses, prepare
from tests.agent.jobs_small import classify, make_job, write_job


def everything(job: TrainingJob) -> list[Any]:
    """Return copies of all that training changes."""
    states = [(k, v) for state in job.optimizer.state.values() for k, v in state.items()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
    grads = [p.grad for p in job.model.parameters()]
    schedule = job.scheduler.state_dict()
    return copy.deepcopy([job.model.state_dict(), states, groups, grads, schedule, torch.get_rng_state()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_plain_training_to_the_bit(accumulate: int) -> None:
    job = make_job(accumulate=accumulate, clip_grad_norm=0.5)
    steps = compared_steps(job)
    reference = with_reference(prepare(job), steps).reference
    assert [float.fromhex(text) for text in reference.losses] == list(plain_losses(job, list(job.data), steps))
    assert {key.partition("/")[0] for key in reference.checksums} == {"parameter", "buffer", "state"}
    assert reference.threads == torch.get_num_threads()


@pytest.mark.parametrize("trained", [0, 2])
def test_the_job_is_as_it_was(trained: int) -> None:
    job = make_job()
    list(plain_losses(job, list(job.data), trained))
    prepared, before = prepare(job), everything(job)
    with_reference(prepared, 3)
    assert same(before, everything(job))


def test_what_was_prepared_is_as_it_was() -> None:
    """The bundle is written after the comparison: state that the optimizer had before it must not have gone on."""
    job = make_job()
    list(plain_losses(job, list(job.data), 2))
    prepared = prepare(job)
    before = copy.deepcopy({k: t for k, t in prepared.tensors.items() if isinstance(t, torch.Tensor)})
    assert any(key.startswith("state/") for key in before)
    after = with_reference(prepared, 2).tensors
    assert all(torch.equal(value, after[key]) for key, value in before.items())  # type: ignore[arg-type]


def test_no_steps_are_no_comparison() -> None:
    prepared = prepare(make_job())
    assert with_reference(prepared, 0) is prepared


# -- what a recording cannot have: equal, or refused before anything trains on it


class Checkpointed(nn.Module):
    """Computes its middle twice, by the older of torch's two ways."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.layers
        x = checkpoint(rest[0], first(x), use_reentrant=True)
        for layer in rest[1:]:
            x = layer(x)
        return x


def with_checkpoint(job: TrainingJob) -> None:
    job.model = Checkpointed(job.model)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)


def with_average(job: TrainingJob) -> None:
    """Let a buffer that no loss depends on follow the weights, after each step of the optimizer."""
    job.model.register_buffer("average", torch.zeros(10))
    bias, average = job.model[-1].bias, job.model.average  # type: ignore[index, union-attr]
    job.optimizer.register_step_post_hook(lambda *_: average.lerp_(bias.detach(), 0.1))  # type: ignore[operator]


def with_clipped_weights(job: TrainingJob) -> None:
    def clip(*_: Any) -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.clamp_(-0.1, 0.1)

    job.optimizer.register_step_post_hook(clip)


def with_gradient_hook(job: TrainingJob) -> None:
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def with_accumulation_hook(job: TrainingJob) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def with_forward_hook(job: TrainingJob) -> None:
    job.model[0].register_forward_hook(lambda module, given, result: result * 1.5)  # type: ignore[index]


def with_phases(job: TrainingJob) -> None:
    """Change the loss after seven calls, later than its six recordings, as a curriculum does."""
    calls = 0

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        loss, metric = classify(model, *batch)
        return (loss if calls < 8 else loss * 2), metric

    job.loss_fn = loss_fn


def with_adagrad(job: TrainingJob) -> None:
    """Use an optimizer whose state is there before the first step."""
    job.optimizer = torch.optim.Adagrad(job.model.parameters(), lr=0.1)


CHANGES: dict[str, tuple[Callable[[TrainingJob], None], type[PortError] | None]] = {
    "nothing": (lambda job: None, None),
    "state before the first step": (with_adagrad, None),
    "forward hook": (with_forward_hook, None),
    "gradient hook": (with_gradient_hook, None),
    "hook after accumulation": (with_accumulation_hook, None),
    "weights clipped after the step": (with_clipped_weights, MismatchError),
    "average of the weights": (with_average, CaptureError),
    "loss that changes later": (with_phases, MismatchError),
    "reentrant checkpoint": (with_checkpoint, None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_equal_or_refused(what: str, tmp_path: Path) -> None:
    change, refusal = CHANGES[what]
    job = make_job(scheduler=None, eval_data=())
    change(job)
    path = tmp_path / "job.port"
    outcome: type[PortError] | None = None
    try:
        write_job(path, job, compared=compared_steps(job))
        trainer = Trainer(Bundle(path), TrainOptions(tmp_path / "state", tmp_path, steps=2, verify=2))
        with contextlib.closing(trainer):
            trainer.start()
            trainer.train(lambda e: None, lambda *_: None)
    except PortError as error:
        outcome = type(error)
    assert outcome is refusal
