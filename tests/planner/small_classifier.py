"""A small classifier and its batch, to be captured."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def net() -> nn.Module:
    """Return a network with running statistics and dropout, from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return six rows [6, 8] and their classes [6]."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return functional.cross_entropy(model(x), y)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return an SGD over the model."""
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
