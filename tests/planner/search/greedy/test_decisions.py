"""Where tensors are under given decisions."""

import pytest

from port_planner.problem.problem import Choice, GapDecision, Semantics
from port_planner.search.greedy.decisions import Decisions
from tests.planner.search.greedy.chains import HIDDEN, INPUT, OUTPUT, WEIGHT, chain, gap_of


def test_an_undecided_gap_is_kept_and_a_decided_one_resident_from_its_return() -> None:
    problem = chain()
    decisions = Decisions(problem)
    assert not decisions.resident(INPUT, 0, 0)  # it is born there
    assert all(decisions.resident(INPUT, 0, stage) for stage in (1, 2, 3, 4, 5))
    g = gap_of(problem, INPUT, 1)
    decisions.choices[g] = Choice(g, 4, GapDecision.PAGE)
    assert [decisions.resident(INPUT, 0, stage) for stage in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    assert not decisions.resident(INPUT, 1, 5)  # no such version


def test_nothing_is_resident_after_its_last_use() -> None:
    decisions = Decisions(chain())
    assert decisions.resident(OUTPUT, 0, 3) and not decisions.resident(OUTPUT, 0, 4)


def test_a_gap_around_the_end_is_one() -> None:
    problem = chain()
    decisions, g = Decisions(problem), gap_of(problem, WEIGHT, 4)
    decisions.choices[g] = choice = Choice(g, 7, GapDecision.PAGE)
    assert [problem.gap_at(WEIGHT, stage) for stage in (5, 0)] == [g, g]
    assert decisions.freed(choice) == [slice(5, 6), slice(0, 1)]
    assert decisions.unrolled(g, 0) == 6 and not decisions.resident(WEIGHT, 0, 0)


def test_what_is_supposed_is_forgotten_even_after_an_error() -> None:
    problem = chain()
    decisions, g = Decisions(problem), gap_of(problem, HIDDEN, 2)
    with pytest.raises(KeyError), decisions.supposing(Choice(g, 4, GapDecision.RECOMPUTE)):
        assert not decisions.resident(HIDDEN, 0, 3)
        raise KeyError
    assert decisions.resident(HIDDEN, 0, 3)


def test_contents_are_written_to_flash_once() -> None:
    problem = chain()
    decisions = Decisions(problem)
    inside, around = gap_of(problem, WEIGHT, 1), gap_of(problem, WEIGHT, 4)
    assert decisions.writes_first(inside) and decisions.writes_first(around)
    decisions.choices[around] = Choice(around, 7, GapDecision.PAGE)
    assert not decisions.writes_first(inside)  # what the last step wrote


def test_transfers_hold_memory_only_where_they_take_time() -> None:
    poet, real = chain(), chain(semantics=Semantics.REAL)
    g = gap_of(poet, INPUT, 1)
    page = Choice(g, 5, GapDecision.PAGE)
    assert Decisions(poet).buffers(page) == []
    assert sorted(Decisions(real).buffers(page)) == [2, 3, 4]  # two seconds of writing, one of reading
    assert Decisions(real).buffers(Choice(g, 5, GapDecision.RECOMPUTE)) == []


def test_only_poet_forbids_paging_beside_a_rematerialization() -> None:
    for semantics, forbidden in ((Semantics.POET, True), (Semantics.ELASTIC, False)):
        problem = chain(semantics=semantics)
        decisions = Decisions(problem)
        first, second = gap_of(problem, WEIGHT, 1), gap_of(problem, WEIGHT, 4)
        decisions.choices[first] = Choice(first, 4, GapDecision.RECOMPUTE)
        assert decisions.clashes(second, GapDecision.RECOMPUTE, before=True) is forbidden
        assert not decisions.clashes(second, GapDecision.PAGE, before=True)
