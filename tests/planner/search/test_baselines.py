"""Strategies of others behind our judge: each does only what it may, and none is credited with what does not hold."""

from dataclasses import replace

import pytest

from port_planner.problem.problem import (
    Choice,
    GapDecision,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    Tensor,
)
from port_planner.problem.replay import replay
from port_planner.search.baselines import BASELINES
from port_planner.search.solve import solve
from tests.planner.brute_force import random_problem

PROBLEMS = [random_problem(seed, semantics=Semantics.REAL) for seed in range(8)]
PACKABLE = [random_problem(seed, semantics=Semantics.REAL, packing=True) for seed in range(8)]


@pytest.mark.parametrize("name", BASELINES)
def test_what_is_offered_holds_under_our_semantics(name: str) -> None:
    found = 0
    for problem in PROBLEMS:
        state = BASELINES[name](problem, 1.0, replay)
        if state.schedule is not None:
            found += 1
            judged = replay(problem, state.schedule)
            assert judged.valid and state.cost == judged.overhead_joules + problem.static_watts * judged.stall_seconds
    roomy = replace(PROBLEMS[0], ram_bytes=None, deadline_s=None, write_limit_bytes=None)
    assert BASELINES[name](roomy, 1.0, replay).schedule is not None or name == "page-all"


@pytest.mark.parametrize(
    ("name", "fates"),
    [
        ("keep-all", set()),
        ("page-all", {GapDecision.PAGE}),
        ("chen", {GapDecision.RECOMPUTE}),
        ("checkmate", {GapDecision.RECOMPUTE}),
        ("capuchin", {GapDecision.PAGE, GapDecision.RECOMPUTE}),
        ("pofo", {GapDecision.PAGE, GapDecision.RECOMPUTE}),
        ("poet", {GapDecision.PAGE, GapDecision.RECOMPUTE}),
        ("bittrain", {GapDecision.PACK}),
    ],
)
def test_each_does_only_what_it_may(name: str, fates: set[GapDecision]) -> None:
    for problem in PACKABLE:
        schedule = solve(problem, time_limit_s=1.0, strategy=name).schedule
        assert schedule is None or {choice.decision for choice in schedule.choices} <= fates


def test_none_is_better_than_the_optimum() -> None:
    for problem in PROBLEMS:
        best = solve(problem, time_limit_s=5.0)
        for name, strategy in BASELINES.items():
            state = strategy(problem, 1.0, replay)
            if state.schedule is not None:
                assert best.overhead_joules is not None
                assert state.cost >= best.overhead_joules * (1 - 1e-4) - 1e-6, name


def test_poets_optimum_is_judged_with_transfers_that_take_time() -> None:
    """It plans as if a page cost no time; here both pages land at once and the step waits."""
    stages = tuple(Stage(f"s{t}", 0.1, 0.1) for t in range(8))
    slow = Paging(0, 5.0, 5.0, 0.1, 0.1)
    again = Rematerialization(0.1, 3.0, ())
    idle = tuple(Tensor(f"i{k}", 10, (0, 7), (0,), rematerializations=(again,), paging=(slow,)) for k in range(2))
    busy = Tensor("busy", 20, (3, 4), (3,), rematerializations=(None,))
    problem = Problem(stages, (*idle, busy), 25, semantics=Semantics.REAL, static_watts=1.0)
    poet = BASELINES["poet"](problem, 2.0, replay)
    ours = solve(problem, time_limit_s=2.0)
    assert ours.overhead_joules is not None and ours.schedule is not None
    assert poet.schedule is None or poet.cost > ours.overhead_joules
    free = replace(problem, semantics=Semantics.POET)
    assert BASELINES["poet"](free, 2.0, replay).cost <= 4 * 0.1 + 1e-9


def test_what_does_not_fit_is_not_offered() -> None:
    problem = replace(PROBLEMS[0], ram_bytes=replay(PROBLEMS[0], Schedule()).peak_bytes - 1)
    state = BASELINES["keep-all"](problem, 1.0, replay)
    assert state.schedule is None and "invalid" in state.log[0]
    assert not replay(problem, Schedule((Choice(0, 0, GapDecision.PAGE),))).valid
