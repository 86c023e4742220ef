"""Sizes that images are brought to, and dimensions of transforms."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.ir.graph import GraphError, StepGraph
from port_planner.ir.operands.verify import verify_operands
from tests.planner.ir.operands.recorded_step import changed


@pytest.mark.parametrize("scale", [1e-45, 0.0, -1.0, float("nan"), float("inf"), 0.5, "1"])
def test_scales_that_contradict_the_sizes(graph: StepGraph, scale: float) -> None:
    name = "upsample_bilinear2d"
    fits = changed(graph, name, lambda op: replace(op, args=(*op.args[:3], 1.5, 1.5), kwargs=()))
    verify_operands(fits)
    with pytest.raises(GraphError, match=name):
        verify_operands(changed(graph, name, lambda op: replace(op, args=(*op.args[:3], scale, 1.5), kwargs=())))


@pytest.mark.parametrize(
    ("dims", "normalization", "fits"),
    [((1, 2), 1, True), ((2,), 0, True), ((2, 2), 0, False), ((3,), 0, False), ((), 0, False), ((2,), 7, False)],
)
def test_fourier_dimensions_are_there_once(dims: tuple[int, ...], normalization: int, fits: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x * self.weight, dim=-1).real.square().sum()

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: m(x), optimizer, (torch.randn(2, 4, 6),)).graphs["step"]
    wrong = changed(graph, "_fft_c2c", lambda op: replace(op, args=(op.args[0], dims, normalization, True)))
    with contextlib.nullcontext() if fits else pytest.raises(GraphError, match="_fft_c2c"):
        verify_operands(wrong)
