"""Small models whose optimum is known, and what a run says when it finds none."""

from pathlib import Path

import numpy as np
import pytest

from port_planner.milp.highs import HighsSession, LinearModel, ModelFileError, SolverStatus


def knapsack() -> LinearModel:
    """Return max 5a + 4b + 3c with 2a + 3b + c <= 4, as a minimum: the LP takes b in part, whole numbers a and c."""
    model = LinearModel()
    columns = [model.column(name, -value, integral=True) for name, value in (("a", 5.0), ("b", 4.0), ("c", 3.0))]
    model.row("room", zip(columns, (2.0, 3.0, 1.0), strict=True), -np.inf, 4.0)
    return model


def test_a_model_is_solved_to_its_optimum() -> None:
    run = HighsSession(knapsack()).run(10.0)
    assert run.status is SolverStatus.OPTIMAL and run.values is not None
    assert np.round(run.values).tolist() == [1, 0, 1]
    assert run.objective == pytest.approx(-8.0) and run.bound == pytest.approx(-8.0) and run.reduced_costs is None


def test_relaxed_it_bounds_and_prices_what_it_leaves_out() -> None:
    run = HighsSession(knapsack(), relaxed=True).run(10.0)
    assert run.values is not None and run.values.tolist() == pytest.approx([1, 1 / 3, 1])
    assert run.bound == run.objective == pytest.approx(-8 - 4 / 3)
    assert run.reduced_costs is not None and run.reduced_costs.tolist() == pytest.approx([-7 / 3, 0, -5 / 3])


def test_bounds_change_between_runs_and_back() -> None:
    session = HighsSession(knapsack())
    session.bound_columns([0], np.zeros(1), np.zeros(1))
    assert session.run(10.0).objective == pytest.approx(-7.0)
    session.bound_columns([0], np.zeros(1), np.ones(1))
    assert session.run(10.0).objective == pytest.approx(-8.0)
    session.bound_columns([], np.zeros(0), np.zeros(0))
    session.bound_columns([0, 1], np.ones(2), np.ones(2))
    assert session.run(10.0).status is SolverStatus.INFEASIBLE


def test_columns_that_repeat_in_a_row_are_added_up() -> None:
    model = LinearModel()
    x = model.column("x", -1.0, upper=np.inf)
    model.row("r", [(x, 1.0), (x, 1.0)], -np.inf, 6.0)
    assert ([*model.index], [*model.value], model.row_start) == ([x], [2.0], [0, 1])
    assert HighsSession(model).run(10.0).objective == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("lower", "upper", "missed"), [(0.0, 0.0, None), (-np.inf, 1e-10, None), (2.0, 5.0, 2.0), (-np.inf, -3.0, 3.0)]
)
def test_a_row_without_variables_holds_or_makes_the_model_impossible(
    lower: float, upper: float, missed: float | None
) -> None:
    model = knapsack()
    model.row("known", [(0, 1.0), (0, -1.0)], lower, upper)
    assert model.rows == 1 and model.impossible == ({} if missed is None else {"known": missed})
    run = HighsSession(model).run(10.0)
    assert run.status is (SolverStatus.OPTIMAL if missed is None else SolverStatus.INFEASIBLE)
    assert missed is None or (run.values is None and run.bound == np.inf)


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_model_without_anything_to_decide_is_solved(relaxed: bool) -> None:
    model = LinearModel()
    model.row("holds", [], -1.0, 1.0)
    run = HighsSession(model, relaxed=relaxed).run(10.0)
    assert (run.status, run.objective, run.bound) == (SolverStatus.OPTIMAL, 0.0, 0.0)
    assert run.values is not None and len(run.values) == 0


def hard(count: int = 40) -> LinearModel:
    """Return a model on which HiGHS does not finish at once: equal sums out of odd numbers."""
    rng = np.random.default_rng(3)
    model = LinearModel()
    weights = rng.integers(10**5, 10**6, (6, count)).astype(float)
    columns = [model.column(f"x{i}", float(rng.integers(1, 9)), integral=True) for i in range(count)]
    for r, row in enumerate(weights):
        half = float(row.sum() // 2)
        model.row(f"r{r}", zip(columns, row, strict=True), half - 2e4, half + 2e4)
    return model


def test_a_start_is_what_is_found_where_there_is_no_time_for_more() -> None:
    model = knapsack()
    session = HighsSession(model)
    session.start_from({0: 0.0, 1: 1.0, 2: 1.0})
    run = session.run(10.0, node_limit=0)
    assert run.values is not None and run.objective <= -7.0 + 1e-9


def test_out_of_time_the_bound_stands_and_nothing_is_claimed() -> None:
    run = HighsSession(hard()).run(0.01)
    assert run.status in (SolverStatus.NOTHING, SolverStatus.FEASIBLE)
    assert (run.values is None) is (run.status is SolverStatus.NOTHING)
    assert run.bound <= run.objective


@pytest.mark.slow
def test_within_the_gap_it_stops_and_the_same_model_gives_the_same() -> None:
    def solve() -> list[float]:
        rng = np.random.default_rng(5)
        model = LinearModel()
        columns = [model.column(f"x{i}", -float(rng.integers(10, 99)), integral=True) for i in range(50)]
        for r in range(5):
            model.row(f"r{r}", zip(columns, rng.integers(10, 99, 50).astype(float), strict=True), -np.inf, 900.0)
        run = HighsSession(model).run(20.0, gap=1e-2)
        assert run.values is not None and run.objective - run.bound <= 1e-2 * abs(run.objective) + 1e-6
        values: list[float] = run.values.tolist()
        return values

    assert solve() == solve()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"the model could not be written to .*nowhere/model.lp: "):
        HighsSession(knapsack()).write(tmp_path / "nowhere/model.lp")
    with pytest.raises(ModelFileError, match="Is a directory"):
        HighsSession(knapsack()).write(tmp_path)
