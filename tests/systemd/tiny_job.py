"""The small job of `make check-systemd`: light enough for an emulated processor, long enough to be interrupted."""

import torch

from port_planner.job import TrainingJob


def port_job() -> TrainingJob:
    """Return a two-layer classifier of random points with momentum in its optimizer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    points = torch.randn(512, 16)
    classes = points[:, :4].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network(x), y)

    return TrainingJob(model, loss, optimizer, (points, classes), batch_size=16, name="tiny")
