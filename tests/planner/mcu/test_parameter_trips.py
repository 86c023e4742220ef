"""Transfers of paged parameters that free memory makes unnecessary: less energy, the same RAM and the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu import HostEngine, UpdateOptions, compile_model
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.pages import transfers, wait_of
from port_planner.mcu.zoo import StreamNet
from tests.planner.mcu.networks import settled


@pytest.mark.process
@pytest.mark.parametrize(("share", "most"), [(0.75, 0.22), pytest.param(0.5, 0.32, marks=pytest.mark.long)])
def test_a_keyword_net_whose_ram_is_mostly_parameters(share: float, most: float) -> None:
    """Three trips of every parameter, all waited for, would be 31 % and 39 % of its energy."""
    data = np.random.default_rng(0).normal(size=(6, 10, 49)).astype(np.float32)
    kept = compile_model(settled(StreamNet(10, 12), data), data, name="keywords")
    options = FitOptions(int(share * kept.ram_bytes), core_costs("nrf52840"), page=PageMedium.PSRAM)
    model, plan = recompile(kept, options)
    rows = plan.memory.rows
    assert plan.memory.parameters.pages and model.ram_bytes <= options.ram_bytes
    assert plan.overhead <= most and any(row.carried for row in rows)
    assert any(wait_of(rows, start) > start + 1 for start in transfers(rows).values())
    assert plan.joules / plan.seconds == pytest.approx(core_costs("nrf52840").watts, rel=0.5)
    inputs, labels, engines = kept.quantize_input(data), np.arange(6), [HostEngine(kept), HostEngine(model)]
    for engine in engines:
        engine.set_options(UpdateOptions(0.02))
        engine.train_many(np.repeat(inputs, 3, axis=0), np.repeat(labels, 3))
    assert all(engines[0].values(op.name) == engines[1].values(op.name) for op in kept.quantized.graph.weighted())
