"""Random training programs, reproducible by a seed: what they do is drawn when they are made and while they run.

What is drawn: layers, the structure of a batch, branches and loops that look at values, shapes that depend on data,
hooks, state kept between steps, three sources of randomness, freezing, weights touched between steps, accumulation,
evaluation, copies and files.
"""

import copy
import io
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.follow_zoo.compare import Program, state, training_begins
from port_planner.job import TrainingJob

Step = Callable[["_Trainer", int], None]


def program(seed: int) -> Program:
    """Return the program of this seed."""
    return partial(_run, seed)


def _run(seed: int) -> Any:
    draw = random.Random(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    trainer = _Trainer(draw)
    training_begins()
    for step in range(draw.randint(3, 8)):
        trainer.step(step)
    return trainer.result()


_STEADY = 0.7
"""Share of the jobs that do nothing that a bundle refuses by name, except what their layers do."""

_PLANNED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
)


def job(seed: int) -> TrainingJob:
    """Return the model, loss and habits of this seed as a job; the optimizer carries what
    the habits do between steps.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    trainer, share = _Trainer(draw), draw.random()
    size = trainer.batch_size or 8
    rows = size * draw.randint(4, 8) + draw.choice([0, 0, 2])
    if draw.random() < _STEADY:
        trainer.noise, trainer.habits, trainer.task = 0, [], draw.choice([0, 2, 4])
        trainer.model.dropped = trainer.model.stops_by_value = False
        make, options = draw.choice(_PLANNED)
        trainer.optimizer = make(trainer.model.parameters(), lr=1e-2, **options)
        trainer.scheduler = None

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return trainer.loss(trainer.packed(x, y, share)) / trainer.accumulate

    def habits(*_: Any) -> None:
        for number, habit in enumerate(trainer.habits):
            habit(trainer, number)

    if trainer.habits:
        trainer.optimizer.register_step_post_hook(habits)
    return TrainingJob(
        trainer.model,
        loss_fn,
        trainer.optimizer,
        [torch.randn(rows, 24), torch.randint(0, 8, (rows,))],
        size,
        scheduler=trainer.scheduler,
        accumulate=trainer.accumulate,
        clip_grad_norm=1.0 if trainer.clip else None,
        seed=seed,
        name=f"job{seed}",
    )


@dataclass
class _Pair:
    x: Tensor
    y: Tensor
    share: float


class _Recurrent(nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        kind = draw.choice([nn.GRU, nn.LSTM, nn.RNN])
        self.inner = kind(width // 4, width // 4, batch_first=True, bidirectional=draw.random() < 0.3)
        self.out = nn.LazyLinear(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.view(len(x), 4, -1))[0].flatten(1))


class _Attends(nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width // 4, 2, dropout=draw.choice([0.0, 0.2]), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(len(x), 4, -1)
        return self.inner(parts, parts, parts, need_weights=False)[0].flatten(1)


class _Convolves(nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(4, 4 * draw.randint(1, 3), 3, padding=1)
        self.norm, self.inplace = nn.BatchNorm1d(self.inner.out_channels), draw.random() < 0.5
        self.out = nn.Linear(width // 4 * self.inner.out_channels, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.inner(x.view(len(x), 4, -1))), inplace=self.inplace)
        return self.out(y.flatten(1))


class _Experts(nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = torch.nonzero(chosen == i).squeeze(1)
            if len(where):
                out = out.index_add(0, where, expert(x[where]) * weight[where, None])
        return out


class _Counts(nn.Module):
    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(width, width), 0
        self.register_buffer("average", torch.zeros(width))
        self.rebound = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            if self.rebound:
                self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            else:
                self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.inner(x - self.average) / (1 + self.calls % 3)


_LAYERS: tuple[Callable[[random.Random, int], nn.Module], ...] = (
    lambda draw, width: nn.Linear(width, width),
    lambda draw, width: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
    lambda draw, width: nn.LayerNorm(width),
    lambda draw, width: nn.BatchNorm1d(width),
    lambda draw, width: nn.Dropout(draw.choice([0.1, 0.5])),
    lambda draw, width: nn.ReLU(inplace=draw.random() < 0.3),
    lambda draw, width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    lambda draw, width: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
    _Recurrent,
    _Attends,
    _Convolves,
    _Experts,
    _Counts,
)


class _Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = 16 * draw.randint(1, 6)
        chosen = [draw.choice(_LAYERS)(draw, self.width) for _ in range(draw.randint(2, 6))]
        self.first, self.layers = nn.Linear(24, self.width), nn.ModuleList(chosen)
        self.out = nn.Linear(self.width, 8)
        self.skip, self.dropped, self.checkpointed = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.3
        self.repeats, self.reentrant, self.stops_by_value = (
            draw.choice([1, 1, 2]),
            draw.random() < 0.4,
            draw.random() < 0.2,
        )
        self(torch.randn(4, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in [*self.layers] * self.repeats:
            if self.dropped and random.random() < 0.3:
                continue
            if self.stops_by_value and x.detach().abs().max().item() > 4:
                break
            kept = x.clone() if self.skip else None
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed and self.training else layer(x)
            if kept is not None:
                x = x + kept
        return self.out(x)


class _Trainer:
    """A model, an optimizer, and the habits that were drawn for this program."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.model = draw, _Model(draw)
        self.kept: list[Any] = []
        self.memory = torch.zeros(draw.choice([40, 200]), 24)
        self.make_optimizer = self._optimizers()
        self.optimizer = self.make_optimizer(list(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2) if draw.random() < 0.3 else None
        self.accumulate = draw.choice([1, 1, 1, 2, 3])
        self.batch_size = draw.choice([None, 6, 12])
        self.structure, self.task = draw.randrange(6), draw.randrange(5)
        self.noise = draw.randrange(4)
        self.autocast, self.clip = draw.random() < 0.2, draw.random() < 0.4
        self.zero_to_none = draw.random() < 0.7
        self.average = copy.deepcopy(self.model) if draw.random() < 0.25 else None
        self.habits = draw.sample(_HABITS, draw.randint(1, 4))
        for hook in draw.sample(_HOOKS, draw.randint(0, 2)):
            hook(self)

    def _optimizers(self) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
        kind: dict[str, Any] = self.draw.choice([{}, {"foreach": True}, {"foreach": False}])
        name = self.draw.choice(["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Adamax", "RAdam"])
        if name in {"AdamW", "Adam", "SGD"} and self.draw.random() < 0.3:
            kind = {"fused": True}
        momentum = {"momentum": 0.9} if name in {"SGD", "RMSprop"} and self.draw.random() < 0.6 else {}
        return lambda parameters: getattr(torch.optim, name)(parameters, lr=1e-2, **kind, **momentum)

    def batch(self) -> Any:
        """Return a batch in this program's structure."""
        size = self.batch_size or random.randint(3, 14)
        return self.packed(torch.randn(size, 24), torch.randint(0, 8, (size,)), random.random())

    def packed(self, x: Tensor, y: Tensor, share: float) -> Any:
        """Return these columns in this program's structure, with its noise."""
        if self.noise & 1:
            x = x + torch.tensor(np.random.randn(len(x), 24).astype("f")) * 0.1
        if self.noise & 2:
            x = x * random.uniform(0.5, 1.5)
        kinds = (
            (x, y),
            {"x": x, "y": y},
            UserDict(x=x, y=y),
            _Pair(x, y, share),
            SimpleNamespace(x=x, y=y),
            [[x], [y, share]],
        )
        return kinds[self.structure]

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch for this program's task."""
        if isinstance(batch, list):
            (x,), (y, share) = batch
        elif isinstance(batch, tuple):
            (x, y), share = batch, 1.0
        elif isinstance(batch, (dict, UserDict)):
            x, y, share = batch["x"], batch["y"], 1.0
        else:
            x, y, share = batch.x, batch.y, getattr(batch, "share", 1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.model(x)
        out = out.float()
        if self.task == 1:
            keep = out.detach().max(1)[0] > out.detach().mean()
            keep[0] = True
            out, y = out[keep], y[keep]
        elif self.task == 2:
            x = x.detach().requires_grad_()
            penalty = torch.autograd.grad(self.model.first(x).sin().sum(), x, create_graph=True)[0]
            return functional.cross_entropy(out, y) + penalty.square().mean() * share
        elif self.task == 3 and out.mean().item() > 0:
            out = out * 2 - out.detach().sort(0)[0]
        elif self.task == 4:
            order = torch.randperm(len(y))
            return share * functional.cross_entropy(out, y) + (1 - share) * functional.cross_entropy(out[order], y)
        return functional.cross_entropy(out, y) * share

    def step(self, number: int) -> None:
        """Train one step, then do what this program does between steps."""
        for _ in range(self.accumulate):
            loss = self.loss(self.batch())
            if loss.requires_grad:
                (loss / self.accumulate).backward()
            self.kept.append(loss.detach())
        if self.clip:
            gradients = [p for p in self.model.parameters() if p.grad is not None]
            self.kept.append(nn.utils.clip_grad_norm_(gradients, 1.0))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.zero_to_none)
        for habit in self.habits:
            if random.random() < 0.7:
                habit(self, number)

    def result(self) -> Any:
        """Return everything that is compared."""
        parts = [self.model, self.optimizer, *([self.average] if self.average is not None else [])]
        return state(*parts), self.kept, self.memory, random.random(), float(np.random.rand())


def _freezes(trainer: _Trainer, number: int) -> None:
    layer = random.choice([trainer.model.first, *trainer.model.layers])
    layer.requires_grad_(random.random() < 0.5)


def _clamps(trainer: _Trainer, number: int) -> None:
    for p in trainer.model.parameters():
        p.data.clamp_(-0.5, 0.5)


def _replaces(trainer: _Trainer, number: int) -> None:
    trainer.model.out.weight.data = trainer.model.out.weight.data + 0.01 * torch.randn_like(trainer.model.out.weight)


def _writes_through_numpy(trainer: _Trainer, number: int) -> None:
    trainer.model.first.weight.detach().numpy()[number % trainer.model.width] *= 0.5


def _averages(trainer: _Trainer, number: int) -> None:
    if trainer.average is None:
        return
    with torch.no_grad():
        for kept, p in zip(trainer.average.parameters(), trainer.model.parameters(), strict=True):
            kept.lerp_(p, 0.1)


def _evaluates(trainer: _Trainer, number: int) -> None:
    trainer.model.eval()
    with torch.no_grad() if random.random() < 0.5 else torch.inference_mode():
        trainer.kept.append(trainer.model(torch.randn(random.randint(1, 20), 24)).argmax(1).tolist())
    trainer.model.train()


def _saves_and_loads(trainer: _Trainer, number: int) -> None:
    buffer = io.BytesIO()
    torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, buffer)
    trainer.kept.append(len(buffer.getvalue()))
    loaded = torch.load(io.BytesIO(buffer.getvalue()))
    trainer.model.load_state_dict(loaded["model"], assign=False)
    trainer.optimizer.load_state_dict(loaded["optimizer"])


