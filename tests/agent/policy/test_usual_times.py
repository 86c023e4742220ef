"""What is learnt of when training may run, and what follows for a job."""

from datetime import datetime, timedelta

import pytest

from port_agent.policy.usual_times import Forecast, UsualTimes

HOUR_S = 3600.0
MONDAY = datetime(2026, 3, 2)
"""Midnight."""


def at(moment: datetime) -> float:
    return moment.timestamp()


def watched(days: int, trains: dict[int, float]) -> UsualTimes:
    """Return what a device has learnt that was watched from Monday on and trains at these hours of every day."""
    times = UsualTimes()
    for hour in range(days * 24):
        times.look(at(MONDAY + timedelta(hours=hour)), trains.get(hour % 24, 0.0))
    times.look(at(MONDAY + timedelta(days=days)), 0.0)
    return times


NIGHTS = dict.fromkeys((22, 23, 0, 1, 2, 3, 4, 5), 1.0)


def test_nothing_is_promised_before_a_day_was_watched() -> None:
    times = UsualTimes()
    times.look(at(MONDAY), 1.0)
    times.look(at(MONDAY + timedelta(hours=23)), 1.0)
    assert times.usual_day_s() is None and times.forecast(MONDAY, 10.0) is None
    times.look(at(MONDAY + timedelta(hours=24)), 1.0)
    assert times.usual_day_s() == 24 * HOUR_S


@pytest.mark.parametrize(
    ("now", "needed_h", "expected"),
    [
        (MONDAY + timedelta(days=14, hours=12), 1.0, Forecast(MONDAY + timedelta(days=14, hours=23), 1)),
        (MONDAY + timedelta(days=14, hours=12), 8.0, Forecast(MONDAY + timedelta(days=15, hours=6), 1)),
        (MONDAY + timedelta(days=14, hours=12), 9.0, Forecast(MONDAY + timedelta(days=15, hours=23), 2)),
        (MONDAY + timedelta(days=14, hours=23, minutes=30), 1.0, Forecast(MONDAY + timedelta(days=15, minutes=30), 1)),
        (MONDAY + timedelta(days=14, hours=12), 80.0, Forecast(MONDAY + timedelta(days=24, hours=6), 10)),
    ],
)
def test_a_device_that_charges_at_night(now: datetime, needed_h: float, expected: Forecast) -> None:
    times = watched(14, NIGHTS)
    assert times.usual_day_s() == 8 * HOUR_S
    assert times.forecast(now, needed_h * HOUR_S) == expected


def test_half_speed_takes_twice_as_long() -> None:
    times = watched(7, dict.fromkeys(range(24), 0.5))
    assert times.forecast(MONDAY, HOUR_S) == Forecast(MONDAY + timedelta(hours=2), 1)


def test_a_device_that_never_trains_never_ends() -> None:
    assert watched(7, {}).forecast(MONDAY, 1.0) == Forecast(None, None)


def test_an_hour_that_was_not_seen_is_as_that_hour_of_the_other_days() -> None:
    times = watched(2, NIGHTS)
    friday = MONDAY + timedelta(days=4, hours=12)
    assert times.forecast(friday, HOUR_S) == Forecast(friday + timedelta(hours=11), 1)


def test_the_last_weeks_weigh_more_than_those_before() -> None:
    times = watched(70, NIGHTS)
    for hour in range(28 * 24):
        times.look(at(MONDAY + timedelta(days=70, hours=hour)), 0.0)
    assert 0.0 < (times.usual_day_s() or 0.0) < 8 * HOUR_S * 0.4


def test_time_without_the_agent_is_time_without_training() -> None:
    times = watched(7, dict.fromkeys(range(24), 1.0))
    later = UsualTimes.from_json(times.to_json())
    later.look(at(MONDAY + timedelta(days=14)), 1.0)
    assert later.usual_day_s() == pytest.approx(12 * HOUR_S, rel=0.01)


def test_a_clock_that_was_set_adds_nothing() -> None:
    times = watched(7, NIGHTS)
    before = times.usual_day_s()
    times.skip(at(MONDAY + timedelta(days=400)))
    times.look(at(MONDAY + timedelta(days=400)), 0.0)
    times.look(at(MONDAY - timedelta(days=400)), 0.0)
    assert times.usual_day_s() == before


def test_what_was_learnt_outlives_the_process() -> None:
    times = watched(14, NIGHTS)
    assert UsualTimes.from_json(times.to_json()).to_json() == times.to_json()
    assert len(times.to_json()) < 16384


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"slots":[]}', '{"slots":"x"}', '{"slots":[{"watched_s":1.0,"trained_s":2.0}]}']
)
def test_what_cannot_be_read_begins_anew(text: str | None) -> None:
    assert UsualTimes.from_json(text).usual_day_s() is None


def test_impossible_figures_begin_anew() -> None:
    for wrong in ('"trained_s":3600.0', '"trained_s":-1.0', '"trained_s":1e999', '"trained_s":7200.0'):
        text = watched(14, NIGHTS).to_json()
        assert '"trained_s":7200.0' in text
        changed = text.replace('"trained_s":7200.0', wrong)
        anew = UsualTimes.from_json(changed).usual_day_s() is None
        assert anew == (wrong in ('"trained_s":-1.0', '"trained_s":1e999'))
