"""A share of the CPUs by pauses between operators, on clocks of the test's own."""

import os
import time

import pytest

from port_agent.intercept.dispatch.pace import CpuPace


class Clocks:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.cpu_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall_s)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu_s)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def compute(self, seconds: float, threads: int = 1) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds * threads


@pytest.mark.parametrize(
    ("percent", "threads", "share"), [(25, 4, 0.25), (50, 4, 0.5), (5, 1, 0.2), (25, 1, 1.0), (100, 4, 1.0)]
)
@pytest.mark.parametrize("operator_s", [0.0001, 0.03, 2.0])
def test_it_computes_for_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, percent: float, threads: int, share: float, operator_s: float
) -> None:
    clocks = Clocks(monkeypatch)
    limit = CpuPace(percent)
    for _ in range(round(20.0 / operator_s)):
        clocks.wall_s += limit.delay_s()
        clocks.compute(operator_s, threads)
    assert 20.0 / clocks.wall_s == pytest.approx(share, rel=0.15 if operator_s > 1 else 0.01)


def test_time_in_which_it_waited_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    limit = CpuPace(25)
    clocks.wall_s += 100.0
    assert limit.delay_s() == 0.0
    clocks.compute(0.1, threads=4)
    assert limit.delay_s() == pytest.approx(0.3)
    clocks.wall_s += 0.1
    assert limit.delay_s() == pytest.approx(0.2)  # for another thread that comes meanwhile
