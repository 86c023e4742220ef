"""The estimated source: board files, the load it follows, bytes moved."""

import pytest

from port_agent.energy.sources.estimated import (
    CpuTime,
    EstimatedSource,
    LoadProbe,
    PowerModel,
    generic_model,
    read_cpu_time,
)
from port_agent.energy.sources.power_source import Kind


def test_estimate_follows_load_and_transfers() -> None:
    times = iter([CpuTime(0, 0), CpuTime(0, 0), CpuTime(4, 8), CpuTime(4, 16), CpuTime(4, 16)])
    source = EstimatedSource(PowerModel("b", 2.0, 6.0, 1e-9, 2e-9), LoadProbe(lambda: next(times)))
    assert source.info.kind is Kind.ESTIMATED
    assert source.read(0.0).counter_joules == 0
    assert source.read(2.0).counter_joules == pytest.approx(2 * (2 + 0.5 * 4))
    assert source.read(4.0).counter_joules == pytest.approx(8 + 2 * 2)
    source.note_transfer(10**9, 10**9)
    assert source.read(5.0).counter_joules == pytest.approx(12 + 3 + 2), "no time on any core: the last load goes on"


def test_this_machine_has_a_load_and_a_guess() -> None:
    now = read_cpu_time()
    assert 0 <= now.busy_s <= now.total_s
    model = generic_model(4)
    assert (model.static_watts, model.full_watts) == (1.5, 5.5)
    assert "factor of two" in model.origin
