"""Every optimizer of torch.optim in each of its implementations, schedulers, and common code around a step."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square

FEATURES = Features("optimizers")

_LINEAR_ONLY = {"Muon"}  # takes matrices alone
_OWN_PROGRAM = {"LBFGS", "SparseAdam", "Optimizer"}

_VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "for_loop": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "amsgrad_foreach": {"amsgrad": True, "foreach": True},
    "amsgrad_fused": {"amsgrad": True, "fused": True},
    "decayed_foreach": {"weight_decay": 0.1, "foreach": True},
    "momentum": {"momentum": 0.9},
    "momentum_foreach": {"momentum": 0.9, "foreach": True},
    "momentum_fused": {"momentum": 0.9, "fused": True},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "centered": {"centered": True},
    "centered_foreach": {"centered": True, "foreach": True},
    "tensor_rate": {"lr": torch.tensor(1e-3), "foreach": False},
}
_HAVE_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}


def _takes(name: str, variant: dict[str, Any]) -> bool:
    if variant.get("fused") and name not in _HAVE_FUSED:
        return False
    if "lr" in variant and name not in {"Adam", "AdamW"}:
        return False
    return set(variant) <= set(inspect.signature(getattr(torch.optim, name).__init__).parameters)


def _steps(name: str, options: dict[str, Any]) -> Any:
    model = perceptron(bias=name not in _LINEAR_ONLY)
    return learn(model, classify, lambda p: getattr(torch.optim, name)(p, **options))


def _all() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in sorted(torch.optim.__all__):
        found = getattr(torch.optim, name, None)
        if not inspect.isclass(found) or not issubclass(found, torch.optim.Optimizer) or name in _OWN_PROGRAM:
            continue
        for variant, options in _VARIANTS.items():
            if _takes(name, options):
                yield name, options, variant


for _name, _options, _variant in _all():
    FEATURES.named(f"{_name}_{_variant}", partial(_steps, _name, _options))


def _searches(line_search: str | None) -> Any:
    model, x, y = perceptron(nn.Tanh()), rows(), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn=line_search)
    training_begins()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)], state(model, optimizer)


FEATURES.named("LBFGS", partial(_searches, None))
FEATURES.named("LBFGS_strong_wolfe", partial(_searches, "strong_wolfe"))


@FEATURES.add
def SparseAdam() -> Any:
    model = nn.Embedding(800, 16, sparse=True)
    return learn(model, lambda m: square(m(torch.randint(0, 800, (40,)))), torch.optim.SparseAdam)


@FEATURES.add
def two_optimizers_of_one_model() -> Any:
    model = nn.ModuleDict({"words": nn.Embedding(400, 32, sparse=True), "out": nn.Linear(32, 8)})
    sparse, dense = torch.optim.SparseAdam(model["words"].parameters()), torch.optim.Adam(model["out"].parameters())
    training_begins()
    for _ in range(4):
        square(model["out"](model["words"](torch.randint(0, 400, (20,))))).backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return state(model, sparse, dense)


_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "cosine_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "linear_then_polynomial": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.PolynomialLR(o, 4)], [2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


def _scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    training_begins()
    for _ in range(5):
        classify(model).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
    return state(model, optimizer), scheduler.state_dict()


for _name, _scheduler in _SCHEDULERS.items():
    FEATURES.named(f"schedule_{_name}", partial(_scheduled, _scheduler))


@FEATURES.add
def reduce_on_plateau() -> Any:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(5):
        loss = classify(model)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return state(model, optimizer)


def _clipped(clip: Callable[[Iterable[Tensor]], Any]) -> Any:
    model, norms = perceptron(), []
    optimizer = torch.optim.AdamW(model.parameters())
    training_begins()
    for step in range(6):
        classify(model).backward()
        if step % 2:
            norms.append(clip(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return norms, state(model, optimizer)


FEATURES.named("clip_norm", partial(_clipped, lambda p: nn.utils.clip_grad_norm_(p, 0.1)))
FEATURES.named("clip_norm_foreach", partial(_clipped, lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True)))
FEATURES.named(
    "clip_norm_infinite", partial(_clipped, lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")))
)
FEATURES.named("clip_value", partial(_clipped, lambda p: nn.utils.clip_grad_value_(p, 0.01)))


@FEATURES.add
def weight_averaging() -> Any:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    averaged = swa_utils.AveragedModel(model)
    result = learn(model, classify, after=lambda step: averaged.update_parameters(model))
    swa_utils.update_bn([rows() for _ in range(3)], averaged)
    return result, state(averaged)


@FEATURES.add
def exponential_average_foreach() -> Any:
    model = perceptron()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    return learn(model, classify, after=lambda step: averaged.update_parameters(model)), state(averaged)


@FEATURES.add
def parameter_groups_added_later() -> Any:
    model = perceptron()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.01})
        classify(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model, optimizer)


@FEATURES.add
def state_loaded_into_another_optimizer() -> Any:
    model = perceptron()
    first = torch.optim.AdamW(model.parameters())
    classify(model).backward()
    first.step()
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second.load_state_dict(first.state_dict())
    classify(model).backward()
    second.step()
    return state(model, first, second)


@FEATURES.add
def differentiable_step() -> Any:
    weights = nn.Parameter(torch.randn(64, 64))
    inner = weights.clone()
    optimizer = torch.optim.SGD([inner], lr=0.1, differentiable=True)
    inner.retain_grad()
    inner.grad = torch.autograd.grad(inner.square().sum(), inner, create_graph=True)[0]
    optimizer.step()
    inner.sin().sum().backward()
    return weights.grad, weights


@FEATURES.add
def step_with_closure() -> Any:
    model = perceptron()
    optimizer = torch.optim.Rprop(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = classify(model)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(4)], state(model, optimizer)


@FEATURES.add
def written_by_hand() -> Any:
    model = perceptron()
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    training_begins()
    for _ in range(5):
        model.zero_grad()
        classify(model).backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), momentum, strict=True):
                m.mul_(0.9).add_(p.grad)
                p.sub_(m, alpha=0.05)
    return momentum, state(model)


@FEATURES.add
def written_by_hand_through_data() -> Any:
    model = perceptron()
    training_begins()
    for _ in range(5):
        classify(model).backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.05)
            p.grad.data.zero_()
    return state(model)


@FEATURES.add
def optimizer_of_ones_own() -> Any:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    kept = self.state[p].setdefault("average", torch.zeros_like(p))
                    kept.lerp_(p.grad, 0.1)
                    p.add_(kept.sign(), alpha=-group["lr"])

    return learn(perceptron(), classify, Signs)
