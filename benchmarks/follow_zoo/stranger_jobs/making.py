"""How jobs are named and collected, and the small job that most of them change in one place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from port_planner.job import TrainingJob

ROWS, BATCH, WIDTH, CLASSES = 44, 8, 16, 5
"""Those of a job; its epochs end with a short batch."""

JobMaker = Callable[[], TrainingJob]


@dataclass
class Jobs:
    """The jobs about one subject."""

    subject: str
    makers: dict[str, JobMaker] = field(default_factory=dict)

    def add(self, make: JobMaker) -> JobMaker:
        """Register a function under its own name; for use as a decorator."""
        return self.named(make.__name__, make)

    def named(self, name: str, make: JobMaker) -> JobMaker:
        """Register what makes a job. Raises ValueError for a name that is taken."""
        if name in self.makers:
            raise ValueError(f"two jobs are called {self.subject}/{name}")
        self.makers[name] = make
        return make


def perceptron(wide: int = WIDTH, out: int = CLASSES) -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(wide, 24), nn.Tanh(), nn.Linear(24, out))


def rows(*shape: int) -> Tensor:
    """Return as many samples of this shape as a job has."""
    return torch.randn(ROWS, *shape)


def targets(classes: int = CLASSES) -> Tensor:
    """Return a class for each sample."""
    return torch.randint(0, classes, (ROWS,))


def job(
    model: nn.Module,
    loss: Callable[..., Any],
    data: Sequence[Tensor] = (),
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> TrainingJob:
    """Return a job, by default of samples with classes and of SGD with momentum."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
    return TrainingJob(model, loss, optimizer, data or (rows(WIDTH), targets()), BATCH, **settings)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of most jobs."""
    return functional.cross_entropy(model(x), y)
