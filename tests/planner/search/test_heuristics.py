"""What others do, on a chain where one can say by hand what each recipe must give; valid wherever it says so."""

import itertools
import math

import pytest

from port_planner.problem.problem import (
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
from port_planner.search.heuristics import (
    by_time,
    chain_schedules,
    cheap_segments,
    page_everything,
    segment_schedule,
    simple_schedules,
    sqrt_segments,
)
from tests.planner.brute_force import random_problem

LAYERS = 9


def network(layers: int = LAYERS, **of: object) -> Problem:
    """Return a forward pass of `layers` activations of 10 B, each read by the next layer and in reverse order again."""
    size = 2 * layers
    settings: dict[str, object] = {"paging": (Paging(0, 0.1, 0.1, 3.0, 3.0),), **of}
    tensors = tuple(
        Tensor(
            f"a{i}",
            10,
            tuple(sorted({i, i + 1, size - 1 - i})),
            (i,),
            rematerializations=(Rematerialization(1.0, 1.0, ((i - 1, 0),) if i else ()),),
            **settings,  # type: ignore[arg-type]
        )
        for i in range(layers)
    )
    return Problem(tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(size)), tensors, None, semantics=Semantics.ELASTIC)


def fates(schedule: Schedule) -> set[GapDecision]:
    return {choice.decision for choice in schedule.choices}


def test_everything_is_paged_that_can_be_written_and_read_back() -> None:
    problem = network()
    schedule = page_everything(problem)
    assert fates(schedule) == {GapDecision.PAGE} and replay(problem, schedule).valid
    live = [g for g, gap in enumerate(problem.gaps) if not gap.dead]
    assert [choice.gap for choice in schedule.choices] == live
    assert all(choice.stage == problem.gaps[choice.gap].before for choice in schedule.choices)
    for kept in ({"paging": ()}, {"pinned": True}):
        assert page_everything(network(**kept)) == Schedule()


def test_sqrt_n_segments_keep_their_boundaries_and_make_the_rest_again() -> None:
    problem = network()
    schedule = sqrt_segments(problem)
    found = replay(problem, schedule)
    assert found.valid and fates(schedule) == {GapDecision.RECOMPUTE}
    kept = {problem.gaps[g].tensor for g in range(len(problem.gaps)) if not problem.gaps[g].dead}
    kept -= {problem.gaps[choice.gap].tensor for choice in schedule.choices}
    assert len(kept) == 2 and max(b - a for a, b in itertools.pairwise([-1, *sorted(kept), LAYERS - 1])) <= 4
    assert found.peak_bytes < replay(problem, Schedule()).peak_bytes
    assert found.recompute_seconds <= LAYERS, "each layer once more at most"


@pytest.mark.parametrize("layers", [16, 36])
def test_memory_of_sqrt_n_segments_grows_with_the_root(layers: int) -> None:
    problem = network(layers)
    peak = replay(problem, sqrt_segments(problem)).peak_bytes
    assert peak <= 10 * (2 * math.isqrt(layers) + 3)
    assert replay(problem, Schedule()).peak_bytes >= 10 * (layers - 1)


def test_boundaries_of_paged_segments_are_paged_and_kept_segments_are_left_alone() -> None:
    problem = network()
    segments = [(0, 3), (3, 6), (6, 9)]
    schedule = segment_schedule(problem, segments, frozenset({1}), frozenset({0}))
    touched = {problem.gaps[c.gap].tensor: c.decision for c in schedule.choices}
    assert not touched.keys() & {0, 1, 2}, "kept whole"
    assert touched[5] is GapDecision.PAGE and touched[3] is touched[4] is GapDecision.RECOMPUTE
    assert replay(problem, schedule).valid
    only = segment_schedule(problem, segments, frozenset(), cheap=frozenset({4}))
    assert {problem.gaps[c.gap].tensor for c in only.choices} == {4}
    back = {c.stage for c in schedule.choices if problem.gaps[c.gap].tensor in (3, 4)}
    assert len(back) == 1, "a segment comes back together"


def test_by_time_hidden_transfers_are_free() -> None:
    """A page that hides behind compute costs no second, whatever it costs in joules; the
    joules' greedy would recompute.
    """
    problem = network(paging=(Paging(0, 0.01, 0.01, 100.0, 100.0),))
    short = Problem(problem.stages, problem.tensors, 80, semantics=problem.semantics)
    found = by_time(short).schedule
    assert found is not None and fates(found) == {GapDecision.PAGE} and replay(short, found).valid


def test_the_chains_cuts_go_from_cheap_and_large_to_dear_and_small() -> None:
    problem = network(12)
    peaks = [replay(problem, schedule) for schedule in chain_schedules(problem)]
    valid = [one for one in peaks if one.valid]
    assert len(peaks) == len({id(one) for one in peaks}) and len(valid) >= 3
    assert min(one.peak_bytes for one in valid) < max(one.peak_bytes for one in valid)
    assert valid[0].overhead_joules == min(one.overhead_joules for one in valid)


def test_no_cut_is_yielded_twice() -> None:
    schedules = list(chain_schedules(network(12)))
    assert len(schedules) > 1
    assert all(a != b for a, b in itertools.pairwise(schedules))


def test_cheap_segments_drop_what_is_cheap_for_its_size_only() -> None:
    problem = network()
    expensive = Rematerialization(1.0, 1000.0, ((3, 0),))
    tensors = tuple(
        t
        if i != 4
        else Tensor(t.name, t.nbytes, t.accesses, t.writes, rematerializations=(expensive,), paging=t.paging)
        for i, t in enumerate(problem.tensors)
    )
    problem = Problem(problem.stages, tensors, None, semantics=problem.semantics)
    dropped = [{problem.gaps[c.gap].tensor for c in s.choices} for s in cheap_segments(problem)]
    assert dropped and any(dropped) and not any(4 in some for some in dropped)


@pytest.mark.parametrize("semantics", Semantics)
def test_every_recipe_speaks_of_gaps_that_are_there(semantics: Semantics) -> None:
    for seed in range(15):
        problem = random_problem(seed, semantics=semantics)
        for schedule in itertools.chain(simple_schedules(problem), cheap_segments(problem)):
            for choice in schedule.choices:
                gap = problem.gaps[choice.gap]
                assert not gap.dead and gap.after < choice.stage <= gap.before
            assert not any("twice" in e or "outside" in e for e in replay(problem, schedule).errors)
