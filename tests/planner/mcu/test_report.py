"""The figures of a report: bytes of the tables, estimates that add up to the plan's, errors that int8 explains."""

from __future__ import annotations

import re

import numpy as np
import pytest

from port_planner.mcu.autodiff import SparseScheme, last_layers
from port_planner.mcu.compile import CompiledModel, compile_model, compile_quantized
from port_planner.mcu.core_costs import core_costs, row_seconds
from port_planner.mcu.report import layer_figures
from tests.planner.mcu.networks import Build, every_layer, recurrent

pytestmark = pytest.mark.process

CORE = core_costs("nrf52840")


@pytest.fixture(scope="module", params=[every_layer, recurrent])
def model(request: pytest.FixtureRequest) -> tuple[CompiledModel, np.ndarray]:
    build: Build = request.param
    module, data = build(6)
    whole = compile_model(module, data)
    return compile_quantized(whole.quantized, scheme=last_layers(whole.quantized.graph, 2)), data


def test_figures_are_those_of_the_tables_and_the_plan(model: tuple[CompiledModel, np.ndarray]) -> None:
    compiled, data = model
    found = layer_figures(compiled, data, [CORE])
    assert [layer.name for layer in found] == [op.name for op in compiled.quantized.graph.ops]
    assert sum(layer.macs for layer in found) == compiled.quantized.graph.macs
    inference = compile_quantized(compiled.quantized, scheme=SparseScheme({})).generated.source
    arrays = re.findall(r"static const (\w+) (?:weight|bias|multiplier|shift|scale)_\w+\[(\d+)\]", inference)
    sizes = {"int8_t": 1, "uint8_t": 1, "int32_t": 4, "float": 4}
    head = found[-1]  # its logits are not requantised: no multiplier and no shift
    unused = 5 * compiled.quantized.graph.classes
    assert sum(layer.flash_bytes for layer in found) - unused == sum(sizes[kind] * int(n) for kind, n in arrays)
    assert (
        sum(layer.parameter_bytes for layer in found)
        <= compiled.memory.parameters.size_bytes
        < 8 + sum(layer.parameter_bytes for layer in found)
    )
    rows = (row_seconds(compiled.quantized.graph, compiled.scheme, CORE, row) for row in compiled.memory.rows)
    assert sum(layer.costs["nrf52840"].trained_seconds for layer in found) == pytest.approx(sum(rows))
    assert head.costs["nrf52840"].trained_joules > head.costs["nrf52840"].joules > 0


def test_errors_are_those_of_int8_and_grow_where_values_are_clipped(model: tuple[CompiledModel, np.ndarray]) -> None:
    compiled, data = model
    for layer in layer_figures(compiled, data, []):
        assert 0 < layer.error < 0.1 and layer.clipped == 0, layer
    worse = layer_figures(compiled, 30 * data, [])
    assert worse[0].clipped > 0.1 or worse[0].error > 0.5
