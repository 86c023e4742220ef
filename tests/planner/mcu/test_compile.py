"""Compiling over a budget says by how much."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.compile import calibration_samples, compile_model, compile_quantized
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, McuCompileError
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.quantize import quantize
from port_planner.mcu.zoo import DigitsNet


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_module(DigitsNet().eval(), (1, 8, 8), "digits")


@pytest.mark.slow
def test_compiling_over_budget_says_by_how_much(graph: Graph) -> None:
    model = quantize(graph, np.random.default_rng(0).random((4, 1, 8, 8), np.float32))
    needed = compile_quantized(model).ram_bytes
    with pytest.raises(ArenaBudgetError) as raised:
        compile_quantized(model, budget=needed // 2)
    assert raised.value.needed_bytes == needed
    assert compile_quantized(model, budget=needed).ram_bytes == needed
    assert compile_quantized(model, budget=needed - 1).ram_bytes < needed, "an operator runs again"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((0, 1, 8, 8)), r"calibration: an array of shape \[0, 1, 8, 8\]"),
        (np.zeros(8), "give samples as"),
        (np.full((2, 3), np.inf), "6 of 6 values are NaN or infinite"),
        (np.zeros((2, 3), complex), "values of type complex128"),
    ],
)
def test_calibration_that_is_no_samples_is_refused(data: np.ndarray, message: str) -> None:
    with pytest.raises(McuCompileError, match=message):
        calibration_samples(data)


def test_one_output_is_for_inference_only() -> None:
    module, data = nn.Sequential(nn.Linear(3, 1)), np.random.default_rng(0).random((4, 3), np.float32)
    with pytest.raises(McuCompileError, match="one output cannot be trained"):
        compile_model(module, data)
    assert compile_model(module, data, scheme=SparseScheme({})).memory.parameters.size_bytes == 0
