"""What rematerializations need, and who reads what."""

from port_planner.problem.problem import Choice, GapDecision
from port_planner.search.greedy.closures import ClosureCost, Closures
from port_planner.search.greedy.decisions import Decisions
from tests.planner.search.greedy.chains import HIDDEN, INPUT, OUTPUT, chain, gap_of


def made() -> tuple[Closures, int, int]:
    """Return closures of the chain with nothing decided, and the gaps of its input and of its hidden tensor."""
    problem = chain()
    return Closures(problem, Decisions(problem)), gap_of(problem, INPUT, 1), gap_of(problem, HIDDEN, 2)


def test_what_is_resident_is_read_and_what_is_not_is_computed_too() -> None:
    closures, _, hidden = made()
    assert closures.find(4, {OUTPUT: 0}) == ({}, {HIDDEN})
    with closures.decisions.supposing(Choice(hidden, 4, GapDecision.RECOMPUTE)):
        assert closures.find(3, {OUTPUT: 0}) == ({HIDDEN: 0}, {INPUT})
        assert closures.find(3, {OUTPUT: 0, HIDDEN: 0}) == ({}, {INPUT})


def test_no_closure_where_something_can_neither_be_read_nor_computed() -> None:
    closures, input_gap, hidden = made()
    assert closures.find(4, {INPUT: 0}) is None
    assert closures.find(4, {OUTPUT: 1}) is None
    with closures.decisions.supposing(Choice(input_gap, 5, GapDecision.PAGE)):
        assert closures.find(4, {HIDDEN: 0}) is None
    closures.chain_limit = 0
    with closures.decisions.supposing(Choice(hidden, 4, GapDecision.RECOMPUTE)):
        assert closures.find(3, {OUTPUT: 0}) is None


def test_costs_are_sums_and_changes_differences() -> None:
    closures, _, _ = made()
    assert closures.cost({HIDDEN: 0, OUTPUT: 0}) == ClosureCost(2.0, 2.0, 60.0)
    closures.intermediates[3] = {OUTPUT: 0}
    assert closures.change(3, {HIDDEN: 0}) == ClosureCost(0.0, 0.0, -20.0)


def test_refreshing_tells_the_bytes_and_remembers_who_reads() -> None:
    closures, input_gap, hidden = made()
    closures.roots[3] = {OUTPUT: 0}
    assert closures.refresh(3) == 0.0 and closures.readers(hidden) == [3]
    closures.decisions.choices[hidden] = Choice(hidden, 4, GapDecision.RECOMPUTE)
    assert closures.refresh(3) == 20.0
    assert (closures.readers(hidden), closures.readers(input_gap)) == ([], [3])
    closures.roots[3] = {}
    assert closures.refresh(3) == -20.0 and closures.readers(input_gap) == []


def test_a_tensor_may_go_if_its_readers_can_compute_it() -> None:
    closures, input_gap, hidden = made()
    closures.roots[3] = {OUTPUT: 0}
    closures.refresh(3)
    assert closures.without(hidden, 4, [3]) == {3: {HIDDEN: 0}}
    assert closures.without(hidden, 3, [3]) == {}  # it is back when it is read
    closures.roots[3] = {HIDDEN: 0}
    assert closures.without(input_gap, 5, [3]) is None
    assert not closures.decisions.choices
