"""Rows expressed by their changes have the same solutions as rows written in full, in fewer terms."""

import numpy as np
import pytest

from port_planner.milp.highs import HighsSession, LinearModel, SolverStatus
from port_planner.milp.telescoped import run_relaxed, telescoped

COLUMNS, ROWS = 90, 60


def sliding(seed: int, *, integral: bool) -> LinearModel:
    """Return a model whose rows hold forty columns each, of which a few are others from row to
    row, and short rows between.
    """
    rng = np.random.default_rng(seed)
    model = LinearModel()
    for k in range(COLUMNS):
        model.column(f"x({k})", cost=-float(rng.integers(1, 9)), integral=integral and k % 3 == 0)
    sizes = rng.integers(1, 9, COLUMNS)
    for row in range(ROWS):
        start = row // 2
        taken = range(start, start + 40)
        model.row(f"memory({row})", [(k, float(sizes[k])) for k in taken], -np.inf, float(rng.integers(50, 90)))
        model.row(f"short({row})", [(row, 1.0), (row + 1, 1.0)], 0.0, 1.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("integral", [True, False])
def test_the_optimum_is_the_same_in_fewer_terms(seed: int, integral: bool) -> None:
    model = sliding(seed, integral=integral)
    summed = telescoped(model)
    assert len(summed.index) < len(model.index) / 2
    assert (summed.names[:COLUMNS], summed.row_names) == (model.names, model.row_names)
    found = [HighsSession(one, relaxed=not integral).run(20.0, gap=0.0) for one in (model, summed)]
    assert all(run.status is SolverStatus.OPTIMAL and run.values is not None for run in found)
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-9)
    values = found[1].values
    assert values is not None
    for row in range(model.rows):
        part = slice(model.row_start[row], model.row_start[row + 1])
        total = float(np.array(model.value[part]) @ values[np.array(model.index[part])])
        assert model.row_lower[row] - 1e-6 <= total <= model.row_upper[row] + 1e-6


def test_what_is_impossible_stays_so_and_short_rows_stay_as_they_are() -> None:
    model = LinearModel(offset=2.0)
    model.column("x", cost=-1.0)
    model.row("short", [(0, 2.0)], -np.inf, 1.0)
    summed = telescoped(model)
    assert (summed.columns, list(summed.index), summed.row_upper) == (1, [0], [1.0])
    assert HighsSession(summed, relaxed=True).run(1.0).objective == pytest.approx(1.5)
    model.row("none", [], 1.0, 2.0)
    assert HighsSession(telescoped(model)).run(1.0).status is SolverStatus.INFEASIBLE


def test_reduced_costs_bound_what_raising_a_column_costs() -> None:
    model = sliding(1, integral=False)
    summed = run_relaxed(model, 20.0)
    assert summed.reduced_costs is not None and summed.values is not None
    assert len(summed.values) == len(summed.reduced_costs) == COLUMNS
    assert summed.bound == pytest.approx(HighsSession(model, relaxed=True).run(20.0).bound, rel=1e-9)
    dear = [k for k in range(COLUMNS) if summed.values[k] < 1e-9 and summed.reduced_costs[k] > 1e-6]
    assert dear
    for column in dear[:10]:
        session = HighsSession(model, relaxed=True)
        session.bound_columns([column], np.ones(1), np.ones(1))
        raised = session.run(20.0)
        lowest = summed.bound + summed.reduced_costs[column] - 1e-6
        assert raised.status is SolverStatus.INFEASIBLE or raised.objective >= lowest
