"""Neighbourhoods of gaps freed in turn: each improves or changes nothing, together they reach what greedy misses."""

import functools
import time
from dataclasses import replace
from itertools import islice

import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import Problem, Schedule
from port_planner.problem.replay import ScheduleCost, replay
from port_planner.search.anytime import offer_without_limits
from port_planner.search.greedy.search import greedy
from port_planner.search.incumbent import Climb
from port_planner.search.neighbourhood import _Search, neighbourhood_search
from tests.planner.brute_force import cheapest, random_problem

BREADTH = Breadth(8, 2)


def started(problem: Problem, seconds: float = 20.0) -> Climb:
    """Return a climb that stands at the greedy schedule."""
    state = Climb(problem, time.process_time() + seconds)
    found = greedy(problem).schedule
    if found is not None:
        state.offer(found, "greedy")
    return state


MISSED = (7, 38, 65, 152, 291, 317)
"""Seeds of problems whose optimum greedy misses."""


@functools.cache
def optimum(seed: int) -> float:
    """Return the optimum by brute force."""
    best, complete = cheapest(random_problem(seed), most=1500)
    assert complete and best is not None
    return best


@pytest.mark.slow
def test_it_reaches_what_greedy_misses_and_makes_nothing_worse() -> None:
    reached = 0
    for seed in MISSED:
        problem, best = random_problem(seed), optimum(seed)
        state = started(problem)
        before = state.cost
        assert before > 1.01 * best
        neighbourhood_search(state, Formulation(problem, BREADTH, state.schedule), 5.0)
        assert best - 1e-6 <= state.cost <= before
        reached += state.cost <= best * (1 + 6e-3) + 1e-6
    assert reached >= 0.8 * len(MISSED), "neighbourhoods of twenty gaps hold these problems whole"


def test_without_a_schedule_or_one_that_the_model_lacks_there_is_nothing_to_improve() -> None:
    problem = random_problem(MISSED[0])
    nothing = Climb(problem, time.process_time() + 5.0)
    neighbourhood_search(nothing, Formulation(problem, BREADTH), 1.0)
    assert nothing.schedule is None and nothing.log == []
    state = started(problem)
    narrow = Formulation(problem, Breadth(0, 0, paging=False, recompute=False))
    log = list(state.log)
    neighbourhood_search(state, narrow, 1.0)
    assert state.log == log


def lenient(problem: Problem, schedule: Schedule) -> ScheduleCost:
    """Return what a schedule costs for a judge who knows that it takes less time than the model says."""
    return replay(replace(problem, deadline_s=None), schedule)


def test_a_schedule_that_only_the_model_finds_too_late_is_improved_all_the_same() -> None:
    for seed in (13, 446, 733, 810):
        problem = random_problem(seed)
        free = greedy(replace(problem, deadline_s=None)).schedule
        assert free is not None
        taken_s = replay(problem, free).seconds
        hurried = replace(problem, deadline_s=problem.base_seconds + 0.5 * (taken_s - problem.base_seconds))
        state = Climb(hurried, time.process_time() + 20.0, judge=lenient)
        offer_without_limits(state)
        assert state.schedule == free and not replay(hurried, free).valid
        before = state.cost
        neighbourhood_search(state, Formulation(hurried, BREADTH, free), 5.0)
        assert state.cost < 0.99 * before


def test_out_of_time_it_stops_at_once() -> None:
    problem = random_problem(MISSED[0])
    state = started(problem, seconds=0.0)
    log = list(state.log)
    neighbourhood_search(state, Formulation(problem, BREADTH, state.schedule), 5.0)
    assert state.log == log


def test_it_ends_where_going_through_all_gaps_gained_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Search, "patience", lambda _: 4)
    problem = random_problem(MISSED[0])

    def neighbourhoods(min_gain: float) -> int:
        state = started(problem)
        known = len(state.log)
        neighbourhood_search(state, Formulation(problem, BREADTH, state.schedule), 5.0, min_gain)
        return len(state.log) - known

    assert neighbourhoods(2.0) <= 2 < neighbourhoods(0.0), "no neighbourhood saves twice of what everything costs"


def test_it_finds_the_same_however_long_its_neighbourhoods_take(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(MISSED[1])
    plain, clock = time.process_time, [0.0]

    def found(slower_s: float) -> list[str]:
        clock[0] = 0.0

        def now() -> float:
            clock[0] += slower_s
            return plain() + clock[0]

        monkeypatch.setattr(time, "process_time", now)
        state = started(problem, seconds=1e6)
        neighbourhood_search(state, Formulation(problem, BREADTH, state.schedule), 1e6, 5e-3)
        return state.log

    quick = found(0.0)
    assert len(quick) > 2 and found(1.0) == quick, "a neighbourhood seems to take seconds here"


def test_neighbourhoods_cover_every_gap_in_each_order_overlapping_by_half() -> None:
    problem = random_problem(MISSED[0])
    state = started(problem)
    search = _Search(state, Formulation(problem, BREADTH, state.schedule))
    gaps = set(search.formulation.gaps)
    search.tile = 2
    neighbourhoods = list(islice(search.neighbourhoods(), 8 * len(gaps)))
    per_order = [neighbourhoods[i : i + len(gaps)] for i in range(0, 4 * len(gaps), len(gaps))]
    assert all(set().union(*map(set, order)) == gaps for order in per_order)
    assert neighbourhoods[: 4 * len(gaps)] == neighbourhoods[4 * len(gaps) : 8 * len(gaps)], (
        "the same again: deterministic"
    )
    assert search.patience() >= 4 * len(gaps)
    nbytes = {g: problem.tensors[problem.gaps[g].tensor].nbytes for g in gaps}
    assert [nbytes[g] for g in neighbourhoods[0]] == sorted(nbytes.values())[: -len(neighbourhoods[0]) - 1 : -1], (
        "largest first"
    )


@pytest.mark.parametrize("seed", MISSED)
def test_what_is_not_in_the_neighbourhood_stays_as_it_is(seed: int) -> None:
    problem = random_problem(seed)
    state = started(problem)
    assert state.schedule is not None
    before = {choice.gap: choice for choice in state.schedule.choices}
    search = _Search(state, Formulation(problem, BREADTH, state.schedule))
    some = sorted(search.formulation.gaps)[:1]
    status, improved, _ = search.improve(some, 2.0, 100)
    after = {choice.gap: choice for choice in state.schedule.choices}
    assert {g: c for g, c in after.items() if g not in some} == {g: c for g, c in before.items() if g not in some}
    assert improved or after == before, status


def test_the_search_is_deterministic() -> None:
    problem = random_problem(MISSED[0])

    def search() -> Schedule | None:
        state = started(problem)
        neighbourhood_search(state, Formulation(problem, BREADTH, state.schedule), 5.0)
        return state.schedule

    assert search() == search()
