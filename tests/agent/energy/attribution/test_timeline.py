"""Readings to intervals: trapezoid, counters, gaps of every origin."""

import pytest

from port_agent.energy.attribution.timeline import GpuShare, Integrator, Interval
from port_agent.energy.sources.power_source import Coverage, GpuReading, Kind, SensorReading, SourceInfo

METER = SourceInfo("meter", Kind.MEASURED, Coverage.BOARD, "all", 0.001, 1.0)
COUNTER = SourceInfo("counter", Kind.MEASURED, Coverage.PACKAGE, "all", 0.001, 1.0)


def test_power_becomes_the_trapezoid() -> None:
    integrator = Integrator()
    assert integrator.add(SensorReading(0.0, watts=4.0), METER, 1.0) is None
    assert integrator.add(SensorReading(2.0, watts=6.0), METER, 1.0) == Interval(0.0, 2.0, 10.0, "meter", Kind.MEASURED)


def test_counters_become_differences() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(0.0, counter_joules=100.0), COUNTER, 1.0)
    interval = integrator.add(SensorReading(1.0, counter_joules=107.5), COUNTER, 1.0)
    assert interval is not None and interval.joules == 7.5 and interval.watts == 7.5


def test_silence_is_a_gap_and_not_a_wide_trapezoid() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(0.0, watts=4.0), METER, 1.0)
    gap = integrator.add(SensorReading(60.0, watts=4.0), METER, 1.0)
    assert gap is not None and gap.joules is None and gap.watts is None
    assert "no reading for 60 s" in gap.reason
    after = integrator.add(SensorReading(61.0, watts=4.0), METER, 1.0)
    assert after is not None and after.joules == 4.0


def test_slow_sampling_that_was_asked_for_is_no_gap() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(0.0, watts=4.0), METER, 10.0)
    interval = integrator.add(SensorReading(10.0, watts=4.0), METER, 10.0)
    assert interval is not None and interval.joules == 40.0


def test_failure_is_a_gap_up_to_the_second_good_reading() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(0.0, watts=4.0), METER, 1.0)
    first = integrator.fail(1.0, METER, "unplugged")
    assert first == Interval(0.0, 1.0, None, "meter", Kind.MEASURED, "unplugged")
    second = integrator.add(SensorReading(2.0, watts=4.0), METER, 1.0)
    assert second == Interval(1.0, 2.0, None, "meter", Kind.MEASURED, "unplugged")
    third = integrator.add(SensorReading(3.0, watts=4.0), METER, 1.0)
    assert third is not None and third.joules == 4.0


def test_change_of_source_is_a_gap() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(0.0, watts=4.0), METER, 1.0)
    gap = integrator.add(SensorReading(1.0, counter_joules=5000.0), COUNTER, 1.0)
    assert gap is not None and gap.joules is None and "first reading of counter" in gap.reason


def test_stale_reading_adds_nothing() -> None:
    integrator = Integrator()
    integrator.add(SensorReading(5.0, watts=4.0), METER, 1.0)
    assert integrator.add(SensorReading(5.0, watts=9.0), METER, 1.0) is None
    assert integrator.add(SensorReading(4.0, watts=9.0), METER, 1.0) is None


@pytest.mark.parametrize("fails_first", [True, False])
def test_nothing_before_the_first_reading(fails_first: bool) -> None:
    integrator = Integrator()
    if fails_first:
        assert integrator.fail(0.0, METER, "dead") is None
        gap = integrator.add(SensorReading(1.0, watts=1.0), METER, 1.0)
        assert gap is not None and gap.joules is None
    else:
        assert integrator.add(SensorReading(1.0, watts=1.0), METER, 1.0) is None


def test_what_the_gpu_took_is_its_trapezoid_and_not_known_over_a_gap_or_of_another_rail() -> None:
    integrator = Integrator()
    rail, other = (lambda watts, name=name: GpuReading(watts, name) for name in ("VDD_GPU_SOC", "VDD_SYS_GPU"))
    integrator.add(SensorReading(0.0, watts=9.0, gpu=rail(4.0)), METER, 1.0)
    found = [
        integrator.add(SensorReading(2.0, watts=9.0, gpu=rail(6.0)), METER, 1.0),
        integrator.add(SensorReading(3.0, watts=9.0), METER, 1.0),
        integrator.add(SensorReading(4.0, watts=9.0, gpu=rail(1.0)), METER, 1.0),
        integrator.add(SensorReading(5.0, watts=9.0, gpu=other(1.0)), METER, 1.0),
        integrator.add(SensorReading(90.0, watts=9.0, gpu=other(1.0)), METER, 1.0),
    ]
    assert [None if one is None else one.gpu for one in found] == [
        GpuShare(10.0, "VDD_GPU_SOC"),
        None,
        None,
        None,
        None,
    ]
