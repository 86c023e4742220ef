"""Sums per job and phase."""

from port_agent.energy.attribution.one_job import Charge, EnergyPhase
from port_agent.energy.sources.power_source import Kind
from port_agent.energy.totals import JobEnergy, Totals


def charge(job: str, phase: EnergyPhase, seconds: float, gross: float, net: float | None) -> Charge:
    """Return a charge of a simulated source."""
    return Charge(1.0, job, phase, Kind.MEASURED, seconds, gross, net)


def test_a_job_without_a_baseline_has_no_net_figure_from_then_on() -> None:
    totals = Totals()
    totals.begin("1")
    totals.add([charge("1", EnergyPhase.FORWARD, 1.0, 5.0, 2.0)], [])
    assert totals.jobs()["1"] == JobEnergy(5.0, 2.0, 0, 0.0)
    totals.add([charge("1", EnergyPhase.FORWARD, 1.0, 5.0, None)], [])
    totals.add([charge("1", EnergyPhase.BACKWARD, 1.0, 5.0, 2.0)], [])
    assert totals.jobs()["1"] == JobEnergy(15.0, None, 0, 0.0)


def test_time_without_a_figure_is_no_phase() -> None:
    totals = Totals()
    totals.add([charge("1", EnergyPhase.UNMEASURED, 7.0, 0.0, 0.0), charge("", EnergyPhase.IDLE, 2.0, 4.0, 0.0)], [])
    assert totals.jobs()["1"].unmeasured_s == 7.0
    assert dict(totals.phase_joules()) == {EnergyPhase.IDLE: 4.0}
