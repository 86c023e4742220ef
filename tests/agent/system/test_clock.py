"""Two clocks, and what a clock on the wall shows where the machine stands."""

import itertools
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from port_agent.system.clock import (
    CLOCK_SET_AFTER_S,
    SystemClock,
    day_of,
    day_start_s,
    local_clock_s,
    local_time,
    now_s,
    slept_s,
    zone_changed,
)
from tests.zones import clock_in

DAY_S = 86400


@pytest.fixture(params=["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Kiritimati"])
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    with clock_in(request.param):
        yield request.param


def test_the_wall_clock_shows_local_time_and_its_date(zone: str) -> None:
    for month in (1, 7):
        moment = datetime(2026, month, 3, 23, 30)
        wall_s = moment.timestamp()
        assert local_time(wall_s) == moment and day_of(wall_s) == f"2026-0{month}-03"
        assert day_of(wall_s + 1800) == f"2026-0{month}-04", "midnight here, wherever here is"
        assert local_clock_s(wall_s) % DAY_S == 23.5 * 3600
        assert day_start_s(wall_s) == datetime(2026, month, 3).timestamp()


def test_a_date_is_a_multiple_of_a_day_also_when_clocks_are_set_forward(zone: str) -> None:
    starts = [local_clock_s(datetime(2026, 3, day).timestamp()) for day in range(27, 32)]
    assert [b - a for a, b in itertools.pairwise(starts)] == [DAY_S] * 4
    assert all(start % DAY_S == 0 for start in starts)


def test_another_time_zone_is_taken_once_and_at_once(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zone_changed()
    assert not zone_changed()
    before = local_time(0.0)
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    assert zone_changed() and local_time(0.0) != before
    assert not zone_changed()


def test_spans_never_jump_and_go_on_while_the_machine_sleeps() -> None:
    clock = SystemClock()
    first, second = (clock.monotonic_s(), clock.uptime_s()), (clock.monotonic_s(), clock.uptime_s())
    assert second[0] >= first[0] and second[1] >= first[1]
    assert clock.uptime_s() >= clock.monotonic_s() - 0.01, "sleep counts"
    assert abs(clock.wall_s() - time.time()) < 1.0


def test_this_program_is_younger_than_a_clock_that_was_never_set() -> None:
    assert datetime(2026, 1, 1).timestamp() > CLOCK_SET_AFTER_S > datetime(2024, 12, 30).timestamp()


def test_metering_counts_from_boot_sleep_included() -> None:
    assert now_s() == pytest.approx(SystemClock().uptime_s(), abs=1.0)
    assert slept_s() == pytest.approx(now_s() - time.monotonic(), abs=1.0) and slept_s() >= -0.01
