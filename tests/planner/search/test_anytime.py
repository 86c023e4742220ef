"""The ladder's rungs: bounds below the optimum, what an LP rules out is out, and no rung makes anything worse."""

import functools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.coarsen import coarsen
from port_planner.problem.problem import GapDecision, Problem, Schedule, Semantics
from port_planner.problem.replay import replay
from port_planner.search import anytime
from port_planner.search.anytime import (
    LARGE_GAPS,
    captured_breadth,
    certain_columns,
    climb,
    expensive_columns,
    full_model,
    guided,
    offer_without_limits,
    relaxation_bound,
    scaled_progress,
    small_bound,
)
from port_planner.search.greedy.search import Greedy, greedy
from port_planner.search.incumbent import Climb
from tests.planner.brute_force import cheapest, random_problem
from tests.planner.estimated_steps import budget, captured

SEEDS = range(30)


def optimum(problem: Problem) -> float | None:
    best, complete = cheapest(problem, most=2000)
    return best if complete else None


@functools.cache
def solvable() -> list[tuple[Problem, float]]:
    """Return problems with their optimum, by brute force."""
    found = [(random_problem(seed), optimum(random_problem(seed))) for seed in SEEDS]
    return [(problem, best) for problem, best in found if best is not None]


def started(problem: Problem) -> Climb:
    """Return a climb with what the greedy search finds."""
    state = Climb(problem, time.process_time() + 20.0)
    state.greedy = greedy(problem)
    if state.greedy.schedule is not None:
        state.offer(state.greedy.schedule, "greedy")
    return state


@pytest.mark.slow
def test_the_smallest_relaxation_bounds_from_below() -> None:
    positive = 0
    for problem, best in solvable():
        bound = relaxation_bound(problem, 5.0)
        assert bound is not None and bound <= best + 1e-6
        positive += bound > 1e-6
        state = started(problem)
        small_bound(state, problem)
        assert state.bound == pytest.approx(max(0.0, min(bound, state.cost)), abs=1e-6)
    assert positive > 5


def test_where_nothing_need_be_decided_the_bound_is_zero() -> None:
    roomy = replace(random_problem(3), ram_bytes=None, deadline_s=None, write_limit_bytes=None)
    assert relaxation_bound(roomy, 5.0) == 0.0


def test_no_rung_makes_anything_worse_and_the_last_proves_the_optimum() -> None:
    for problem, best in solvable()[:12]:
        state = started(problem)
        before = state.cost
        guided(state, Breadth(8, 2, early_pages=False), 0.03, 2.0)
        assert state.cost <= before
        full_model(state, 10.0)
        assert state.cost == pytest.approx(best, abs=1e-6, rel=2e-4) and state.proven


def test_what_the_lp_rules_out_is_in_no_cheaper_schedule() -> None:
    """Fixing expensive columns to zero must not lose the optimum, as long as it lies within the room."""
    fixed = 0
    for problem, best in solvable()[:15]:
        formulation = Formulation(problem, Breadth(exact_stages=True))
        relaxed = HighsSession(formulation.model, relaxed=True).run(5.0)
        assert relaxed.status is SolverStatus.OPTIMAL
        slack = max(best - relaxed.bound * formulation.joule_scale, 0.0) + 1e-6
        expensive = expensive_columns(formulation, relaxed, slack)
        fixed += len(expensive)
        session = HighsSession(formulation.model)
        session.bound_columns(expensive, np.zeros(len(expensive)), np.zeros(len(expensive)))
        run = session.run(10.0)
        assert run.objective * formulation.joule_scale == pytest.approx(best, abs=1e-5, rel=2e-4)
        assert expensive_columns(formulation, relaxed, math.inf) == []
        assert relaxed.values is not None
        assert all(relaxed.values[c] > 0.999 for c in certain_columns(formulation, relaxed))
        assert not set(certain_columns(formulation, relaxed)) & set(expensive)
    assert fixed > 20


