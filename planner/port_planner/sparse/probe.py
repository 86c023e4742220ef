"""Score a set of trained parameters by training only these for a short time.

This is the `measure` of port_planner.sparse.choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from port_planner.column_file import as_column
from port_planner.ir.bundle.data_order import batch_rows, epoch_order
from port_planner.ir.lowering import optimizer_scalars
from port_planner.ir.torch_device import generator_states, kinds_of, restore_generators
from port_planner.job import TrainingJob

LossFunction = Callable[[nn.Module, Any], Any]
"""Takes the module and one batch, returns the scalar loss, or a pair of it and a one-element metric."""

OptimizerMaker = Callable[[frozenset[str]], torch.optim.Optimizer]
"""Creates a new optimizer over the parameters with these names."""

EVAL_BATCHES = 16
HELD_OUT = 5
"""Divisor of the number of samples: without evaluation data, one in this many is held out from the
probes' training for evaluation.
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Mean loss over the evaluation batches, and mean metric if the loss function returns one."""

    loss: float
    metric: float | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingProbe:
    """Trains sets of parameters for `train_batches`, each set once.

    Module and generator are restored afterwards.

    The score is the negative mean loss over `eval_batches`: higher is better. Call it with the names to train, as
    `named_parameters` gives them. `results` contains the result of every set.
    """

    module: nn.Module
    loss: LossFunction
    train_batches: Sequence[Any]
    eval_batches: Sequence[Any]
    optimizer: OptimizerMaker
    seed: int = 0
    results: dict[frozenset[str], ProbeResult] = field(default_factory=dict)

    def __call__(self, names: frozenset[str]) -> float:
        if names not in self.results:
            self.results[names] = self._measure(names)
        return -self.results[names].loss

    def _measure(self, names: frozenset[str]) -> ProbeResult:
        saved = {key: value.clone() for key, value in self.module.state_dict().items()}
        needed_grad = {name: parameter.requires_grad for name, parameter in self.module.named_parameters()}
        generators = generator_states(kinds_of(self.module.parameters()))
        try:
            torch.manual_seed(self.seed)
            self._train(names)
            return self._judge()
        finally:
            restore_generators(generators)
            self.module.load_state_dict(saved)
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(needed_grad[name])
                parameter.grad = None

    def _train(self, names: frozenset[str]) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in names)
        if not names:
            return
        optimizer = self.optimizer(names)
        for batch in self.train_batches:
            optimizer.zero_grad()
            loss, _ = _loss_and_metric(self.loss(self.module, batch))
            if loss.requires_grad:
                loss.backward()
                optimizer.step()

    def _judge(self) -> ProbeResult:
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                results = [_loss_and_metric(self.loss(self.module, batch)) for batch in self.eval_batches]
        finally:
            self.module.train(was_training)
        count = max(1, len(results))
        metrics = [metric for _, metric in results if metric is not None]
        metric = sum(metrics) / len(metrics) if metrics else None
        return ProbeResult(sum(float(loss) for loss, _ in results) / count, metric)


def _loss_and_metric(result: Any) -> tuple[torch.Tensor, float | None]:
    if not isinstance(result, tuple):
        return result, None
    loss, metric = result
    single = isinstance(metric, torch.Tensor) and metric.numel() == 1
    return loss, float(metric.detach()) if single else None


def job_probe(job: TrainingJob, steps: int) -> TrainingProbe:
    """Return a probe that trains the job's model with the job's own optimizer for `steps` batches.

    It judges by the job's evaluation data, or else by a fifth of the training data, which is then not used for
    training. Batches are moved to the model's device.
    """
    where = next(job.model.parameters()).device
    data = [as_column(column) for column in job.data]
    judged = [as_column(column) for column in job.eval_data] or data
    order = epoch_order(job.seed, 0, len(data[0]))
    held = 0 if job.eval_data or len(order) == 1 else max(1, len(order) // HELD_OUT)
    trained = order[held:]
    eval_order = order[:held] if held else torch.arange(len(judged[0]))
    batches = batch_rows(job.seed, len(trained), job.batch_size, drop_last=False)
    rows = [trained[next(batches)[1]] for _ in range(steps)]
    spec = optimizer_scalars.describe_optimizer(job.optimizer)
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    groups = [[(names[p], p) for p in group["params"] if p in names] for group in job.optimizer.param_groups]

    def make(chosen: frozenset[str]) -> torch.optim.Optimizer:
        return optimizer_scalars.build_optimizer(spec, [[p for name, p in group if name in chosen] for group in groups])

    return TrainingProbe(
        job.model,
        lambda model, batch: job.loss_fn(model, *(column[batch[1]].to(where) for column in batch[0])),
        [(data, part) for part in rows],
        [(judged, part) for part in eval_order.split(job.batch_size)[:EVAL_BATCHES]],
        make,
        job.seed,
    )
