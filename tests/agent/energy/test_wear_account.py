"""The wear account: one count, one border of the day."""

import os
import time
from collections.abc import Iterator

import pytest

from port_agent.energy.wear_account import WearAccount


@pytest.fixture
def honolulu() -> Iterator[None]:
    """Ten hours behind UTC."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "HST10"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


class Wall:
    """A clock on the wall that the test sets."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_the_day_ends_at_local_midnight(honolulu: None) -> None:
    wall = Wall(1_700_000_000.0)  # 2023-11-14 12:13 in Honolulu, 22:13 UTC
    account = WearAccount(wall)
    account.add(1000)
    wall.now_s += 2 * 3600  # another day in UTC
    account.add(334)
    assert account.today_bytes() == 1334
    wall.now_s += 10 * 3600
    assert account.today_bytes() == 0


def test_whoever_keeps_figures_is_told_at_once() -> None:
    account, heard = WearAccount(lambda: 1_700_000_000.0), []
    account.subscribe(lambda unix, count: heard.append((unix, count)))
    account.add(5)
    account.add(0)
    account.add(-3)
    assert heard == [(1_700_000_000.0, 5)]
    assert account.today_bytes() == 5


def test_a_day_writes_what_yesterday_and_today_wrote(honolulu: None) -> None:
    wall = Wall(1_700_000_000.0)  # 12:13:20 in Honolulu
    account = WearAccount(wall)
    account.add(1000)
    assert account.daily_bytes() == 1000, "the first day counts as a whole one"
    wall.now_s += 86400.0
    account.add(500)
    share = (12 * 3600 + 13 * 60 + 20) / 86400.0
    assert account.daily_bytes() == pytest.approx(1500 / (1.0 + share))
    wall.now_s += 2 * 86400.0
    assert account.daily_bytes() == 0
