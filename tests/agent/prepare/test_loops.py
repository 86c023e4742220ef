"""The loops that a recording trains otherwise without a word (`benchmarks.follow_zoo.features.loops`),
as jobs: equal or refused.

What a loop does between steps a job does in its loss function or in a hook; `test_reference` has more of them.
"""

import collections
import contextlib
import copy
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from port_agent.prepare.reference import compared_steps
from port_agent.training.step_values import GraphChangedError
from port_agent.training.trainer import Trainer
from port_planner.base.errors import CaptureError, PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.data_order import epoch_order
from port_planner.job import JobError, TrainingJob
from port_planner.job_sources import as_job
from port_planner.plain_steps import plain_losses
from tests.agent.jobs_small import write_job
from tests.agent.training.options import train_options

ROWS, BATCH, WIDTH, CLASSES, STEPS = 32, 8, 16, 4, 7

Loss = Callable[[Any, Tensor, Tensor], Any]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, CLASSES))


def job_with(loss_fn: Loss, model: nn.Module | None = None) -> TrainingJob:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = network() if model is None else model
    data = [torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))]
    return TrainingJob(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-2), data, BATCH)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def noise_of_two_generators(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, x * random.gauss(1, 0.1) + float(np.random.rand()), y)


def noise_of_a_generator_of_its_own() -> TrainingJob:
    draw = np.random.default_rng(0)
    return job_with(lambda model, x, y: classify(model, x + torch.from_numpy(draw.normal(size=x.shape)).float(), y))


def layers_dropped_by_python() -> TrainingJob:
    torch.manual_seed(0)
    layers, draw = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)]), random.Random(0)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for layer in model:  # type: ignore[attr-defined]
            if draw.random() > 0.4:
                x = layer(x).relu()
        return x.square().mean()

    return job_with(loss_fn, layers)


