"""Captured steps of a tiny model, for tests that need a real graph but no training."""

import functools

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import Capture, capture_step
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost
from port_planner.ir.graph import StepGraph

torch.set_num_threads(1)


@functools.cache
def tiny_step(optimizer: str = "AdamW", rows: int = 4) -> Capture:
    """Return the capture of a convolutional network of 15 kB, trained on batches of `rows` images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, 3, 12, 12), torch.randint(0, 10, (rows,))
    return capture_step(model, lambda m, x, y: functional.cross_entropy(m(x), y), made, batch)


@functools.cache
def wide_step() -> StepGraph:
    """Return the step of a network of wide layers with momentum, 32 MB: large enough to be planned in stages."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(512, 1024), torch.randint(0, 16, (512,))
    loss = lambda m, x, y: functional.cross_entropy(m(x), y)  # noqa: E731
    return capture_step(model, loss, optimizer, batch).graphs["step"]


def costs_of(graph: StepGraph, *, base: int = 0, workspace: int = 0) -> CostTable:
    """Return costs under which every op takes 0.1 ms, on a slow card."""
    flash = Flash("card", 1e8, 5e7, 1e-4, 1e-9, 1e-9)
    device = DeviceCosts("test", base, 1.0, 1.0, flash)
    return CostTable(device, tuple(OpCost(1e-4, workspace * (i % 3), 1e-4) for i in range(len(graph.ops))))
