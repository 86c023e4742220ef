"""Of the intermediates that a solver or a recipe asks for, those stay that a rematerialization really reads."""

from dataclasses import replace

import pytest

from port_planner.problem.intermediates import prune_intermediates
from port_planner.problem.problem import Choice, GapDecision, Problem, Rematerialization, Schedule, Stage, Tensor
from port_planner.problem.replay import replay
from tests.planner.brute_force import every_schedule, random_problem

STAGES = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(8))


def chained(i: int, *accesses: int) -> Tensor:
    """Return tensor i of a chain: each is made from the one before."""
    inputs = () if i == 0 else ((i - 1, 0),)
    return Tensor(f"t{i}", 10, accesses, accesses[:1], rematerializations=(Rematerialization(1.0, 1.0, inputs),))


CHAIN = Problem(STAGES, (chained(0, 0, 1), chained(1, 1, 2, 7), chained(2, 2, 3, 6)), None)
GAP_1, GAP_2 = (next(g for g in own if not CHAIN.gaps[g].dead) for own in CHAIN.gaps_of[1:])
ALL = {(i, s) for i in range(3) for s in range(8)}


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ((), ()),
        ((Choice(GAP_2, 6, GapDecision.RECOMPUTE),), ()),
        ((Choice(GAP_1, 7, GapDecision.RECOMPUTE),), ((0, 7),)),
        ((Choice(GAP_1, 7, GapDecision.RECOMPUTE), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ((0, 6), (0, 7), (1, 6))),
        ((Choice(GAP_1, 6, GapDecision.RECOMPUTE), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ((0, 6),)),
        ((Choice(GAP_1, 5, GapDecision.RECOMPUTE), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ((0, 5),)),
        ((Choice(GAP_1, 7, GapDecision.PAGE), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ((0, 6), (1, 6))),
        ((Choice(GAP_1, 5, GapDecision.PAGE), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ()),
        ((Choice(GAP_1, 7, GapDecision.PACK), Choice(GAP_2, 6, GapDecision.RECOMPUTE)), ((0, 6), (1, 6))),
    ],
    ids=[
        "nothing",
        "input kept",
        "input dead",
        "chain",
        "back together",
        "back before",
        "paged",
        "page back",
        "packed",
    ],
)
def test_an_intermediate_stays_where_its_reader_finds_nothing_else(
    choices: tuple[Choice, ...], kept: tuple[tuple[int, int], ...]
) -> None:
    assert prune_intermediates(CHAIN, choices, ALL) == Schedule(choices, kept)


def test_nothing_is_added_that_was_not_asked_for() -> None:
    choices = (Choice(GAP_1, 7, GapDecision.RECOMPUTE), Choice(GAP_2, 6, GapDecision.RECOMPUTE))
    assert prune_intermediates(CHAIN, choices, {(1, 6)}).intermediates == ((1, 6),), "the replay says what it lacks"


@pytest.mark.parametrize("seed", range(30))
def test_of_everything_just_what_is_needed_stays(seed: int) -> None:
    """Brute force works out the intermediates from the choices; asked for all, pruning comes to the same."""
    problem = replace(random_problem(seed), ram_bytes=None, deadline_s=None, write_limit_bytes=None)
    everything = {(i, s) for i in range(len(problem.tensors)) for s in range(problem.size)}
    tried = 0
    for schedule, _ in zip(every_schedule(problem), range(300), strict=False):
        if replay(problem, schedule).valid:
            tried += 1
            assert prune_intermediates(problem, schedule.choices, everything) == schedule
    assert tried
