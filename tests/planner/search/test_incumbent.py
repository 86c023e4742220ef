"""The best schedule and the best bound: only what is valid and better is taken, and no bound passes a schedule."""

import math
import time
from dataclasses import replace

import pytest

from port_planner.problem.problem import Choice, GapDecision, Problem, Schedule, Semantics
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.search.incumbent import OPTIMAL_GAP, Climb, GainRate, objective
from tests.planner.brute_force import random_problem

PROBLEM = replace(random_problem(3), ram_bytes=None, deadline_s=None, write_limit_bytes=None)
BROKEN = Schedule((Choice(0, 10_000, GapDecision.PAGE),))


def costing(*joules: float) -> Climb:
    """Return a climb that judges one schedule after the other at these joules; NaN is invalid."""
    left = iter(joules)

    def judge(problem: Problem, schedule: Schedule) -> ScheduleCost:
        cost = next(left)
        return ScheduleCost(overhead_joules=cost, errors=["broken"] if math.isnan(cost) else [])

    return Climb(PROBLEM, time.process_time() + 60.0, judge=judge)


def test_only_what_is_valid_and_better_is_taken() -> None:
    climb = costing(5.0, 7.0, math.nan, 5.0, 3.0)
    schedules = [Schedule((), ((0, i),)) for i in range(5)]
    assert [climb.offer(schedule, "rung") for schedule in schedules] == [True, False, False, False, True]
    assert climb.cost == 3.0 and climb.schedule is schedules[4]
    assert climb.log == ["rung: 5 J", "rung: 7 J", "rung: nan J invalid: broken", "rung: 5 J", "rung: 3 J"]


def test_the_replay_judges_unless_another_does() -> None:
    climb = Climb(PROBLEM, time.process_time() + 60.0)
    assert not climb.offer(BROKEN, "rung") and climb.schedule is None and "invalid" in climb.log[0]
    assert climb.offer(Schedule(), "keep-all") and climb.evaluation is not None
    assert climb.cost == objective(PROBLEM, replay(PROBLEM, Schedule())) == 0.0


def test_a_bound_only_rises_and_never_passes_the_schedule() -> None:
    climb = costing(5.0)
    for bound, stands in ((2.0, 2.0), (1.0, 2.0), (math.inf, 2.0), (math.nan, 2.0), (9.0, 9.0)):
        climb.raise_bound(bound)
        assert climb.bound == stands
    climb = costing(5.0)
    climb.offer(Schedule(), "rung")
    climb.raise_bound(9.0)
    assert climb.bound == 5.0 and climb.proven


@pytest.mark.parametrize(
    ("cost", "bound", "proven"),
    [
        (10.0, 10.0, True),
        (10.0, 10.0 * (1 - 0.9 * OPTIMAL_GAP), True),
        (10.0, 10.0 * (1 - 1.1 * OPTIMAL_GAP), False),
        (0.0, 0.0, True),
        (1e-16, 0.0, True),
    ],
)
def test_within_the_gap_it_is_proven(cost: float, bound: float, proven: bool) -> None:
    climb = costing(cost)
    assert not climb.proven, "nothing is proven of nothing"
    climb.offer(Schedule(), "rung")
    climb.raise_bound(bound)
    assert climb.proven is proven


def test_whoever_watches_hears_of_each_improvement_and_of_nothing_else() -> None:
    seen: list[tuple[float, float]] = []
    climb = costing(5.0, 6.0, 4.0)
    climb.progress = lambda incumbent, bound: seen.append((incumbent, bound))
    climb.raise_bound(1.0)
    for _ in range(3):
        climb.offer(Schedule(), "rung")
    climb.raise_bound(0.5)
    assert seen == [(math.inf, 1.0), (5.0, 1.0), (4.0, 1.0)]


def test_time_is_this_processs_own_and_the_wall_clock_may_run_faster() -> None:
    climb = Climb(PROBLEM, time.process_time() + 60.0)
    assert 0.0 < climb.left <= 60.0
    now, used = time.perf_counter(), time.process_time()
    climb.began = (now - 4.0, used - 1.0)
    assert climb.wall(2.0) == pytest.approx(8.0, rel=0.05), "others take three quarters of the machine"
    climb.began = (now - 100.0, used - 1.0)
    assert climb.wall(2.0) == 16.0, "at most eight times"
    climb.began = (now, used - 5.0)
    assert climb.wall(2.0) == 2.0, "never less"
    climb.began = (now - 100.0, time.process_time())
    assert climb.wall(2.0) == 2.0, "too early to tell"


def test_waiting_costs_what_the_device_burns_meanwhile() -> None:
    watts = replace(PROBLEM, static_watts=3.0, semantics=Semantics.REAL)
    assert objective(watts, ScheduleCost(overhead_joules=2.0, stall_seconds=4.0)) == 14.0


def test_a_search_that_gains_too_little_of_the_whole_step_is_told_so_once_a_period() -> None:
    climb, base = costing(), PROBLEM.base_joules
    climb.cost = base
    rate = GainRate(climb, 0.1)
    assert not rate.is_too_low(3) and not rate.is_too_low(3), "the period is not over"
    climb.cost = 0.7 * base
    assert not rate.is_too_low(3), "0.3 of 1.7 is enough"
    assert not rate.is_too_low(3) and not rate.is_too_low(3)
    climb.cost = 0.6 * base
    assert rate.is_too_low(3), "0.1 of 1.6 is a seventh of the overhead, and a sixteenth of the step"
