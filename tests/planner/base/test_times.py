"""Moments and hours of the day: durations from now, clock times, ISO dates; what is on the wrong side is refused."""

import time
from datetime import time as time_of_day

import pytest
from hypothesis import given
from hypothesis import strategies as st

from port_planner.base.times import HoursError, MomentError, parse_deadline, parse_hours, parse_since

NOON = time.mktime((2026, 6, 3, 12, 0, 0, 0, 0, -1))


def test_deadlines_are_to_come() -> None:
    assert parse_deadline("8h", NOON) == NOON + 8 * 3600
    assert parse_deadline("1d12h", NOON) == parse_deadline("P1DT12H", NOON) == NOON + 36 * 3600
    assert parse_deadline("13:30", NOON) == NOON + 5400
    assert parse_deadline("11:00", NOON) == parse_deadline("2026-06-04 11:00", NOON) == NOON + 23 * 3600
    assert parse_deadline("2026-06-03 12:00", 0.0) == parse_deadline("2026-06-03T12:00", 0.0) == NOON
    assert parse_deadline("2026-06-03T12:00Z", 0.0) == 1780488000
    with pytest.raises(MomentError, match="is in the past; give a future one"):
        parse_deadline("2026-06-03 11:59", NOON)


def test_since_was() -> None:
    assert parse_since("90min", NOON) == NOON - 5400
    assert parse_since("11:00", NOON) == NOON - 3600
    assert parse_since("today", NOON) == NOON - 12 * 3600
    assert parse_since("yesterday", NOON) == NOON - 36 * 3600
    assert parse_since("13:00", NOON) == NOON - 23 * 3600
    assert parse_since("2026-06-02 12:00", NOON) == NOON - 86400
    with pytest.raises(MomentError, match="in the future"):
        parse_since("2026-06-04", NOON)


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "25:00", "8 lightyears", "99999999d", "-5", "-3h", "abc", "1e400", "5", "2026", "20261224", "nan",
        "2026-13-01", "9999-12-31T23:59+00:00", "0001-01-01", "9" * 5000, "24:00",
    ],
)  # fmt: skip
def test_moments_that_are_none(text: str) -> None:
    for parse in (parse_deadline, parse_since):
        with pytest.raises(MomentError, match="write it like") as caught:
            parse(text, NOON)
        assert len(str(caught.value)) < 200 and caught.value.exit_code == 2


@pytest.mark.slow
@given(st.text(max_size=30))
def test_any_text_is_a_moment_to_come_or_refused(text: str) -> None:
    try:
        assert parse_deadline(text, NOON) >= NOON
    except MomentError as error:
        assert "\n" not in str(error)


def test_hours() -> None:
    assert parse_hours("22:00-07:00") == (time_of_day(22), time_of_day(7))
    assert parse_hours(" 9:30 - 24:00 ") == (time_of_day(9, 30), time_of_day(0))


@pytest.mark.parametrize(
    "text", ["", "22:00", "22-7", "25:00-07:00", "22:00-07:60", "24:00-07:00", "22:00-07:00-08:00"]
)
def test_hours_that_are_none(text: str) -> None:
    with pytest.raises(HoursError, match='write it like "22:00-07:00"'):
        parse_hours(text)
