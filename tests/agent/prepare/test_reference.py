"""Plain PyTorch's first steps: the job is as before, and what a bundle lacks shows."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from port_agent.prepare.reference import compared_steps, with_expected_results
from port_agent.training.trainer import Trainer
from port_planner.base.errors import CaptureError, PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.job import Bucket, TrainingJob
from port_planner.make_bundle import prepare
from port_planner.plain_steps import plain_losses
from tests.agent.jobs_small import classify, make_job, write_job
from tests.agent.training.options import train_options


def everything(job: TrainingJob) -> list[Any]:
    """Return copies of all that training changes."""
    states = [(k, v) for state in job.optimizer.state.values() for k, v in state.items()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
    grads = [p.grad for p in job.model.parameters()]
    schedule = None if job.scheduler is None else job.scheduler.state_dict()
    return copy.deepcopy([job.model.state_dict(), states, groups, grads, schedule, torch.get_rng_state()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_plain_training_to_the_bit(accumulate: int) -> None:
    job = make_job(accumulate=accumulate, clip_grad_norm=0.5)
    steps = compared_steps(job)
    reference = with_expected_results(prepare(job), steps).reference
    assert [float.fromhex(text) for text in reference.losses] == list(plain_losses(job, list(job.data), steps))
    assert {key.partition("/")[0] for key in reference.checksums} == {"parameter", "buffer", "state"}
    assert reference.threads == torch.get_num_threads()


def trained_before() -> TrainingJob:
    """Return a job whose optimizer has momentum of two steps; it counts none, or it would be refused."""
    job = make_job()
    job.optimizer, job.scheduler = torch.optim.SGD(job.model.parameters(), lr=0.01, momentum=0.9), None
    list(plain_losses(job, list(job.data), 2))
    return job


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_the_job_is_as_it_was(trained: bool) -> None:
    job = trained_before() if trained else make_job()
    captured, before = prepare(job), everything(job)
    with_expected_results(captured, 3)
    assert same(before, everything(job))


@pytest.mark.slow
class _Counting(torch.optim.Optimizer):
    """Counts its steps in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["n"])


def test_numbers_that_an_optimizer_begins_to_count_are_taken_back() -> None:
    job = make_job()
    job.optimizer, job.scheduler = _Counting(job.model.parameters()), None
    first, second = (with_expected_results(prepare(job, updates=4), 3).reference for _ in range(2))
    assert "n" not in job.optimizer.param_groups[0]
    assert first == second


def test_what_was_captured_is_as_it_was() -> None:
    """The bundle is written after the comparison: state that the optimizer had before it must not have gone on."""
    captured = prepare(trained_before())
    before = copy.deepcopy({k: t for k, t in captured.tensors.items() if isinstance(t, torch.Tensor)})
    assert any(key.startswith("state/") for key in before)
    after = with_expected_results(captured, 2).tensors
    assert all(torch.equal(value, after[key]) for key, value in before.items())  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_that_are_followed_are_recordings() -> None:
    job = make_job(accumulate=2, clip_grad_norm=0.5)
    captured = prepare(job, followed=compared_steps(job))
    assert len(captured.tapes) == 1
    with_recordings = with_expected_results(captured, compared_steps(job))
    assert with_recordings.recordings.count == 1 + 2  # of the three that are followed, the first is as before
    assert "the weights and states, by an update, the batch's place in an update" in with_recordings.recordings.varied
    assert with_recordings.reference == with_expected_results(prepare(job), compared_steps(job)).reference


@pytest.mark.slow
def test_what_differs_after_an_update_is_named_with_its_line() -> None:
    job = make_job()
    start = job.model[0].weight._version  # type: ignore[index]

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        loss, metric = classify(model, *batch)
        moved = model[0].weight._version != start  # type: ignore[index]
        return (loss * 2 if moved else loss), metric

    job.loss_fn = loss_fn
    captured = prepare(job, followed=2)
    with pytest.raises(CaptureError, match=r"test_reference\.py:\d+.*ran where"):
        with_expected_results(captured, 2)


def changed_by_gradients(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> TrainingJob:
    """Return a job that sums gradients of two batches, whose loss is another where some are there already."""
    job = make_job(accumulate=2)

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        loss, metric = classify(model, *batch)
        gradient = model[0].weight.grad  # type: ignore[index]
        return (loss if gradient is None else change(loss, gradient)), metric

    job.loss_fn = loss_fn
    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, gradient: loss * 1.0, r"test_reference\.py:\d+.*(ran where|ran in one recording|works on|was called)"),
        (lambda loss, gradient: loss + 0.0 * gradient.sum(), "reads a gradient that an earlier batch of the same update "
        "left"),
        (lambda loss, gradient: gradient.zero_().sum() + loss, "reads a gradient that an earlier batch of the same update "
        "left"),
    ],
)  # fmt: skip
def test_what_differs_in_a_later_batch_of_an_update_is_named(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], message: str
) -> None:
    """Even where the numbers are the same in the batches that are compared."""
    job = changed_by_gradients(change)
    captured = prepare(job, followed=compared_steps(job))
    with pytest.raises(CaptureError, match=message):
        with_expected_results(captured, compared_steps(job))


