"""Stages, tensors, gaps and versions: what a problem says of itself, and one that contradicts itself."""

from dataclasses import replace

import pytest

from port_planner.problem.problem import Gap, Problem, ProblemError, Rematerialization, Stage, Tensor, verify_problem
from tests.planner.brute_force import random_problem

STAGES = tuple(Stage(f"s{t}", float(t), 2.0) for t in range(6))
AGAIN = Rematerialization(1.0, 1.0, ())


def problem(*tensors: Tensor) -> Problem:
    return Problem(STAGES, tensors, None)


def test_a_tensor_is_idle_between_accesses_that_are_not_neighbours() -> None:
    one = Tensor("t", 4, (0, 1, 4), (0, 4), rematerializations=(AGAIN, AGAIN))
    assert problem(one).gaps == (Gap(0, 1, 4, 0), Gap(0, 4, 6, 1, dead=True))
    assert problem(replace(one, accesses=(0, 1, 5), writes=(0,))).gaps == (Gap(0, 1, 5, 0),), "used to the end"
    assert problem(replace(one, rematerializations=(None, None))).gaps == (Gap(0, 1, 4, 0),), "dead, and never back"


def test_a_weight_is_idle_over_the_end_of_the_step() -> None:
    weight = Tensor("w", 4, (1, 4), (4,), persistent=True)
    assert problem(weight).gaps == (Gap(0, 1, 4, -1), Gap(0, 4, 7, 0))
    first_and_last = replace(weight, accesses=(0, 5), writes=(5,))
    assert problem(first_and_last).gaps == (Gap(0, 0, 5, -1), Gap(0, 5, 6, 0)), "one moment, at the end of the step"
    assert problem(replace(weight, accesses=(2,), writes=())).gaps == (Gap(0, 2, 8, -1),)


def test_gaps_are_listed_by_tensor() -> None:
    for seed in range(20):
        made = random_problem(seed)
        for i, own in enumerate(made.gaps_of):
            assert [made.gaps[g].tensor for g in own] == [i] * len(own)
        assert sum(map(len, made.gaps_of)) == len(made.gaps)
        for gap in made.gaps:
            busy = set(made.tensors[gap.tensor].accesses)
            assert not busy & set(range(gap.after + 1, gap.before)) and gap.after in busy


def test_versions_count_the_writes() -> None:
    tensor = Tensor("t", 4, (1, 2, 4), (1, 4), rematerializations=(AGAIN, None))
    assert [tensor.version_after(s) for s in range(6)] == [-1, 0, 0, 0, 1, 1]
    assert [tensor.version_before(s) for s in range(6)] == [-1, -1, 0, 0, 0, 1]
    assert (tensor.rematerialization(0), tensor.rematerialization(1)) == (AGAIN, None)
    assert tensor.rematerialization(-1) is None and tensor.rematerialization(2) is None
    assert (tensor.birth, replace(tensor, persistent=True).birth) == (1, -1)


def test_a_weight_begins_a_step_with_what_the_last_one_wrote() -> None:
    weight = Tensor("w", 4, (0, 3, 5), (3, 5), persistent=True)
    assert [weight.contents(version) for version in (-1, 0, 1)] == [1, 0, 1]
    assert replace(weight, writes=()).contents(-1) == -1
    assert replace(weight, persistent=False).contents(1) == 1


def test_a_step_takes_the_sum_of_its_stages() -> None:
    made = problem(Tensor("t", 4, (0,), (0,)))
    assert (made.size, made.base_seconds, made.base_joules) == (6, 15.0, 12.0)


GOOD = (
    Tensor("a", 4, (0, 3), (0,), rematerializations=(AGAIN,)),
    Tensor("b", 4, (1, 4), (1,), rematerializations=(Rematerialization(1.0, 1.0, ((0, 0),)),)),
)


def reading(*inputs: tuple[int, int]) -> tuple[Tensor, ...]:
    return (GOOD[0], replace(GOOD[1], rematerializations=(Rematerialization(1.0, 1.0, inputs),)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            (replace(GOOD[0], accesses=(3, 0)),),
            r"tensor 0 \(a\) has accesses \(3, 0\); they must ascend within 6 stages",
        ),
        ((replace(GOOD[0], accesses=(0, 0)),), "must ascend"),
        ((replace(GOOD[0], accesses=(0, 6)),), "must ascend within 6"),
        ((replace(GOOD[0], accesses=()),), "must ascend"),
        ((replace(GOOD[0], writes=(0, 1)),), r"is written at \(0, 1\), outside its accesses"),
        ((replace(GOOD[0], writes=(3,)),), "is read before it is written"),
        ((replace(GOOD[0], writes=()),), "is read before it is written"),
        ((replace(GOOD[0], nbytes=-1),), "claims -1 bytes"),
        (reading((2, 0)), "reads tensor 2: cyclic or out of range"),
        (reading((1, 0)), "reads tensor 1: cyclic"),
        (reading((0, 1)), "reads version 1 of tensor 0: no such version"),
        (reading((0, -2)), "no such version"),
        (
            (replace(GOOD[0], rematerializations=(Rematerialization(1.0, 1.0, ((1, 0),)),)), GOOD[1]),
            r"tensor 0 \(a\) is rematerialized from tensor 1, which is born later",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tensors: tuple[Tensor, ...], message: str) -> None:
    verify_problem(problem(*GOOD))
    with pytest.raises(ProblemError, match=message):
        verify_problem(problem(*tensors))


def test_a_weight_may_be_read_before_it_is_written() -> None:
    verify_problem(problem(replace(GOOD[0], persistent=True, writes=(3,), rematerializations=())))


def test_where_a_tensor_is_idle_or_found_is_looked_up_by_stage() -> None:
    for seed in range(20):
        made = random_problem(seed)
        for i, tensor in enumerate(made.tensors):
            idle = {
                s % made.size: g for g in made.gaps_of[i] for s in range(made.gaps[g].after + 1, made.gaps[g].before)
            }
            assert [made.gap_at(i, s) for s in range(made.size)] == [idle.get(s) for s in range(made.size)]
            assert made.found_versions[i] == {s: tensor.version_before(s) for s in tensor.accesses}
