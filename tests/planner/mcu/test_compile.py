"""Compiling over a budget says by how much."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu.compile import compile_quantized
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph
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
