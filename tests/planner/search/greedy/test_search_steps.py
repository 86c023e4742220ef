"""Which search steps are open, and what they cost."""

import pytest

from port_planner.problem.problem import Choice, GapDecision, Problem, Semantics
from port_planner.search.greedy.closures import Closures
from port_planner.search.greedy.decisions import Decisions
from port_planner.search.greedy.load import StageLoad
from port_planner.search.greedy.search_steps import Additions, SearchStep, SearchSteps
from tests.planner.search.greedy.chains import HIDDEN, INPUT, OUTPUT, WEIGHT, chain, gap_of


def steps_in(problem: Problem) -> SearchSteps:
    """Return the search steps of a problem with nothing decided."""
    decisions = Decisions(problem)
    return SearchSteps(problem, decisions, Closures(problem, decisions), StageLoad(problem), Additions())


def all_of(steps: SearchSteps, g: int) -> list[SearchStep]:
    """Return every search step for a gap."""
    return list(steps.of(g, paging=True, recompute=True))


def test_a_gap_is_paged_or_rematerialized_at_the_cost_of_the_problem() -> None:
    problem = chain()
    g = gap_of(problem, HIDDEN, 2)
    again, page = all_of(steps_in(problem), g)
    assert again.choice == Choice(g, 4, GapDecision.RECOMPUTE)
    assert (again.joules, again.seconds, again.io_seconds, again.closures) == (1.0, 1.0, 0.0, {4: {}})
    assert page.choice == Choice(g, 4, GapDecision.PAGE)
    assert (page.joules, page.seconds, page.io_seconds, page.closures) == (8.0, 0.0, 3.0, {})
    assert [m.choice.decision for m in steps_in(problem).of(g, paging=False, recompute=True)] == [GapDecision.RECOMPUTE]
    assert [m.choice.decision for m in steps_in(problem).of(g, paging=True, recompute=False)] == [GapDecision.PAGE]


def test_what_is_on_flash_already_is_only_read() -> None:
    problem = chain()
    steps, around = steps_in(problem), gap_of(problem, WEIGHT, 4)
    steps.decisions.choices[around] = Choice(around, 7, GapDecision.PAGE)
    (page,) = all_of(steps, gap_of(problem, WEIGHT, 1))
    assert (page.joules, page.io_seconds) == (3.0, 1.0)


@pytest.mark.parametrize(("limit", "open_steps"), [(9.0, 0), (10.0, 1)])
def test_flash_takes_no_more_than_its_limit(limit: float, open_steps: int) -> None:
    problem = chain(write_limit_bytes=limit)
    assert len(all_of(steps_in(problem), gap_of(problem, INPUT, 1))) == open_steps


@pytest.mark.parametrize(
    ("deadline_s", "fates"), [(6.9, [GapDecision.PAGE]), (7.0, [GapDecision.RECOMPUTE, GapDecision.PAGE])]
)
def test_a_rematerialization_must_fit_the_deadline(deadline_s: float, fates: list[GapDecision]) -> None:
    problem = chain(deadline_s=deadline_s)
    assert [m.choice.decision for m in all_of(steps_in(problem), gap_of(problem, HIDDEN, 2))] == fates


def test_transfers_cost_time_and_standing_power_once_the_compute_hides_no_more() -> None:
    problem = chain(semantics=Semantics.ELASTIC, deadline_s=8.0)
    steps, g = steps_in(problem), gap_of(problem, INPUT, 1)
    assert [m.joules for m in all_of(steps, g)] == [8.0]
    steps.added.io_seconds = 5.0  # 6 s of compute; this one takes 3
    assert [m.joules for m in all_of(steps, g)] == [8.0 + 0.5 * 2.0]
    steps.added.io_seconds = 5.1
    assert all_of(steps, g) == []


def test_a_rematerialization_must_find_room_where_it_runs() -> None:
    tight = steps_in(chain(ram_bytes=111))  # 110 B before stage 4, and 2 B of workspace
    assert [m.choice.decision for m in all_of(tight, gap_of(tight.problem, HIDDEN, 2))] == [GapDecision.PAGE]


def test_a_tensor_that_is_read_meanwhile_comes_back_then_or_is_computed_twice() -> None:
    problem = chain()
    steps, g = steps_in(problem), gap_of(problem, HIDDEN, 2)
    steps.closures.roots[3] = {OUTPUT: 0}
    steps.closures.refresh(3)
    found = {(m.choice.decision, m.choice.stage): (m.joules, m.closures) for m in all_of(steps, g)}
    assert found[GapDecision.RECOMPUTE, 4] == (2.0, {3: {HIDDEN: 0}, 4: {}})
    assert found[GapDecision.RECOMPUTE, 3] == (1.0, {3: {}})
    assert found[GapDecision.PAGE, 4] == (9.0, {3: {HIDDEN: 0}})