class Tied(nn.Module):
    """A weight that is used twice, some whose gradients autograd must copy, one that is computed
    with twice by checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.again = nn.Linear(6, 6), nn.Parameter(torch.zeros(6)), nn.Linear(6, 6)
        self.turned, self.copied = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(4, 6))
        self.spread = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x).relu())
        x = (x @ self.turned.t() + self.copied.clone() * x) / 8
        out: torch.Tensor = checkpoint(self.again, x, use_reentrant=False)
        return out.square().mean() + self.spread.sum() + self.shift.sum() + (self.shift + self.shift).sum()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_that_are_summed_in_any_way_are_the_same_step(accumulate: int, tmp_path: Path) -> None:
    def made() -> TrainingJob:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainingJob(model, lambda m, x: m(x), optimizer, [torch.randn(24, 6)], 4, accumulate=accumulate)

    job = made()
    captured = prepare(job, followed=compared_steps(job))
    assert captured.tapes
    recordings = with_expected_results(captured, compared_steps(job)).recordings
    assert recordings.varied[-1].endswith("the batch's place in an update")
    losses = list[float]()
    write_job(tmp_path / "job.port", made(), compared=compared_steps(job))
    with contextlib.closing(
        Trainer(Bundle(tmp_path / "job.port"), train_options(tmp_path, tmp_path, steps=6))
    ) as trainer:
        trainer.start()
        trainer.train(lambda event: losses.append(event.loss), lambda *_: None)
    plain = made()
    assert losses == list(plain_losses(plain, list(plain.data), 6))


def with_buckets(**settings: Any) -> TrainingJob:
    """Return a job whose batches have two further shapes: fewer rows."""
    job = make_job(**settings)
    job.buckets = [Bucket([c[:count] for c in job.data], count) for count in (3, 2)]
    return job


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "left"), [(1, {3, 2}), (2, {2})])
def test_first_steps_of_further_shapes_are_recordings(accumulate: int, left: set[int]) -> None:
    job = with_buckets(accumulate=accumulate)
    steps = compared_steps(job)
    captured = prepare(job, followed=steps)
    assert {rows for _, rows in captured.tapes} == left  # others do not begin an update there
    recordings = with_expected_results(captured, steps).recordings
    assert recordings.count >= 2 and "by an update, of further shapes" in recordings.varied[-1]
    assert prepare(job, followed=1).tapes == {}


@pytest.mark.slow
def test_what_differs_in_a_further_shape_is_named_with_its_line() -> None:
    job = with_buckets()
    start = job.model[0].weight._version  # type: ignore[index]

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        loss, metric = classify(model, *batch)
        moved = model[0].weight._version != start  # type: ignore[index]
        return (loss * 2 if len(batch[0]) == 3 and moved else loss), metric

    job.loss_fn = loss_fn
    captured = prepare(job, followed=compared_steps(job))
    with pytest.raises(CaptureError, match=r"test_reference\.py:\d+.*ran where"):
        with_expected_results(captured, compared_steps(job))


@pytest.mark.slow
def test_no_steps_are_no_comparison() -> None:
    captured = prepare(make_job())
    assert with_expected_results(captured, 0) is captured


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
    average, (*_, bias) = job.model.get_buffer("average"), job.model.parameters()

    def follow(*_: Any) -> None:
        average.lerp_(bias.detach(), 0.1)

    job.optimizer.register_step_post_hook(follow)


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
    """Change the loss after five calls, with the first update, as a curriculum does."""
    calls = 0

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        loss, metric = classify(model, *batch)
        return (loss if calls < 6 else loss * 2), metric

    job.loss_fn = loss_fn


def with_adagrad(job: TrainingJob) -> None:
    """Use an optimizer whose state is there before the first step."""
    job.optimizer = torch.optim.Adagrad(job.model.parameters(), lr=0.1)


class Rebinding(nn.Module):
    """Puts other tensors in the places of its buffers: in a step, in evaluation too, where
    `shared` both times the same one.
    """

    average: torch.Tensor
    before: torch.Tensor

    def __init__(self, inner: nn.Module, *, shared: bool = False) -> None:
        super().__init__()
        self.inner, self.shared = inner, shared
        self.register_buffer("average", torch.zeros(10))
        self.register_buffer("before", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) - 0.1 * self.before
        self.before = result.detach().mean(0) if self.shared else 1.0 * self.average
        self.average = self.before if self.shared else 0.9 * self.average + 0.1 * result.detach().mean(0)
        return result


def with_rebound_buffers(job: TrainingJob, *, shared: bool = False) -> None:
    job.model = Rebinding(job.model, shared=shared)


def with_out(job: TrainingJob) -> None:
    """Write into tensors that are there, of the model and of the step."""
    job.model.register_buffer("total", torch.zeros(()))

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        loss, metric = classify(model, *batch)
        with torch.no_grad():
            total = model.get_buffer("total")
            torch.add(total, loss, alpha=0.5, out=total)
            scale = torch.div(torch.ones(()), torch.tensor(4.0), out=torch.empty(()))
        return loss * scale + 0 * total, metric

    job.loss_fn = loss_fn


def with_frozen_layer_later(job: TrainingJob) -> None:
    """Stop to train a layer after five calls, with the first update."""
    calls = 0

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        model.get_parameter("0.weight").requires_grad_(calls < 6)
        return classify(model, *batch)

    job.loss_fn = loss_fn


def with_exchanged_weights(job: TrainingJob) -> None:
    """Give a parameter other memory in each step."""

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        weight = model.get_parameter("0.weight")
        weight.data = weight.data * 0.99
        return classify(model, *batch)

    job.loss_fn = loss_fn


def with_learning_rate_of_a_hook(job: TrainingJob) -> None:
    def slower(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    job.optimizer.register_step_post_hook(slower)


def with_alternating_modes(job: TrainingJob) -> None:
    """Train in training mode and in evaluation mode by turns."""

    def loss_fn(model: nn.Module, *batch: torch.Tensor) -> Any:
        model.train(not model.training)
        return classify(model, *batch)

    job.loss_fn = loss_fn


def with_changed_batch(job: TrainingJob) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return classify(model, x.mul_(0.5), y)

    job.loss_fn = loss_fn


def with_gradient_penalty(job: TrainingJob) -> None:
    """Differentiate twice."""

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        loss, metric = classify(model, x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum(), metric

    job.loss_fn = loss_fn


def with_power_of_the_spectrum(job: TrainingJob) -> None:
    """Multiply complex numbers by their conjugates."""

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, metric = classify(model, x, y)
        spectrum = torch.fft.rfft(model(x).flatten())
        return loss + 1e-3 * torch.vdot(spectrum, spectrum).real, metric

    job.loss_fn = loss_fn


def with_step_in_the_backward_pass(job: TrainingJob) -> None:
    """Update by plain descent as each gradient comes, beside the optimizer."""

    def descend(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)  # type: ignore[arg-type]

    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)


def with_teacher_in_inference_mode(job: TrainingJob) -> None:
    teacher = copy.deepcopy(job.model).requires_grad_(False).eval()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            soft = teacher(x).softmax(-1)
        return nn.functional.cross_entropy(model(x), soft.clone())

    job.loss_fn = loss


CHANGES: dict[str, tuple[Callable[[TrainingJob], None], type[PortError] | None]] = {
    "nothing": (lambda job: None, None),
    "state before the first step": (with_adagrad, None),
    "forward hook": (with_forward_hook, None),
    "gradient hook": (with_gradient_hook, None),
    "hook after accumulation": (with_accumulation_hook, None),
    "weights clipped after the step": (with_clipped_weights, None),
    "average of the weights": (with_average, None),
    "loss that changes later": (with_phases, CaptureError),
    "reentrant checkpoint": (with_checkpoint, None),
    "buffers bound anew": (with_rebound_buffers, None),
    "buffers bound to one tensor": (partial(with_rebound_buffers, shared=True), CaptureError),
    "results written with out=": (with_out, None),
    "layer frozen later": (with_frozen_layer_later, CaptureError),
    "weights given other memory": (with_exchanged_weights, CaptureError),
    "learning rate changed by a hook": (with_learning_rate_of_a_hook, CaptureError),
    "modes by turns": (with_alternating_modes, CaptureError),
    "batch changed in place": (with_changed_batch, None),
    "gradient penalty": (with_gradient_penalty, None),
    "power of a spectrum": (with_power_of_the_spectrum, None),
    "teacher in inference mode": (with_teacher_in_inference_mode, None),
    "step in the backward pass": (with_step_in_the_backward_pass, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_equal_or_refused(what: str, tmp_path: Path) -> None:
    change, refusal = CHANGES[what]
    job = make_job(scheduler=None, eval_data=())
    change(job)
    path = tmp_path / "job.port"
    outcome: PortError | None = None
    try:
        write_job(path, job, compared=compared_steps(job))
        trainer = Trainer(Bundle(path), train_options(tmp_path / "state", tmp_path, steps=2, verify=2))
        with contextlib.closing(trainer):
            trainer.start()
            trainer.train(lambda e: None, lambda *_: None)
    except PortError as error:
        outcome = error
    assert outcome is None if refusal is None else isinstance(outcome, refusal)
