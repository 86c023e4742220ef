"""How features are named and collected, and the small training loop that most of them share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.compare import Program, state, training_begins

STEPS = 4
ROWS = 16
WIDTH = 32
CLASSES = 8

LossOf = Callable[[nn.Module], Tensor]


@dataclass
class Features:
    """The programs about one subject."""

    subject: str
    programs: dict[str, Program] = field(default_factory=dict)

    def add(self, program: Program) -> Program:
        """Register a function under its own name; for use as a decorator."""
        return self.named(program.__name__, program)

    def named(self, name: str, program: Program) -> Program:
        """Register a program. Raises ValueError for a name that is taken."""
        if name in self.programs:
            raise ValueError(f"two features are called {self.subject}/{name}")
        self.programs[name] = program
        return program


def learn(
    model: nn.Module,
    loss_of: LossOf,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
    steps: int = STEPS,
    after: Callable[[int], None] = lambda step: None,
) -> Any:
    """Train a model on the loss that `loss_of` returns in each step; return losses and state. `after` ends a step."""
    make = make_optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    training_begins()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        after(step)
        losses.append(loss.item())
    return losses, state(model, optimizer)


def perceptron(*between: nn.Module, inputs: int = WIDTH, outputs: int = CLASSES, bias: bool = True) -> nn.Sequential:
    """Return a network of two layers with `between` in the middle (default: ReLU and dropout)."""
    middle = between or (nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(nn.Linear(inputs, 48, bias=bias), *middle, nn.Linear(48, outputs, bias=bias))


def rows(width: int = WIDTH, count: int = ROWS) -> Tensor:
    """Return random rows."""
    return torch.randn(count, width)


def targets(count: int = ROWS) -> Tensor:
    """Return random classes."""
    return torch.randint(0, CLASSES, (count,))


def classify(model: nn.Module) -> Tensor:
    """Return the cross entropy of random rows and random classes."""
    return nn.functional.cross_entropy(model(rows()), targets())


def square(output: Any) -> Tensor:
    """Return the mean of squares of all tensors of an output."""
    parts = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.abs() if t.is_complex() else t).float().square().mean() for t in parts]).sum()
