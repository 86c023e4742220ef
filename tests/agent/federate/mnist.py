"""A small CNN on digits: the script of each device of `tests/agent/peers/test_federation.py`,
PART says which has what.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from port_planner.job import TrainingJob

MNIST = Path(__file__).resolve().parents[3] / "../shared/data/mnist_train9k_test10k.npz"
"""Beside the checkout: nobody says under which terms it may be passed on."""
DIGITS = ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
"""What each device has all of; of the others it has a few."""
_FEW = 0.2


class Cnn(nn.Module):
    """Two convolutions and a classifier, 12,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (batch, 1, 28, 28) -> (batch, 10)."""
        seen = functional.relu(self.two(functional.relu(self.one(images))))
        logits: torch.Tensor = self.head(seen.flatten(1))
        return logits


def _digits(what: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(MNIST) as archive:
        images, labels = archive[f"{what}_images"], archive[f"{what}_labels"]
    return torch.from_numpy(images).float().div(255).unsqueeze(1), torch.from_numpy(labels).long()


def digits_test() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 10,000 digits that nobody trains on."""
    return _digits("test")


def digits_of(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a device has: no digit is on two, and `pooled` has all of them."""
    images, labels = _digits("train")
    numbers = torch.Generator().manual_seed(9)
    home = torch.tensor([next(k for k, own in enumerate(DIGITS) if digit in own) for digit in range(10)])[labels]
    strays = torch.rand(len(labels), generator=numbers) < _FEW
    home[strays] = torch.randint(len(DIGITS), (int(strays.sum()),), generator=numbers)
    mine = torch.ones_like(strays) if part == "pooled" else home == int(part)
    return images[mine], labels[mine]


def loss_fn(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy."""
    return functional.cross_entropy(model(images), labels)


def port_job() -> TrainingJob:
    """What `port-agent plan` calls."""
    model = Cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return TrainingJob(model, loss_fn, optimizer, digits_of(os.environ["PART"]), 32, name="digits")