def rows_chosen_by_a_mask(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    keep = out.max(1)[0] > out.mean()
    return nn.functional.cross_entropy(out[keep], y[keep])


def scaled_by_a_count() -> TrainingJob:
    calls = [0]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return classify(model, x, y) * (1 + 1 / calls[0])

    return job_with(loss_fn)


def counted_in_a_tensor() -> TrainingJob:
    """A tensor that belongs to nobody changes in each step, as running metrics do; the loss does not depend on it."""
    confusion = torch.zeros(CLASSES, CLASSES)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            confusion.index_put_((y, out.argmax(1)), torch.ones(len(y)), accumulate=True)
        return nn.functional.cross_entropy(out, y)

    return job_with(loss_fn)


def weighted_by_a_tensor_that_grows() -> TrainingJob:
    weight = torch.ones(())

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = classify(model, x, y) * weight.clone()
        with torch.no_grad():
            weight.mul_(1.5)
        return loss

    return job_with(loss_fn)


def frozen_and_thawed() -> TrainingJob:
    calls = [0]

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        model[0].requires_grad_(calls[0] % 2 == 1)
        return classify(model, x, y)

    return job_with(loss_fn)


def network_that_grows() -> TrainingJob:
    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.append(nn.Linear(CLASSES, CLASSES))
        return classify(model, x, y)

    return job_with(loss_fn)


def twice_in_every_fifth_step() -> TrainingJob:
    """What it counts by decides nothing in the steps that planning sees."""
    calls = [0]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return classify(model, x, y) * (2 if calls[0] % 5 == 0 else 1)

    return job_with(loss_fn)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(WIDTH, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.layer(x)
        return out * 2 if self.steps % 11 == 0 else out


def branch_on_the_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = classify(model, x, y)
    return loss * 2 if bool(loss > 1.4) else loss


def branch_that_is_always_the_same(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = classify(model, x, y)
    return loss if bool(torch.isfinite(loss)) else loss * 0


def scaled_by_a_number_read(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = classify(model, x, y)
    return loss / max(loss.item(), 1e-3)


def average_of_weights_by_hand() -> TrainingJob:
    torch.manual_seed(1)
    average = network()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)
            taught = average(x).softmax(1)
        return classify(model, x, y) + nn.functional.mse_loss(model(x).softmax(1), taught)

    return job_with(loss_fn)


def codes_with_straight_gradients() -> TrainingJob:
    torch.manual_seed(0)
    parts = nn.ModuleDict({"in": nn.Linear(WIDTH, 8), "codes": nn.Embedding(20, 8), "out": nn.Linear(8, WIDTH)})

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = model["in"](x)
        distance = (hidden[:, None] - model["codes"].weight[None]).square().sum(2)
        code = model["codes"](distance.argmin(1))
        passed = hidden + (code - hidden).detach()
        return nn.functional.mse_loss(model["out"](passed), x) + (code - hidden.detach()).square().mean()

    return job_with(loss_fn, parts)


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share, order = torch.rand(()), torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[order])
    first, second = (nn.functional.cross_entropy(out, target) for target in (y, y[order]))
    return share * first + (1 - share) * second


def mixup_by_a_beta_distribution(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return classify(model, share * x + (1 - share) * x.roll(1, 0), y)


def latent_counts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Draw from what gradients go through (gamma, Dirichlet) and from counts (Poisson, binomial)."""
    rate = torch.distributions.Gamma(model(x).exp(), 1.0).rsample()
    parts = torch.distributions.Dirichlet(rate + 0.5).rsample()
    seen = torch.poisson(x.abs()) + torch.binomial(torch.full_like(x, 4), x.sigmoid())
    return nn.functional.nll_loss((parts + 1e-3).log(), y) + classify(model, x + 0.01 * seen, y)


def mixup_by_numpy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = float(np.random.beta(1, 1))
    return classify(model, share * x + (1 - share) * x.roll(1, 0), y)


def near(model: nn.Module, others: Iterable[Tensor]) -> Tensor:
    return sum((p - other).square().sum() for p, other in zip(model.parameters(), others, strict=True))  # type: ignore[return-value]


def average_of_weights(*, in_place: bool) -> TrainingJob:
    """It is the weights themselves until they have changed: the first two steps would show nothing."""
    model = network()
    average = [p.detach().clone() for p in model.parameters()]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal average
        with torch.no_grad():
            moved = [
                (a.lerp_ if in_place else a.lerp)(p, 0.5) for a, p in zip(average, model.parameters(), strict=True)
            ]
        average = moved
        return classify(model, x, y) + near(model, average)

    return job_with(loss_fn, model)


def teacher_whose_weights_are_exchanged() -> TrainingJob:
    model = network()
    teacher = copy.deepcopy(model)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
            t.data = (t.data + p.data) / 2
        with torch.no_grad():
            taught = teacher(x).softmax(1)
        return nn.functional.cross_entropy(model(x), taught)

    return job_with(loss_fn, model)


def queue_of_past_weights() -> TrainingJob:
    """What a step puts there is read three steps later."""
    model = network()
    queue = collections.deque([[p.detach().clone() for p in model.parameters()]] * 3, maxlen=3)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        past = queue[0]
        queue.append([p.detach().clone() for p in model.parameters()])
        return classify(model, x, y) + near(model, past)

    return job_with(loss_fn, model)


class Watched(nn.Module):
    """Keeps what lies between its layers, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x)
        self.attention = self.hidden.softmax(1).detach()
        result: Tensor = self.last(self.hidden.relu())
        return result


def hidden_layer_kept() -> TrainingJob:
    torch.manual_seed(0)
    return job_with(lambda model, x, y: classify(model, x, y) + model.hidden.square().mean(), Watched())


def weights_of_classes_changed_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weights.mul_(1.5)
    weights[0] = weights[1] + 1
    return nn.functional.cross_entropy(model(x), y, weights)


class CountingLoss(nn.Module):
    """Doubles the loss after a hundred calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(out, target) * (2 if self.calls > 100 else 1)


def counting_in_an_argument(counts: dict[str, int], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts["calls"] += 1
    return classify(model, x, y) * (2 if counts["calls"] > 100 else 1)


def adversarial_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(classify(model, x, y), x)[0]
    return classify(model, (x + 0.1 * slope.sign()).detach(), y)


def losses_kept_with_their_graphs() -> TrainingJob:
    """A loss that also goes back through the step before is one of a graph that is gone."""
    kept: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = classify(model, x, y)
        kept.append(loss)
        return loss

    return job_with(loss_fn)


@dataclass
class _Batch:
    x: Tensor
    y: Tensor
    weight: float


def weight_of_a_batch_drawn_by_python(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    batch = _Batch(x, y, random.random())
    return batch.weight * classify(model, batch.x, batch.y)


def with_a_seldom_label(loss_fn: Loss) -> Callable[[], TrainingJob]:
    """Return what makes a job of which one row alone has the last label: one that neither
    recordings nor compared steps take.
    """

    def made() -> TrainingJob:
        job = job_with(loss_fn)
        order = epoch_order(job.seed, 0, ROWS).tolist()
        seldom = next(row for row in order[2 * BATCH : -BATCH] if row >= BATCH)
        labels = job.data[1] % (CLASSES - 1)
        labels[seldom] = CLASSES - 1
        job.data = [job.data[0], labels]
        return job

    return made


def twice_where(found: Callable[[Tensor], bool]) -> Loss:
    return lambda model, x, y: classify(model, x, y) * (2 if found(y) else 1)


def rows_with_other_labels(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    keep = y < CLASSES - 1
    return nn.functional.cross_entropy(model(x)[keep], y[keep])


def spectrum_under_a_window(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    windows = torch.hann_window(8), torch.hamming_window(8)
    parts = [torch.stft(x, 8, 4, window=w, return_complex=True).abs().flatten(1)[:, : WIDTH // 2] for w in windows]
    return classify(model, torch.nan_to_num(torch.cat(parts, 1).log()), y)


def turned_spectrum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    turned = torch.fft.rfft(x) * (0.5 - 2j) + 1j
    return classify(model, torch.fft.irfft(turned, n=x.shape[-1]), y)


def learning_rate_in_a_tensor() -> TrainingJob:
    """torch computes what follows from it in the tensor's type, and a schedule writes into it."""
    job = job_with(classify)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=torch.tensor(1e-2), weight_decay=0.3)
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda update: 1 / (1 + 0.3 * update))
    return job


