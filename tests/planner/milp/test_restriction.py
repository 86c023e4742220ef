"""What is left of a model where some columns are decided: the same optimum, in fewer rows and columns, at values
that the whole model allows.
"""

import numpy as np
import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession, LinearModel, SolverStatus, Vector
from port_planner.milp.milp_model import Formulation
from port_planner.milp.restriction import Restriction
from port_planner.problem.problem import Semantics
from tests.planner.brute_force import packed_pairs, random_problem, with_a_weight


def missed(model: LinearModel, values: Vector) -> float:
    """Return by how much values miss a row, a bound or a whole number the most."""
    row = np.repeat(np.arange(model.rows), np.diff(model.row_start))
    sums = np.bincount(row, np.array(model.value) * values[np.array(model.index, dtype=int)], model.rows)
    rows = np.maximum(sums - model.row_upper, np.array(model.row_lower) - sums)
    bounds = np.maximum(values - model.upper, np.array(model.lower) - values)
    whole = np.abs(values - np.round(values))[np.array(model.integral, dtype=bool)]
    return max(part.max(initial=0.0) for part in (rows, bounds, whole))


def models() -> list[LinearModel]:
    """Return models of small problems of every kind."""
    problems = [random_problem(seed, semantics=kind) for seed in range(12) for kind in Semantics]
    problems += [with_a_weight(random_problem(seed, semantics=Semantics.ELASTIC), seed) for seed in range(20, 26)]
    problems += [packed_pairs(seed) for seed in range(8)]
    return [Formulation(problem, Breadth(8, 2)).model for problem in problems]


@pytest.mark.slow
def test_the_optimum_is_that_of_the_whole_model_whatever_is_decided() -> None:
    rng, solved, impossible = np.random.default_rng(5), 0, 0
    for model in models():
        whole = HighsSession(model)
        first, restriction = whole.run(10.0, gap=0.0), Restriction(model)
        integral = np.flatnonzero(model.integral)
        for share in (0.3, 0.6, 0.9, 1.0):
            decided = integral[rng.random(len(integral)) < share]
            at = np.zeros(len(decided)) if first.values is None else np.round(first.values[decided])
            flipped = rng.random(len(decided)) < 0.05
            at = np.where(flipped, 1.0 - at, at)
            left = restriction.bounded(decided.tolist(), at, at)
            run = HighsSession(left.model).run(10.0, gap=0.0)
            whole.bound_columns(decided.tolist(), at, at)
            expected = whole.run(10.0, gap=0.0)
            whole.bound_columns(decided.tolist(), np.zeros(len(decided)), np.ones(len(decided)))
            assert run.status is expected.status
            assert left.model.columns <= model.columns - len(decided) and left.model.rows <= model.rows
            impossible += run.status is SolverStatus.INFEASIBLE
            if run.values is not None:
                assert run.objective == pytest.approx(expected.objective, rel=1e-6, abs=1e-6)
                assert missed(model, left.whole(run.values)) < 1e-5
                solved += 1
    assert solved > 60 and impossible > 20


def decided_by_rows() -> LinearModel:
    """Return a model in which one decision decides three columns, one after the other, and a fourth is free."""
    model = LinearModel()
    a, b, c, d = (
        model.column(name, cost, integral=name != "c") for name, cost in zip("abcd", (1.0, 2.0, 4.0, -8.0), strict=True)
    )
    model.row("b is a", [(b, 1.0), (a, -1.0)], 0.0, 0.0)
    model.row("c is no less than b", [(c, 1.0), (b, -1.0)], 0.0, np.inf)
    model.row("kept anyway", [(a, 1.0), (b, 1.0), (d, 1.0)], -np.inf, 3.0)
    return model


def test_what_follows_from_a_decision_is_decided_too() -> None:
    left = Restriction(decided_by_rows()).bounded([0], np.ones(1), np.ones(1))
    assert (left.model.columns, left.model.rows) == (0, 0)
    assert left.values.tolist() == [1.0, 1.0, 1.0, 1.0]
    run = HighsSession(left.model).run(1.0)
    assert (run.status, run.objective) == (SolverStatus.OPTIMAL, -1.0)
    assert run.values is not None and left.whole(run.values).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_start_keeps_what_is_left() -> None:
    left = Restriction(decided_by_rows()).bounded([3], np.zeros(1), np.zeros(1))
    assert left.columns.tolist() == [0, 1, 2] and left.start({0: 1.0, 3: 0.0}) == {0: 1.0}
    assert left.whole(np.array([1.0, 1.0, 1.0])).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_decision_that_a_row_forbids_has_no_solution() -> None:
    model = decided_by_rows()
    model.row("not both", [(0, 1.0), (1, 1.0)], -np.inf, 1.0)
    restriction = Restriction(model)
    assert (
        HighsSession(restriction.bounded([0], np.ones(1), np.ones(1)).model).run(1.0).status is SolverStatus.INFEASIBLE
    )
    assert HighsSession(restriction.bounded([0], np.zeros(1), np.zeros(1)).model).run(1.0).objective == -8.0


def test_bounds_of_whole_columns_are_whole() -> None:
    model = LinearModel()
    x, y, z = (model.column(name, -1.0, upper=3.0, integral=True) for name in "xyz")
    model.row("room", [(x, 3.0), (y, 1.0)], -np.inf, 2.0)
    model.row("both", [(x, 1.0), (z, 1.0)], -np.inf, 3.5)
    left = Restriction(model).bounded([y], np.zeros(1), np.zeros(1))
    assert left.values.tolist() == [0.0, 0.0, 3.0], "x is at most 2 / 3: nothing, and then z may be all it can"


def test_a_column_without_a_cheapest_value_is_left_to_the_solver() -> None:
    model = LinearModel()
    model.column("x", -1.0, upper=np.inf)
    left = Restriction(model).bounded([], np.zeros(0), np.zeros(0))
    assert left.columns.tolist() == [0]
    assert HighsSession(left.model).run(1.0).status is not SolverStatus.OPTIMAL


def test_a_row_may_be_given_another_limit() -> None:
    model = decided_by_rows()
    restriction = Restriction(model)
    assert restriction.row_value(2, np.array([1.0, 1.0, 0.0, 1.0])) == 3.0
    assert restriction.limit_row(2, 1.0) == 3.0 and model.row_upper[2] == 3.0
    left = restriction.bounded([0], np.ones(1), np.ones(1))
    assert HighsSession(left.model).run(1.0).status is SolverStatus.INFEASIBLE, "two of the three are one by then"
