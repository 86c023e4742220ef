"""Operators are timed in rounds: the cache is emptied once for all of a round, and what agreed runs no more."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from port_planner.ir.device_kinds import CPU
from port_planner.profiling import operator_profile
from port_planner.profiling.cpu_cache import Sweep
from port_planner.profiling.operator_profile import profile_operators
from port_planner.profiling.timing import timed
from tests.planner.steps import tiny_step


class Counted:
    """A call that writes down when it runs, and takes as long as is said, one figure after the other."""

    kind = CPU

    def __init__(self, name: str, seconds: list[float], log: list[str], clock: list[float]) -> None:
        self.name, self.seconds, self.log, self.clock = name, seconds, log, clock

    def ready(self) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        return self.run, []

    def run(self) -> None:
        self.log.append(self.name)
        self.clock[0] += self.seconds.pop(0)


def test_a_round_empties_the_cache_once_and_runs_what_has_not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = list[str](), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Logged(Sweep):
        def __call__(self) -> None:
            log.append("sweep")

    agreeing, scattered = [3.0, 1.0, 1.01], [9.0, 4.0, 2.0, 1.0]
    calls = [
        Counted("a", [x / 10 for x in agreeing], log, clock),
        Counted("b", [x / 100 for x in scattered], log, clock),
    ]
    found = timed(calls, Logged(1 << 10))
    assert log == ["sweep", "a", "b", "sweep", "a", "b", "sweep", "a", "b", "sweep", "b"]
    assert [seconds for seconds, _ in found] == pytest.approx([0.1, 0.01])


def test_an_operator_that_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = list[str](), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    ((seconds, _),) = timed([Counted("slow", [5.0, 1.0], log, clock)], Sweep(1 << 10))
    assert (log, seconds) == (["slow"], 5.0)


@pytest.mark.slow
def test_operators_whose_operands_have_room_beside_each_other_share_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, groups = tiny_step().graphs["step"], list[int]()

    def counting(calls: list[Any], sweep: Sweep) -> list[tuple[float, int]]:
        groups.append(len(calls))
        return timed(calls, sweep)

    monkeypatch.setattr(operator_profile, "timed", counting)
    profile_operators([graph], compute_watts=1.0)
    monkeypatch.setattr(operator_profile, "_TOGETHER_BYTES", 0)
    together, groups[:] = [*groups], []
    profile_operators([graph], compute_watts=1.0)
    assert len(together) == 1 and together[0] == sum(groups) and set(groups) == {1}