def _remembers(trainer: _Trainer, number: int) -> None:
    trainer.memory[torch.randint(0, len(trainer.memory), (7,))] = torch.randn(7, 24)
    chosen = trainer.memory[torch.randint(0, len(trainer.memory), (5,))]
    trainer.kept.append(chosen.unique(dim=0).sum(0))


def _copies(trainer: _Trainer, number: int) -> None:
    trainer.kept.append(copy.deepcopy(trainer.model.out).weight)


def _starts_the_optimizer_anew(trainer: _Trainer, number: int) -> None:
    trainer.optimizer = trainer.make_optimizer(list(trainer.model.parameters()))
    trainer.scheduler = None


def _keeps_activations(trainer: _Trainer, number: int) -> None:
    out = trainer.model(torch.randn(6, 24))
    trainer.kept.append(out if random.random() < 0.3 else out.detach())


def _reads_scalars(trainer: _Trainer, number: int) -> None:
    weight = trainer.model.first.weight
    row = int(weight.abs().sum(1).argmax())
    trainer.kept.append([row, weight[row, :3].tolist(), float(weight.std())])


def _resets_a_row(trainer: _Trainer, number: int) -> None:
    with torch.no_grad():
        nn.init.normal_(trainer.model.out.weight[number % 8], std=0.1)


