"""A small job whose model has a tied weight, a head that no loss reaches and a buffer that is not saved."""

from typing import Any

import torch
from torch import nn

from port_planner.job import TrainingJob

ROWS = 10


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    squares: torch.Tensor = ((model(x) - y) ** 2).mean()
    return squares


class Tied(nn.Module):
    """A weight under two names, a head that no loss reaches, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.spare = nn.Linear(4, 1)
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x) * self.hidden)
        return result


def job(schedule: Any = None, **changes: Any) -> TrainingJob:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"data": [torch.randn(ROWS, 4), torch.randn(ROWS, 4)], "batch_size": 4, **changes}
    scheduler = None if schedule is None else schedule(optimizer)
    return TrainingJob(model, loss, optimizer, scheduler=scheduler, **settings)
