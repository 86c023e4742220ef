"""Costs of this machine and of media."""

from dataclasses import replace

import pytest

from port_agent.energy.sources.estimated import PowerModel
from port_agent.prepare.making import device_costs
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.prepare.making.small_bundles import shallow


def test_operators_that_memory_holds_up_are_priced_at_their_own_watts() -> None:
    captured = shallow()
    graph = captured.graphs["step"]
    measured = MeasuredCosts((tuple(OpCost(1.0, 0, 4.0) for _ in graph.ops),), 0, 0)
    power = PowerModel("board", 2.0, 6.0, moving_share=0.5)
    (ops,) = device_costs.by_class({"step": graph}, measured, power).ops
    for op, cost in zip(graph.ops, ops, strict=True):
        assert cost.joules == (4.0 if "mm" in op.name else 2.0), op.name
    assert device_costs.by_class({"step": graph}, measured, replace(power, moving_share=1.0)) == measured


def test_a_slower_medium_takes_longer_and_more_joules_per_byte() -> None:
    flash = Flash("flash", 1e9, 1e9, 1e-4, 3e-9, 3e-9)
    device = DeviceCosts("here", 0, 2.0, 4.0, flash)
    assert device_costs.slower_flash(device, None, 2e9) == device
    slow = device_costs.slower_flash(device, 45e6, 25e6).flash
    assert (slow.read_bytes_per_s, slow.write_bytes_per_s) == (45e6, 25e6)
    assert slow.read_joules_per_byte - flash.read_joules_per_byte == pytest.approx(0.15 / 45e6 - 2e-9)
    assert slow.write_joules_per_byte - flash.write_joules_per_byte == pytest.approx(0.15 / 25e6 - 2e-9)
