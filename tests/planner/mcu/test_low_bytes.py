"""Low bytes within a budget: as many layers have them as fit, those with most weights go without, to the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu import HostEngine, UpdateOptions, UpdateRounding, compile_model, compile_quantized
from port_planner.mcu.choose_plan import FitOptions, fit_memory
from port_planner.mcu.compile import recompile
from port_planner.mcu.low_bytes import fit_low_bytes
from port_planner.mcu.memory import ArenaBudgetError
from port_planner.mcu.page_costs import PageMedium
from tests.planner.mcu.networks import hidden_linear

PAGED = PageMedium.PSRAM


@pytest.mark.slow
def test_as_few_layers_as_possible_lose_their_low_bytes_and_the_largest_first() -> None:
    module, data = hidden_linear()
    wide = compile_model(module, data, q88=True)
    graph, narrow = wide.quantized.graph, compile_quantized(wide.quantized)
    largest = sorted(graph.weighted(), key=lambda op: -op.weight_count)
    for count in range(len(largest) + 1):
        dropped = {op.name for op in largest[:count]}
        budget = compile_quantized(wide.quantized, scheme=wide.scheme.with_low_bytes(dropped)).ram_bytes
        scheme, fitted = fit_low_bytes(graph, wide.scheme, FitOptions(budget, search_s=0.1))
        without = {name for name, update in scheme.updates.items() if not update.q88}
        assert without <= dropped and fitted.memory.ram_bytes <= budget
        assert without == {op.name for op in largest[: len(without)]}
    least = fit_low_bytes(graph, narrow.scheme, FitOptions(narrow.ram_bytes))
    assert least[0] == narrow.scheme
    with pytest.raises(ArenaBudgetError):
        fit_low_bytes(graph, wide.scheme, FitOptions(300))


@pytest.mark.process
def test_some_layers_of_16_bits_and_some_of_8_page_to_the_bits_of_memory() -> None:
    module, data = hidden_linear()
    wide = compile_model(module, data, name="mixed", q88=True)
    largest = max(wide.quantized.graph.weighted(), key=lambda op: op.weight_count)
    dropped = wide.scheme.with_low_bytes({largest.name})
    least = 2 * largest.weight_count - 200
    with pytest.raises(ArenaBudgetError):
        fit_memory(wide.quantized.graph, wide.scheme, FitOptions(least, page=PAGED, search_s=0.5))
    mixed, plan = recompile(wide, FitOptions(least, page=PAGED, search_s=0.5))
    assert mixed.scheme == dropped and mixed.q88 and plan.memory.parameters.pages
    kept = compile_quantized(wide.quantized, scheme=dropped)
    inputs, labels = kept.quantize_input(data), np.arange(len(data)) % 4
    engines = [HostEngine(mixed), HostEngine(kept)]
    for engine in engines:
        engine.set_options(UpdateOptions(0.02, UpdateRounding.Q88))
        engine.train_many(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3))
    assert all(engines[0].values(op.name) == engines[1].values(op.name) for op in kept.quantized.graph.weighted())
