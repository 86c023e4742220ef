"""A bound's rematerializations find their inputs somewhere in their gap: it is higher for that,
and never above the optimum.
"""

from dataclasses import replace

import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import Problem, Rematerialization, Semantics, Stage, Tensor
from port_planner.search.anytime import SMALLEST
from tests.planner.brute_force import cheapest, random_problem, with_a_weight

ALONE = replace(SMALLEST, sources=False)


def bound(problem: Problem, breadth: Breadth = SMALLEST) -> float | None:
    """Return the joules that the relaxation says; None where it has no solution."""
    formulation = Formulation(problem, breadth)
    run = HighsSession(formulation.model, relaxed=True).run(10.0)
    return run.bound * formulation.joule_scale if run.status is SolverStatus.OPTIMAL else None


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_no_schedule_beats_the_bound_and_it_is_often_higher_than_without_inputs(
    semantics: Semantics, *, weight: bool
) -> None:
    higher = 0
    for seed in range(60):
        problem = random_problem(seed, semantics=semantics, packing=seed % 3 == 0)
        if weight:
            problem = with_a_weight(problem, seed)
        best, complete = cheapest(problem, most=2000)
        if best is None or not complete:
            continue
        found, alone = bound(problem), bound(problem, ALONE)
        assert found is not None and alone is not None, seed
        assert alone - 1e-6 <= found <= best + 1e-6, seed
        higher += found > alone + 1e-6
    assert higher > 0 or semantics is Semantics.REAL


def passing(count: int, *, room: int) -> Problem:
    """Return a forward pass of `count` pairs, of which the second is made of the first and read in the
    backward pass; no first is.

    Making a second again takes a joule, and what it is made of is gone by then: three joules more.
    """
    size = 3 * count
    tensors = []
    for i in range(count):
        first = Tensor(f"a{i}", 1, (2 * i, 2 * i + 1), (2 * i,), False, (Rematerialization(3.0, 3.0, ()),))
        again = Rematerialization(1.0, 1.0, ((2 * i, 0),))
        second = Tensor(f"b{i}", 1, (2 * i + 1, size - 1 - i), (2 * i + 1,), False, (again,))
        tensors += [first, second]
    return Problem(tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(size)), tuple(tensors), room)


@pytest.mark.slow
def test_what_is_gone_is_made_again_on_the_way_to_others() -> None:
    problem = passing(4, room=3)
    best, complete = cheapest(problem)
    alone, found = bound(problem, ALONE), bound(problem)
    assert complete and best is not None and alone is not None and found is not None
    assert found <= best + 1e-6
    assert found == pytest.approx(4 * alone), "three joules for each joule"


def test_what_has_no_source_at_all_is_not_made_again() -> None:
    problem = passing(2, room=2)
    first, second, *others = problem.tensors
    gone = replace(first, rematerializations=(None,))
    lost = replace(problem, tensors=(gone, second, *others))
    formulation = Formulation(lost, SMALLEST)
    own = [columns for g, columns in formulation.gaps.items() if lost.gaps[g].tensor == 1]
    remade = [v for columns in own for v in columns.recompute.values()]
    rows = {name for name in formulation.model.row_names if name.startswith("eq3_sources")}
    assert remade and {f"eq3_sources({formulation.model.names[v]},0)" for v in remade} <= rows
    run = HighsSession(formulation.model, relaxed=True).run(10.0)
    assert run.values is None or all(run.values[v] < 1e-9 for v in remade)
