"""A network of every kind of layer, and sets of its parameters to train."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Convolutions with norms, a residual sum, an embedding of the pooled features and a tied pair of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.groups = nn.GroupNorm(2, 8)
        self.down = nn.Linear(8 * 36, 16)
        self.layer = nn.LayerNorm(16)
        self.up = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.up.weight
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = functional.max_pool2d(h + torch.tanh(self.groups(self.body(h))), 2)
        h = torch.sigmoid(self.layer(self.down(h.flatten(1))))
        out: torch.Tensor = self.head(torch.relu(self.again(torch.relu(self.up(h)))))
        return out


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def sets(count: int) -> list[frozenset[str]]:
    names = [name for name, _ in Residual().named_parameters()]
    rng = random.Random(3)
    return [frozenset(rng.sample(names, rng.randrange(1, len(names)))) for _ in range(count)]