def test_a_climb_without_one_of_the_two_does_not_use_it() -> None:
    for seed in range(6):
        for kept, decision in (("paging", GapDecision.PAGE), ("recompute", GapDecision.RECOMPUTE)):
            without: dict[str, Any] = {kept: False}
            schedule = climb(random_problem(seed), 2.0, **without).schedule
            assert schedule is None or all(choice.decision is not decision for choice in schedule.choices)


def test_what_greedy_finds_without_limits_is_offered_where_it_finds_nothing_within_them() -> None:
    taken = 0
    for seed in range(40):
        problem = replace(random_problem(seed), write_limit_bytes=None, deadline_s=0.0)
        free = greedy(replace(problem, deadline_s=None)).schedule
        if free is None or not free.choices or greedy(problem).schedule is not None:
            continue
        for judge, expected in ((replay, None), (lambda p, s: replay(replace(p, deadline_s=None), s), free)):
            state = Climb(problem, time.process_time() + 5.0, judge=judge)
            offer_without_limits(state)
            assert (state.schedule is None) == (expected is None)
        taken += 1
    unlimited = Climb(replace(problem, deadline_s=None), time.process_time() + 5.0)
    offer_without_limits(unlimited)
    assert taken > 5 and not unlimited.log


def test_what_cannot_be_had_is_said_with_the_limits_that_are_missed() -> None:
    problem = replace(random_problem(5), ram_bytes=1, deadline_s=None, write_limit_bytes=None)
    state = climb(problem, 3.0)
    assert state.infeasible and state.schedule is None and state.missed
    assert all(missed.row.startswith(("eq5", "eq6")) for missed in state.missed)


def test_progress_is_in_joules_and_never_worse_than_known() -> None:
    problem, best = next((p, b) for p, b in solvable() if b > 0)
    state = started(problem)
    formulation = Formulation(problem, Breadth())
    assert scaled_progress(state, formulation) is None
    seen: list[tuple[float, float]] = []
    state.progress = lambda incumbent, bound: seen.append((incumbent, bound))
    forward = scaled_progress(state, formulation)
    assert forward is not None
    forward(math.inf, -math.inf)
    forward(0.5 * state.cost / formulation.joule_scale, 0.0)
    assert seen == [(state.cost, state.bound), (pytest.approx(0.5 * state.cost), state.bound)] and best > 0


@pytest.mark.slow
def test_a_captured_step_is_bounded_and_never_above_greedy() -> None:
    graph, costs = captured()
    problem = coarsen(graph, costs, ram_bytes=budget(0.5)).problem
    assert problem.semantics is Semantics.ELASTIC and captured_breadth(problem).window == 8
    many = replace(problem, tensors=problem.tensors * (LARGE_GAPS // len(problem.gaps) + 1))
    assert captured_breadth(many).window == 3, "where building the model counts too"
    state = climb(problem, 2.0)
    alone = greedy(problem).schedule
    assert alone is not None and state.schedule is not None
    assert 0 < state.bound <= state.cost * (1 + 1e-9)
    judged = replay(problem, alone)
    assert state.cost <= judged.overhead_joules + problem.static_watts * judged.stall_seconds + 1e-9
    assert state.schedule != Schedule()


def test_a_model_of_a_whole_captured_step_is_solved_only_where_nothing_else_found_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, costs = captured()
    problem = coarsen(graph, costs, ram_bytes=budget(0.5)).problem
    ran: list[bool] = []
    monkeypatch.setattr(anytime, "guided", lambda state, *_, **__: ran.append(state.schedule is None))
    climb(problem, 1.0)
    assert ran == []
    monkeypatch.setattr(anytime, "offer_heuristics", lambda *_: None)
    monkeypatch.setattr(anytime, "greedy", lambda *_, **__: Greedy(None, 0, 0))
    climb(problem, 1.0)
    assert ran == [True]
