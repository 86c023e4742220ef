"""Functions of one value: every one that is a table is imported as it is, and what reads more is none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from port_planner.mcu.elementwise import MODULES, module_function, node_function
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, McuCompileError, OpKind
from port_planner.mcu.quantize import quantize

SAMPLES = np.linspace(-3, 3, 96, dtype=np.float32).reshape(4, 1, 24)


class Applied(nn.Module):
    """A function of the samples, and a head."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.function(x).flatten(1))
        return logits


def imported(function: Callable[[torch.Tensor], torch.Tensor]) -> Graph:
    return import_module(Applied(function), (1, 24), samples=torch.from_numpy(SAMPLES))


FUNCTIONS: tuple[Callable[[Any], torch.Tensor], ...] = (
    *(module() for module in MODULES), nn.Hardswish(inplace=True), torch.abs, torch.square, F.silu, F.mish,
    lambda x: x * x, lambda x: 1 - x, lambda x: x / 3, lambda x: x**2, lambda x: x.clamp(-1, 0.5), lambda x: -x,
    lambda x: x.tanh_(), lambda x: F.leaky_relu(x, negative_slope=0.2, inplace=True), lambda x: torch.add(x, 2, alpha=3),
    lambda x: F.gelu(x, approximate="tanh"),
)  # fmt: skip


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_a_table_holds_values_and_derivatives_of_the_function(index: int) -> None:
    """Beside differences of the function itself, which know nothing of autograd or of codes."""
    graph = imported(FUNCTIONS[index])
    assert [op.kind for op in graph.ops] == [OpKind.TABLE, OpKind.CLASSIFIER]
    op = quantize(graph, SAMPLES[:, :, None]).ops[0]
    assert op.table is not None and op.slope is not None
    reals = torch.arange(-128, 128).sub(op.inputs[0].zero).double() * float(op.inputs[0].scale)

    def wanted(shift: float) -> torch.Tensor:
        return FUNCTIONS[index]((reals + shift).clone())

    scale, held = float(op.output.scale), torch.from_numpy(np.abs(op.table.astype(np.int64)) < 127)
    values = (torch.from_numpy(op.table.astype(np.float64)) - op.output.zero) * scale
    assert float((values - wanted(0))[held].abs().max()) <= 0.5001 * scale
    right, left = (wanted(1e-6) - wanted(0)) / 1e-6, (wanted(0) - wanted(-1e-6)) / 1e-6
    smooth = held & ((right - left).abs() < 1e-3)
    assert int(smooth.sum()) > 60
    assert float((torch.from_numpy(op.slope).double() - (right + left) / 2)[smooth].abs().max()) < 1e-3


def test_a_function_without_a_value_is_refused() -> None:
    """At a code that calibration did not have: the range of the samples begins at 0."""
    samples = np.abs(SAMPLES) + 1
    graph = import_module(Applied(lambda x: x**-0.5), (1, 24), samples=torch.from_numpy(samples))
    with pytest.raises(
        McuCompileError, match="pow_1: has no value or derivative at 0; restrict its input to where both exist"
    ):
        quantize(graph, samples[:, :, None])


def test_what_reads_two_tensors_is_no_tabulated_function_one() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    assert node_function(graph.call_function(operator.mul, (first, second)), "mul") is None
    assert node_function(graph.call_function(torch.softmax, (first, 1)), "softmax") is None
    assert node_function(graph.call_function(operator.mul, (first, first)), "mul") is not None
    assert module_function(nn.Softmax(1)) is None
