"""Greedy schedules are valid, or there is none."""

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.problem.replay import replay
from planner.search.greedy import greedy
from tests.planner.brute_force import random_problem


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000))
def test_greedy_is_valid_or_says_no(seed: int) -> None:
    problem = random_problem(seed)
    found = greedy(problem)
    if found.schedule is not None:
        errors = [e for e in replay(problem, found.schedule).errors if "deadline" not in e]
        assert not errors
