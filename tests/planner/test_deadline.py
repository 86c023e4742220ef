"""Deadlines: dates and charging hours become seconds per step, in a table of cases."""

from datetime import datetime, time

import pytest

from port_planner.base.times import parse_hours
from port_planner.deadline import DeadlineError, Window, pace, shortfall

NOON = datetime(2026, 11, 21, 12)


@pytest.mark.parametrize(
    ("window", "begin", "end", "hours"),
    [
        ("22:00-07:00", NOON, datetime(2026, 11, 22, 12), 9),
        ("22:00-07:00", datetime(2026, 11, 21, 23), datetime(2026, 11, 22, 1), 2),
        ("22:00-07:00", datetime(2026, 11, 21, 3), datetime(2026, 11, 21, 23), 5),
        ("09:00-17:00", NOON, datetime(2026, 11, 23, 10), 5 + 8 + 1),
        ("00:00-00:00", NOON, datetime(2026, 11, 22, 12), 24),
        ("22:00-07:00", NOON, NOON, 0),
    ],
)
def test_hours_inside_the_window(window: str, begin: datetime, end: datetime, hours: float) -> None:
    assert Window(*parse_hours(window)).seconds_between(begin, end) == hours * 3600


def test_seconds_per_step() -> None:
    found = pace(NOON, datetime(2026, 12, 1, 7), Window(time(22), time(7)), epochs=3, steps_per_epoch=100)
    assert found.steps == 300 and found.available_s == 10 * 9 * 3600
    assert found.seconds_per_step == pytest.approx(1080)


def test_a_deadline_without_charging_time_is_refused() -> None:
    with pytest.raises(DeadlineError, match="no charging time"):
        pace(NOON, datetime(2026, 11, 21, 20), Window(time(22), time(7)), epochs=1, steps_per_epoch=1)


def test_too_slow_says_by_how_much_and_what_would_do() -> None:
    found = pace(NOON, datetime(2026, 11, 21, 13), None, epochs=1, steps_per_epoch=3600)
    assert shortfall(found, 0.5, None) is None
    text = shortfall(found, 2.0, "800 MiB")
    assert text is not None and "1 h 00 min too much" in text and "800 MiB would suffice" in text
