"""Which alternatives no schedule needs."""

from dataclasses import replace

import pytest

from port_planner.problem.problem import (
    Alternative,
    Problem,
    ProblemError,
    Stage,
    StageChange,
    StageGroup,
    Tensor,
    TileSaving,
    verify_problem,
)
from port_planner.problem.variants import min_extra_joules, undominated
from port_planner.search.solve import solve
from tests.planner.brute_force import random_problem, with_variants

PROBLEM = Problem(
    tuple(Stage(f"s{t}", 1.0, 1.0, 4) for t in range(4)),
    (Tensor("t", 9, (0, 3), (0,), rematerializations=(None,)),),
    20,
    static_watts=2.0,
)
WHOLE = Alternative("whole")


def _kept(*alternatives: Alternative) -> tuple[int, ...]:
    return undominated(PROBLEM, StageGroup("group", (WHOLE, *alternatives)))


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (StageChange(1), (0,)),
        (StageChange(1, 0.0, 1.0), (0,)),
        (StageChange(1, 0.0, -1.0), (1,)),
        (StageChange(1, 0.0, 1.0, -1), (0, 1)),
        (StageChange(1, 0.0, 1.0, 0, -1), (0, 1)),
        (StageChange(1, 0.0, 1.0, -2, 1), (0, 1)),
        (StageChange(1, 0.0, -1.0, -1, 1), (0, 1)),
        (StageChange(1, 0.0, -1.0, 1, -1), (1,)),
        (StageChange(1, 0.5, -1.0), (0, 1)),
        (StageChange(1, -0.5, -0.9), (0, 1)),
        (StageChange(1, -0.5, -1.0), (1,)),
    ],
)
def test_what_takes_no_less_of_anything_is_left_out(other: StageChange, kept: tuple[int, ...]) -> None:
    """A shorter stage may have the step wait for transfers: its joules must be less by what
    the device draws meanwhile.
    """
    assert _kept(Alternative("other", (other,))) == kept


@pytest.mark.parametrize(
    ("saving", "kept"),
    [
        (TileSaving(0, 6, (3,), (0,)), (0, 1)),
        (TileSaving(0, 5, (3,), (0,)), (0, 1)),
        (TileSaving(0, 6, (0, 3), (0,)), (0, 1, 2)),
        (TileSaving(0, 7, (3,), (0,)), (0, 1, 2)),
        (TileSaving(0, 6, (3,)), (0, 1, 2)),
    ],
)
def test_savings_count_by_tensor_stage_and_what_they_hang_on(saving: TileSaving, kept: tuple[int, ...]) -> None:
    costlier = (StageChange(1, 0.0, 1.0),)
    one = Alternative("tiles", costlier, (TileSaving(0, 6, (3,), (0,)),))
    assert _kept(one, Alternative("others", (replace(costlier[0], joules=2.0),), (saving,))) == kept


@pytest.mark.slow
def test_without_what_is_dominated_the_optimum_is_the_same() -> None:
    left_out = 0
    for seed in range(10):
        problem = with_variants(random_problem(seed), seed)
        kept = [undominated(problem, group) for group in problem.groups]
        left_out += sum(len(g.alternatives) for g in problem.groups) - sum(map(len, kept))
        copies = tuple(replace(g, alternatives=(*g.alternatives, *g.alternatives[1:])) for g in problem.groups)
        twice = replace(problem, groups=copies)
        assert [undominated(twice, group) for group in twice.groups] == kept
        assert solve(twice).overhead_joules == solve(problem).overhead_joules
    assert left_out >= 10


def test_the_least_extra_joules_are_those_of_the_cheapest_alternatives() -> None:
    cheaper, costlier = (Alternative("", (StageChange(1, 0.0, joules),)) for joules in (-2.0, 3.0))
    groups = (
        StageGroup("a", (WHOLE, cheaper, costlier)),
        StageGroup("b", (WHOLE, costlier)),
        StageGroup("c", (WHOLE, cheaper)),
    )
    assert min_extra_joules(replace(PROBLEM, groups=groups)) == -4.0


@pytest.mark.parametrize(
    "alternatives",
    [
        (),
        (Alternative("no first", (StageChange(0, 1.0),)),),
        (WHOLE, Alternative("nowhere", (StageChange(4),))),
        (WHOLE, Alternative("twice", (StageChange(1), StageChange(1)))),
        (WHOLE, Alternative("before it began", (StageChange(1, -2.0),))),
        (WHOLE, Alternative("less than nothing", (StageChange(1, workspace_bytes=-5),))),
        (WHOLE, Alternative("not touched", (), (TileSaving(0, 1, (2,)),))),
        (WHOLE, Alternative("more than all", (), (TileSaving(0, 10, (3,)),))),
        (WHOLE, Alternative("another's gap", (), (TileSaving(0, 1, (3,), (1,)),))),
        (WHOLE, Alternative("saved twice", (), (TileSaving(0, 1, (3,)), TileSaving(0, 1, (3,))))),
    ],
)
def test_groups_that_contradict_themselves_are_refused(alternatives: tuple[Alternative, ...]) -> None:
    verify_problem(PROBLEM)
    with pytest.raises(ProblemError):
        verify_problem(replace(PROBLEM, groups=(StageGroup("group", alternatives),)))
