"""A model whose long rows are expressed by what changes from one to the next: the same solutions with far fewer terms.

What a step holds is a sum of hundreds of tensors in each of thousands of stages, and few change from one stage to the
next. A column for that sum, which is the previous one plus the changes, replaces the row. This is the recursion of
the bytes in memory U[t] = U[t-1] + born - freed of POET (Patil et al. 2022) and Checkmate (Jain et al. 2020), found
in rows that were written out.
"""

from dataclasses import replace

import numpy as np

from port_planner.milp.highs import INFINITY, HighsSession, LinearModel, SolverRun

_MIN_TERMS = 32
"""Terms of a row: shorter ones are fast enough, and a solver finds cuts in them."""

_CHANGED = 1 / 2
"""Largest share of a row's terms that may change: a row with less in common with the previous one is written out."""


def run_relaxed(model: LinearModel, time_limit_s: float) -> SolverRun:
    """Solve a model as if no column were integral; return the result for its own columns."""
    run = HighsSession(telescoped(model), relaxed=True).run(time_limit_s)
    own = slice(model.columns)
    return replace(
        run,
        values=None if run.values is None else run.values[own],
        reduced_costs=None if run.reduced_costs is None else run.reduced_costs[own],
    )


def telescoped(model: LinearModel) -> LinearModel:
    """Return the same model with such rows; its own columns come first, and additional ones are not integral."""
    summed = LinearModel(
        list(model.names),
        list(model.cost),
        list(model.lower),
        list(model.upper),
        list(model.integral),
        impossible=dict(model.impossible),
        offset=model.offset,
    )
    changes = _changes(model)
    followed = {before for before, _ in changes.values()}
    sums = dict[int, int]()
    for row, name in enumerate(model.row_names):
        if row not in changes and row not in followed:
            summed.row(name, _terms(model, row), model.row_lower[row], model.row_upper[row])
            continue
        sums[row] = summed.column(f"sum({name})", upper=model.row_upper[row])
        summed.lower[sums[row]] = -INFINITY
        if row in changes:
            before, changed = changes[row]
            terms = [*changed, (sums[before], 1.0)]
        else:
            terms = _terms(model, row)
        summed.row(name, [*terms, (sums[row], -1.0)], 0.0, 0.0)
    return summed


def _terms(model: LinearModel, row: int) -> list[tuple[int, float]]:
    part = slice(model.row_start[row], model.row_start[row + 1])
    return list(zip(model.index[part], model.value[part], strict=True))


def _changes(model: LinearModel) -> dict[int, tuple[int, list[tuple[int, float]]]]:
    """Return, for each long row that shares most terms with the previous long row, that row and the changes since."""
    index, value = np.frombuffer(model.index, np.int32), np.frombuffer(model.value)
    found = dict[int, tuple[int, list[tuple[int, float]]]]()
    before, before_columns = -1, np.zeros(0, np.int32)
    had, has_now = np.zeros(model.columns), np.zeros(model.columns, bool)
    for row in range(model.rows):
        begin, end = model.row_start[row], model.row_start[row + 1]
        if end - begin < _MIN_TERMS or model.row_lower[row] != -INFINITY:
            continue
        columns, factors = index[begin:end], value[begin:end]
        has_now[columns] = True
        gone = before_columns[~has_now[before_columns]]
        has_now[columns] = False
        changed = factors != had[columns]
        which = np.concatenate((columns[changed], gone))
        if len(which) <= _CHANGED * len(columns):
            by = np.concatenate((factors[changed] - had[columns[changed]], -had[gone]))
            found[row] = before, list(zip(which.tolist(), by.tolist(), strict=True))
        had[gone], had[columns] = 0.0, factors
        before, before_columns = row, columns
    return found