def two_batch_sizes_by_turns() -> TrainingJob:
    torch.manual_seed(0)
    model = network()
    batches = [(torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))) for n in (8, 4, 8, 4)]
    job = as_job((model, lambda m, b: classify(m, *b), torch.optim.AdamW(model.parameters()), batches))
    assert job is not None
    return job


LENGTHS = torch.tensor([4, 4, 3, 3, 2, 2, 1, 1])
STEPS_IN_TIME = 4


def packed(lengths: Callable[[Tensor], Any], **options: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Return a loss of a recurrent network on rows that are sequences of so many steps, given the labels."""

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        padded = x.view(BATCH, STEPS_IN_TIME, -1)
        rows = nn.utils.rnn.pack_padded_sequence(padded, lengths(y), batch_first=True, **options)
        out, _ = nn.utils.rnn.pad_packed_sequence(model["layers"](rows)[0], batch_first=True)
        return nn.functional.cross_entropy(model["head"](out.mean(1)), y)

    return loss_fn


def packed_job(lengths: Callable[[Tensor], Any], kind: str = "LSTM", **options: Any) -> Callable[[], TrainingJob]:
    def made() -> TrainingJob:
        torch.manual_seed(0)
        layers = getattr(nn, kind)(
            WIDTH // STEPS_IN_TIME, 6, 2, batch_first=True, bidirectional=kind == "GRU", dropout=0.1
        )
        head = nn.Linear(12 if kind == "GRU" else 6, CLASSES)
        return job_with(packed(lengths, **options), nn.ModuleDict({"layers": layers, "head": head}))

    return made


def packed_seldom(lengths: Callable[[Tensor], Tensor]) -> Callable[[], TrainingJob]:
    """Return what makes a job of which one row, that planning does not see, has a length of its own."""

    def made() -> TrainingJob:
        job = packed_job(lengths, enforce_sorted=False)()
        job.data = with_a_seldom_label(classify)().data
        return job

    return made


def packed_by_hand() -> TrainingJob:
    """Layers read how many rows each step in time has where that lies; it is as many in all in every batch."""

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        sizes = torch.tensor([8, 5, 3]) + seldom_in(y).sum() * torch.tensor([0, 1, -1])
        out, _ = model["layers"](nn.utils.rnn.PackedSequence(x.view(16, -1), sizes))
        return nn.functional.cross_entropy(model["head"](out.data.view(BATCH, -1)), y)

    job = with_a_seldom_label(classify)()
    parts = nn.ModuleDict({"layers": nn.LSTM(8, 6), "head": nn.Linear(12, CLASSES)})
    made = job_with(loss_fn, parts)
    made.data = job.data
    return made


def seldom_in(y: Tensor) -> Tensor:
    return (y == CLASSES - 1).long()


LOOPS: dict[str, tuple[Loss | Callable[[], TrainingJob], type[PortError] | None]] = {
    "as it should be": (classify, None),
    "noise of Python and numpy": (noise_of_two_generators, CaptureError),
    "noise of a generator of its own": (noise_of_a_generator_of_its_own, CaptureError),
    "weight drawn by Python": (weight_of_a_batch_drawn_by_python, CaptureError),
    "an average of weights in a list, made anew": (lambda: average_of_weights(in_place=False), CaptureError),
    "an average of weights in a list, changed": (lambda: average_of_weights(in_place=True), CaptureError),
    "a teacher whose weights are exchanged": (teacher_whose_weights_are_exchanged, CaptureError),
    "a queue of past weights": (queue_of_past_weights, CaptureError),
    "a hidden layer kept by the model": (hidden_layer_kept, None),
    "weights of classes changed in place": (weights_of_classes_changed_in_place, None),
    "a loss that is a module and counts": (lambda: job_with(CountingLoss()), CaptureError),
    "a loss that counts in an argument": (
        lambda: job_with(functools.partial(counting_in_an_argument, {"calls": 0})),
        CaptureError,
    ),
    "mixup by torch": (mixup, None),
    "mixup by a beta distribution": (mixup_by_a_beta_distribution, None),
    "draws from gamma, Dirichlet, Poisson and binomial distributions": (latent_counts, None),
    "mixup by numpy": (mixup_by_numpy, CaptureError),
    "layers dropped by Python": (layers_dropped_by_python, CaptureError),
    "rows chosen by a mask": (rows_chosen_by_a_mask, CaptureError),
    "scaled by a count": (scaled_by_a_count, CaptureError),
    "counted in a tensor of nobody": (counted_in_a_tensor, CaptureError),
    "weighted by a tensor that grows": (weighted_by_a_tensor_that_grows, CaptureError),
    "twice in every fifth step": (twice_in_every_fifth_step, CaptureError),
    "a module that counts its steps": (lambda: job_with(classify, Counting()), CaptureError),
    "frozen and thawed": (frozen_and_thawed, CaptureError),
    "network that grows": (network_that_grows, CaptureError),
    "branch on the loss": (branch_on_the_loss, GraphChangedError),
    "branch that stays": (branch_that_is_always_the_same, None),
    "scaled by a number that is read": (scaled_by_a_number_read, CaptureError),
    "average of weights by hand": (average_of_weights_by_hand, CaptureError),
    "straight-through codes": (codes_with_straight_gradients, None),
    "adversarial inputs": (adversarial_inputs, None),
    "losses kept with their graphs": (losses_kept_with_their_graphs, CaptureError),
    "spectrum under a window": (spectrum_under_a_window, None),
    "spectrum turned by a complex number": (turned_spectrum, None),
    "learning rate in a tensor": (learning_rate_in_a_tensor, None),
    "two batch sizes by turns": (two_batch_sizes_by_turns, JobError),
    "packed rows": (packed_job(lambda y: LENGTHS), None),
    "packed rows, lengths in a list": (
        packed_job(lambda y: LENGTHS.flip(0).tolist(), "GRU", enforce_sorted=False),
        None,
    ),
    "packed rows, lengths of the batch": (packed_job(lambda y: 2 + y * 0, "RNN"), None),
    "packed rows of other lengths": (packed_job(lambda y: 1 + y, enforce_sorted=False), CaptureError),
    "packed rows, one seldom longer": (packed_seldom(lambda y: 2 + seldom_in(y)), GraphChangedError),
    "packed by hand, seldom divided otherwise": (packed_by_hand, GraphChangedError),
    "packed rows, seldom divided otherwise": (
        packed_seldom(lambda y: 2 + seldom_in(y) - seldom_in(y).roll(1)),
        GraphChangedError,
    ),
}
SELDOM: dict[str, Loss] = {
    "steered by numpy": twice_where(lambda y: bool((y == CLASSES - 1).numpy().any())),
    "steered by a list": twice_where(lambda y: True in (y == CLASSES - 1).tolist()),
    "steered by torch.equal": twice_where(lambda y: not torch.equal(y, y % (CLASSES - 1))),
    "steered by torch.allclose": twice_where(lambda y: not torch.allclose(y + 0.0, y % (CLASSES - 1) + 0.0)),
    "rows chosen by a mask, seldom others": rows_with_other_labels,
}
"""What is the same in all steps that planning sees, and another later."""
LOOPS["steered by labels read as numpy"] = (twice_where(lambda y: bool((y.numpy() == 0).all())), CaptureError)
LOOPS |= {what: (with_a_seldom_label(loss_fn), GraphChangedError) for what, loss_fn in SELDOM.items()}
_OF_ITS_OWN = {what for what, (made, _) in LOOPS.items() if made.__code__.co_argcount == 0}


def job_of(what: str) -> TrainingJob:
    made: Any = LOOPS[what][0]
    job: TrainingJob = made() if what in _OF_ITS_OWN else job_with(made)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("what", LOOPS)
def test_equal_or_refused(what: str, tmp_path: Path) -> None:
    """Equal for more steps than a bundle compares, too."""
    losses, refusal = list[float](), LOOPS[what][1]
    outcome: PortError | None = None
    try:
        job = job_of(what)
        write_job(tmp_path / "job.port", job, compared=compared_steps(job))
        options = train_options(tmp_path / "state", tmp_path, steps=STEPS, verify=STEPS)
        with contextlib.closing(Trainer(Bundle(tmp_path / "job.port"), options)) as trainer:
            trainer.start()
            trainer.train(lambda event: losses.append(event.loss), lambda *_: None)
    except PortError as error:
        outcome = error
    assert outcome is None if refusal is None else isinstance(outcome, refusal)
    if outcome is None:
        plain = job_of(what)
        assert losses == list(plain_losses(plain, list(plain.data), STEPS))


def asserted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    torch._assert_async((y < CLASSES - 1).all(), "a label that is not known")
    return classify(model, x, y)


def inverted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scale = torch.linalg.inv(torch.eye(3) * (y < CLASSES - 1).all())
    return classify(model, x, y) * scale.mean()


@pytest.mark.slow
@pytest.mark.parametrize("checked", [asserted, inverted])
def test_a_check_fails_in_the_step_in_which_it_fails_plainly(checked: Loss, tmp_path: Path) -> None:
    job = with_a_seldom_label(checked)()
    write_job(tmp_path / "job.port", job, compared=compared_steps(job))
    losses = list[float]()
    options = train_options(tmp_path / "state", tmp_path, steps=STEPS)
    with contextlib.closing(Trainer(Bundle(tmp_path / "job.port"), options)) as trainer:
        trainer.start()
        with pytest.raises(RuntimeError) as found:
            trainer.train(lambda event: losses.append(event.loss), lambda *_: None)
    plain = with_a_seldom_label(checked)()
    steps = plain_losses(plain, list(plain.data), STEPS)
    assert losses == list(itertools.islice(steps, len(losses)))
    with pytest.raises(RuntimeError, match=re.escape(str(found.value))):
        next(steps)
