"""Greedy schedules are valid, or there is none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_planner.problem.problem import Choice, GapDecision, Packing, Problem, Schedule, Semantics, Slicing
from port_planner.problem.replay import replay
from port_planner.search.greedy.search import Greedy, GreedySearch, greedy, greedy_variants, smallest_budget
from tests.planner.brute_force import random_problem
from tests.planner.search.greedy.chains import HIDDEN, INPUT, WEIGHT, chain, gap_of

SEEDS = st.integers(0, 10_000)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SEEDS, st.booleans())
def test_greedy_is_valid_or_says_no(seed: int, packing: bool) -> None:
    problem = random_problem(seed, packing=packing)
    found = greedy(problem)
    if found.schedule is not None:
        errors = [e for e in replay(problem, found.schedule).errors if "deadline" not in e]
        assert not errors


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from(Semantics))
def test_the_search_never_counts_less_than_the_replay(seed: int, semantics: Semantics) -> None:
    problem = random_problem(seed, semantics=semantics)
    search = GreedySearch(problem)
    search.run()
    counted, true = search.load.peaks(), replay(problem, search.schedule()).load_bytes
    together = [
        s for s, roots in search.closures.roots.items() if len(roots) + len(search.closures.intermediates[s]) > 1
    ]
    assert (counted >= true).all()
    assert np.array_equal(np.delete(counted, together), np.delete(true, together))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(Semantics))
def test_a_move_taken_back_leaves_no_trace(seed: int, semantics: Semantics) -> None:
    search = GreedySearch(random_problem(seed, semantics=semantics, packing=True))
    for g, gap in enumerate(search.problem.gaps):
        for step in [] if gap.dead else list(search.steps.of(g, paging=True, recompute=True)):
            before = (search.load.after.copy(), search.load.before.copy(), search.schedule())
            search._make(step)
            search._take_back(step)
            assert np.array_equal(before[0], search.load.after) and np.array_equal(before[1], search.load.before)
            assert before[2] == search.schedule()
            assert abs(search.added.seconds) + abs(search.added.io_seconds) + abs(search.added.written_bytes) < 1e-9


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from(Semantics))
def test_packing_is_never_counted_at_less_than_the_replay_does(seed: int, semantics: Semantics) -> None:
    problem = random_problem(seed, semantics=semantics, packing=True)
    search = GreedySearch(problem)
    search.run()
    assert (search.load.peaks() >= replay(problem, search.schedule()).load_bytes).all()


def test_a_tensor_is_packed_where_that_is_the_cheapest_relief() -> None:
    problem = working_more(chain(ram_bytes=155), 3, 15)  # only stage 3 is over, by 10 bytes
    cheap = Packing(5, 0.1, 0.01)
    tensors = [replace(t, packings=(cheap,) * len(t.writes)) if t.birth >= 0 else t for t in problem.tensors]
    found = greedy(replace(problem, tensors=tuple(tensors))).schedule
    assert found is not None and [c.decision for c in found.choices] == [GapDecision.PACK]
    assert greedy(problem, packing=False).schedule == greedy(problem).schedule


def working_more(problem: Problem, stage: int, nbytes: int) -> Problem:
    """Return the problem with that much workspace at a stage."""
    stages = list(problem.stages)
    stages[stage] = replace(stages[stage], workspace_bytes=nbytes)
    return replace(problem, stages=tuple(stages))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_packed_forms_stand_in_the_way_of_nothing_that_paging_alone_finds(seed: int) -> None:
    """What was packed could not be paged any more, and a search that may pack ended where one that may not went on."""
    problem = random_problem(seed, packing=True, semantics=Semantics.ELASTIC)
    tight = replace(problem, ram_bytes=smallest_budget(problem), deadline_s=None, write_limit_bytes=None)
    assert GreedySearch(tight, recompute=False, packing=True).run().schedule is not None


def test_the_cheapest_relief_is_taken() -> None:
    problem = working_more(chain(ram_bytes=150), 3, 10)  # only stage 3 is over: the hidden tensor is idle there
    assert greedy(problem).schedule == Schedule((Choice(gap_of(problem, HIDDEN, 2), 4, GapDecision.RECOMPUTE),))


def test_a_move_that_a_later_one_makes_needless_is_taken_back() -> None:
    problem = chain(ram_bytes=140)  # the hidden tensor relieves stage 3 for less, but not stage 2; the weight both
    assert greedy(problem).schedule == Schedule((Choice(gap_of(problem, WEIGHT, 1), 4, GapDecision.PAGE),))


def test_what_paging_cannot_relieve_is_told_with_its_stage() -> None:
    found = greedy(chain(ram_bytes=100), recompute=False)
    assert (found.schedule, found.needed_bytes, found.stage) == (None, 110, 1)


def test_a_start_is_kept_where_it_serves() -> None:
    problem = chain(ram_bytes=140)
    g = gap_of(problem, INPUT, 1)
    page = Schedule((Choice(g, 5, GapDecision.PAGE),))
    assert GreedySearch(problem, start=page).run().schedule == page
    assert page in list(greedy_variants(problem, [page]))


def test_a_full_update_runs_in_slices_between_pages() -> None:
    problem = working_more(chain(ram_bytes=115), 4, 30)
    sliced = replace(problem, slicings=(Slicing(4, (WEIGHT,), saved_bytes=0, buffer_bytes=8),))
    assert greedy(problem).schedule is None
    found = greedy(sliced).schedule
    assert found is not None and found.sliced == (0,)
    assert {problem.gaps[c.gap].tensor for c in found.choices} == {WEIGHT}
    assert replay(sliced, found).valid


def test_the_smallest_budget_suffices_and_less_does_not() -> None:
    least = smallest_budget(chain())
    assert greedy(chain(ram_bytes=least), recompute=False).schedule is not None
    assert greedy(chain(ram_bytes=least - 1), recompute=False).schedule is None


def test_the_smallest_budget_takes_three_searches_where_the_first_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    run = GreedySearch.run

    def counted(search: GreedySearch) -> Greedy:
        searches.append(search.problem.ram_bytes)
        return run(search)

    monkeypatch.setattr(GreedySearch, "run", counted)
    least = smallest_budget(chain())
    assert len(searches) == 3 and searches[1:] == [least, least - 1]
