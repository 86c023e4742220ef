"""Drift: when it fires, by which factor, and when it stays silent."""

import pytest

from port_agent.energy.drift import TOLERANCE, WINDOW_STEPS, Correction, DriftMonitor


def feed(
    watch: DriftMonitor, steps: int, *, wall_s: float, joules: float | None = None, plan: int = 0
) -> list[Correction]:
    """Feed steps planned at 1 s and 10 J; return the corrections."""
    results = (watch.add(plan, 1.0, wall_s, 10.0, joules) for _ in range(steps))
    return [result for result in results if result is not None]


def test_fires_after_the_whole_window_and_once() -> None:
    watch = DriftMonitor("job")
    assert feed(watch, WINDOW_STEPS - 1, wall_s=1.3) == []
    (correction,) = feed(watch, 1, wall_s=1.3)
    assert (correction.time_factor, correction.energy_factor) == (pytest.approx(1.3), None)
    assert "1.3 s instead of 1 s" in correction.text
    assert feed(watch, 500, wall_s=1.3) == [], "the corrected plan is right"
    assert correction.apply(2.0, 7.0) == (pytest.approx(2.6), 7.0)
    assert correction.apply(None, None) == (None, None)


def test_both_directions_and_both_quantities() -> None:
    (correction,) = feed(DriftMonitor("job"), WINDOW_STEPS, wall_s=0.7, joules=15.0)
    assert (correction.time_factor, correction.energy_factor) == (pytest.approx(0.7), pytest.approx(1.5))


@pytest.mark.parametrize("wall_s", [1 + TOLERANCE - 0.001, 1 - TOLERANCE + 0.001, 1.0])
def test_silent_within_tolerance(wall_s: float) -> None:
    assert feed(DriftMonitor("job"), 400, wall_s=wall_s) == []


def test_single_slow_steps_do_not_fire() -> None:
    watch = DriftMonitor("job")
    for _ in range(5):
        assert feed(watch, 50, wall_s=1.0) + feed(watch, 1, wall_s=6.0) == []


def test_new_plan_starts_anew() -> None:
    watch = DriftMonitor("job")
    feed(watch, WINDOW_STEPS - 1, wall_s=2.0)
    assert feed(watch, 50, wall_s=2.0, plan=1) == []


def test_nothing_planned_or_measured_is_no_drift() -> None:
    watch = DriftMonitor("job")
    assert all(watch.add(0, None, 1.0, None, 5.0) is None for _ in range(300))
    assert (watch.time, watch.energy) == (None, None)
    assert all(watch.add(0, 1.0, 1.0, 10.0, None) is None for _ in range(300))
    assert watch.energy is None and watch.time is not None and watch.time.factor == 1.0


def test_second_correction_is_relative_to_the_first() -> None:
    watch = DriftMonitor("job")
    feed(watch, WINDOW_STEPS, wall_s=1.5)
    (second,) = feed(watch, WINDOW_STEPS, wall_s=3.0)
    assert second.time_factor == pytest.approx(2.0)
