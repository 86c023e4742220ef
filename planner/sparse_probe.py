"""Score a set of trained parameters by training only these for a short while: the `measure` of planner.sparse_update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Takes the module and one batch, returns the scalar loss."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingProbe:
    """Measures parameter names by plain SGD over `train_batches`, once each; the module is left as it was found.

    The score is the negative mean loss over `eval_batches`: higher is better. Call it with the names to train, as
    `named_parameters` gives them.
    """

    module: nn.Module
    loss: LossFunction
    train_batches: Sequence[Any]
    eval_batches: Sequence[Any]
    learning_rate: float

    def __call__(self, names: frozenset[str]) -> float:
        saved = {key: value.clone() for key, value in self.module.state_dict().items()}
        needed_grad = {name: parameter.requires_grad for name, parameter in self.module.named_parameters()}
        try:
            self._train(names)
            return self._score()
        finally:
            self.module.load_state_dict(saved)
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(needed_grad[name])

    def _train(self, names: frozenset[str]) -> None:
        chosen = []
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in names)
            if name in names:
                chosen.append(parameter)
        for batch in self.train_batches if chosen else ():
            gradients = torch.autograd.grad(self.loss(self.module, batch), chosen, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(chosen, gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=self.learning_rate)

    def _score(self) -> float:
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = [float(self.loss(self.module, batch)) for batch in self.eval_batches]
        finally:
            self.module.train(was_training)
        return -sum(losses) / max(1, len(losses))
