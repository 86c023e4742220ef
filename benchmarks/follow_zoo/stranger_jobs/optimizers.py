"""Optimizers and schedules that people use."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from benchmarks.follow_zoo.stranger_jobs.making import Jobs, classify, job, perceptron
from port_planner.job import TrainingJob

JOBS = Jobs("optimizers")

_OF_TORCH: dict[str, Callable[[Iterable[Tensor]], optim.Optimizer]] = {
    "sgd_nesterov_decayed": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampened_maximized": lambda p: optim.SGD(p, 0.01, momentum=0.9, dampening=0.1, maximize=True),
    "adam_amsgrad": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
    "adamw_in_one_kernel": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "adamw_for_each": lambda p: optim.AdamW(p, 1e-2, foreach=True),
    "adamw_rate_in_a_tensor": lambda p: optim.AdamW(p, torch.tensor(1e-2), foreach=False),
    "nadam": lambda p: optim.NAdam(p, 1e-2),
    "radam": lambda p: optim.RAdam(p, 1e-2),
    "adamax": lambda p: optim.Adamax(p, 1e-2),
    "adagrad_decayed": lambda p: optim.Adagrad(p, 0.05, lr_decay=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "rmsprop_centred": lambda p: optim.RMSprop(p, 1e-3, centered=True, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p, 1e-3),
    "averaged_sgd": lambda p: optim.ASGD(p, 0.05),
    "adafactor": lambda p: optim.Adafactor(p),
    "lbfgs": lambda p: optim.LBFGS(p, 0.1),
    "muon": lambda p: optim.Muon([one for one in p if one.dim() == 2], 1e-2),
}


def _with(make: Callable[[Iterable[Tensor]], optim.Optimizer], **settings: Any) -> TrainingJob:
    model = perceptron()
    return job(model, classify, optimizer=make(list(model.parameters())), **settings)


for _name, _maker in _OF_TORCH.items():
    JOBS.named(_name, lambda maker=_maker: _with(maker))  # type: ignore[misc]

_SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "steps": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "cosine_again": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=400),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=6),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 30, 2.0),
    "in_sequence": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, 0.1, 1, 5), lr_scheduler.ExponentialLR(o, 0.95)], [5]),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.97)]),
    "by_a_function": lambda o: lr_scheduler.LambdaLR(o, lambda n: min((n + 1) / 10, 1 / math.sqrt(n + 1))),
    "at_a_plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.5),
}  # fmt: skip


def _scheduled(schedule: Callable[[optim.Optimizer], Any]) -> TrainingJob:
    model = perceptron()
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return job(model, classify, optimizer=optimizer, scheduler=schedule(optimizer))


for _name, _schedule in _SCHEDULES.items():
    JOBS.named(_name, lambda schedule=_schedule: _scheduled(schedule))  # type: ignore[misc]


@JOBS.add
def groups_with_rates_of_their_own() -> TrainingJob:
    model = perceptron()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "weight_decay": 0.0}]
    return job(model, classify, optimizer=optim.AdamW(groups, 1e-2), clip_grad_norm=0.5)


@JOBS.add
def accumulated_and_clipped() -> TrainingJob:
    return _with(lambda p: optim.Adam(p, 1e-2), accumulate=3, clip_grad_norm=0.1)


class _Own(optim.Optimizer):
    """An optimizer of the program itself; `update` gets a parameter, its gradient, its state and the group."""

    def __init__(self, parameters: Iterable[Tensor], update: Callable[..., None], **defaults: Any) -> None:
        super().__init__(parameters, defaults)
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group)


def _lion(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    p.mul_(1 - group["lr"] * 0.1).add_(m.lerp(g, 0.1).sign_(), alpha=-group["lr"])
    m.lerp_(g, 0.01)


def _larger_layers_less(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    trust = p.norm() / (g.norm() + 1e-6)
    p.sub_(group["lr"] * trust.clamp(max=10) * g)


def _centred_gradients(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.sub_(group["lr"] * (g - g.mean(0, keepdim=True) if g.dim() > 1 else g))


def _slow_weights(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    slow = state.setdefault("slow", p.clone())
    state["n"] = state.get("n", 0) + 1
    p.sub_(group["lr"] * g)
    if state["n"] % 5 == 0:
        slow.lerp_(p, 0.5)
        p.copy_(slow)


def _free_of_a_schedule(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    z = state.setdefault("z", p.clone())
    state["n"] = state.get("n", 0) + 1
    z.sub_(group["lr"] * g)
    p.lerp_(z, 1 / state["n"])


def _average_beside(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    average = state.setdefault("average", p.clone())
    p.sub_(group["lr"] * g)
    average.lerp_(p, 0.1)


def _orthogonalized(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    if g.dim() < 2:
        p.sub_(group["lr"] * g)
        return
    x = g / (g.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    p.sub_(group["lr"] * x)


def _noisy(p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    p.sub_(group["lr"] * g).add_(torch.randn_like(p), alpha=1e-3)


_UPDATES = (_lion, _larger_layers_less, _centred_gradients, _slow_weights, _free_of_a_schedule, _average_beside, _orthogonalized, _noisy)  # fmt: skip

for _update in _UPDATES:
    JOBS.named(f"own{_update.__name__}", lambda update=_update: _with(lambda p: _Own(p, update, lr=0.01)))  # type: ignore[misc]


@JOBS.add
def state_that_is_there_already() -> TrainingJob:
    made = _with(lambda p: optim.Adam(p, 1e-2))
    for _ in range(3):
        classify(made.model, made.data[0][:8], made.data[1][:8]).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    return made


@JOBS.add
def clipped_by_value_in_a_hook() -> TrainingJob:
    made = _with(lambda p: optim.SGD(p, 0.05))
    for parameter in made.model.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return made


@JOBS.add
def hook_on_the_optimizer() -> TrainingJob:
    made = _with(lambda p: optim.SGD(p, 0.05))
    average = copy.deepcopy(made.model)

    def follow(*_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), made.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    made.optimizer.register_step_post_hook(follow)
    return made


@JOBS.add
def weights_clipped_in_a_hook() -> TrainingJob:
    made = _with(lambda p: optim.RMSprop(p, 0.01))

    def clip(*_: Any) -> None:
        for parameter in made.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    made.optimizer.register_step_post_hook(clip)
    return made


@JOBS.add
def only_the_head() -> TrainingJob:
    model = nn.Sequential(*perceptron())
    model[0].requires_grad_(False)
    return job(model, classify, optimizer=optim.SGD(model[2].parameters(), 0.05))