def _draws_from_a_fork(trainer: _Trainer, number: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        trainer.kept.append(torch.rand(40))


_HABITS: tuple[Step, ...] = (
    _freezes, _clamps, _replaces, _writes_through_numpy, _averages, _evaluates, _saves_and_loads, _remembers, _copies,
    _starts_the_optimizer_anew, _keeps_activations, _reads_scalars, _resets_a_row, _draws_from_a_fork,
)  # fmt: skip


def _hook_forward(trainer: _Trainer) -> None:
    trainer.model.first.register_forward_hook(lambda module, args, out: out * 1.1 + 0.01 * torch.randn_like(out))


def _hook_gradient(trainer: _Trainer) -> None:
    trainer.model.out.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1) + 0.001 * torch.randn_like(grad))


def _hook_backward(trainer: _Trainer) -> None:
    trainer.model.out.register_full_backward_hook(lambda module, into, out: trainer.kept.append(out[0].norm()))


def _hook_saved(trainer: _Trainer) -> None:
    plain = trainer.loss

    def loss(batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda s: s[0]):
            return plain(batch)

    trainer.loss = loss  # type: ignore[method-assign]


def _hook_activations(trainer: _Trainer) -> None:
    trainer.model.out.register_forward_hook(lambda module, args, out: trainer.kept.append(args[0].detach()))


_HOOKS: tuple[Callable[[_Trainer], None], ...] = (
    _hook_forward,
    _hook_gradient,
    _hook_backward,
    _hook_saved,
    _hook_activations,
)


def seeds(first: int, count: int) -> Iterator[int]:
    """Give the seeds of a run."""
    yield from range(first, first + count)
