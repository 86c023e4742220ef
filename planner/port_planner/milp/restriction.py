"""Remove what decided columns determine from a model: the optimum stays the same, with far fewer rows and columns.

A solver's own presolve finds this too, but goes through the whole model each time. Three rules, until none
applies: a column with equal bounds is a number, a row in one column is a bound, and a row implied by its
columns' bounds is dropped.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from port_planner.milp.highs import LinearModel, Vector

TOLERANCE = 1e-9
"""Largest amount by which a row may be missed, in the model's units: rounding in its sum. HiGHS allows 1e-6."""

BROKEN = 1e-6
"""Largest distance of an integral column's bound from a whole number, as in HiGHS."""

_BLOCK = 1 << 18
"""Entries at a time, out of millions, most of them decided: copies of all of them took 90 MiB."""

_Columns = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RestrictedModel:
    """The undecided part: `model`, whose columns are `columns` of the whole one; the others have their `values`."""

    model: LinearModel
    columns: _Columns
    values: Vector

    def start(self, values: dict[int, float]) -> dict[int, float]:
        """Return the values of the remaining columns, from values of the whole model's columns."""
        places = {int(column): place for place, column in enumerate(self.columns)}
        return {places[column]: value for column, value in values.items() if column in places}

    def whole(self, values: Vector) -> Vector:
        """Return the values of the whole model's columns, from those of the remaining ones."""
        found = self.values.copy()
        found[self.columns] = values
        return found


class Restriction:
    """A model as arrays, from which parts are taken in turn."""

    def __init__(self, model: LinearModel) -> None:
        starts = np.asarray(model.row_start, dtype=np.int32)
        self._row = np.repeat(np.arange(model.rows, dtype=np.int32), starts[1:] - starts[:-1])
        self._column = np.asarray(model.index, dtype=np.int32)
        self._factor = np.asarray(model.value, dtype=float)
        self._cost = np.asarray(model.cost, dtype=float)
        self._lower, self._upper = np.asarray(model.lower, dtype=float), np.asarray(model.upper, dtype=float)
        self._row_lower, self._row_upper = np.asarray(model.row_lower), np.asarray(model.row_upper)
        self._integral = np.asarray(model.integral, dtype=bool)
        self._impossible = dict(model.impossible)

    def limit_row(self, row: int, upper: float) -> float:
        """Set a row's upper limit and return the previous one."""
        had = float(self._row_upper[row])
        self._row_upper[row] = upper
        return had

    def row_value(self, row: int, values: Vector) -> float:
        """Return the value of a row."""
        own = self._row == row
        return float(self._factor[own] @ values[self._column[own]])

    def bounded(self, columns: Sequence[int], lower: Vector, upper: Vector) -> RestrictedModel:
        """Return the rest of the model if `columns` have these bounds and the others their own."""
        part = _Part(
            self._row,
            self._column,
            self._factor,
            self._lower.copy(),
            self._upper.copy(),
            self._row_lower,
            self._row_upper,
            self._integral,
        )
        part.lower[columns], part.upper[columns] = lower, upper
        while part.reduced():
            pass
        return self._left(part)

    def _left(self, part: "_Part") -> RestrictedModel:
        used = np.zeros(len(self._cost), dtype=bool)
        used[part.column] = True
        # Columns in no row take their cheapest value; one without a cheapest is left for the solver to report.
        cheapest = np.where(self._cost < 0, part.upper, part.lower)
        used |= ~np.isfinite(cheapest)
        columns, rows = np.flatnonzero(used), np.unique(part.row)
        values = np.where(used, 0.0, cheapest)
        lengths = np.bincount(np.searchsorted(rows, part.row), minlength=len(rows))
        model = LinearModel(
            cost=self._cost[columns].tolist(),
            lower=part.lower[columns].tolist(),
            upper=part.upper[columns].tolist(),
            integral=self._integral[columns].tolist(),
            row_start=[0, *np.cumsum(lengths).tolist()],
            index=array("i", np.searchsorted(columns, part.column).astype(np.int32).tobytes()),
            value=array("d", part.factor.tobytes()),
            row_lower=part.row_lower[rows].tolist(),
            row_upper=part.row_upper[rows].tolist(),
            impossible=self._impossible | {f"row {row}": missed for row, missed in part.missed.items()},
            offset=float(self._cost @ values),
        )
        return RestrictedModel(model, columns, values)


class _Part:
    """The entries of undecided rows and columns, and their bounds."""

    def __init__(
        self,
        row: npt.NDArray[np.int32],
        column: npt.NDArray[np.int32],
        factor: Vector,
        lower: Vector,
        upper: Vector,
        row_lower: Vector,
        row_upper: Vector,
        integral: npt.NDArray[np.bool_],
    ) -> None:
        self.row, self.column, self.factor = row, column, factor
        self.lower, self.upper = lower, upper
        self.row_lower, self.row_upper, self.integral = row_lower, row_upper, integral
        self.missed: dict[int, float] = {}
        """Rows that no values within the bounds satisfy, and by how much they are missed."""

    def reduced(self) -> bool:
        """Apply the rules once; return whether there may be more to find."""
        decided = self.upper - self.lower <= TOLERANCE
        self._substitute(decided)
        rows = len(self.row_lower)
        at_lower, at_upper = self.factor * self.lower[self.column], self.factor * self.upper[self.column]
        least = np.bincount(self.row, np.minimum(at_lower, at_upper), rows)
        most = np.bincount(self.row, np.maximum(at_lower, at_upper), rows)
        short = np.maximum(least - self.row_upper, self.row_lower - most)
        for row in np.flatnonzero(short > TOLERANCE):
            self.missed[int(row)] = float(short[row])
        kept = (most <= self.row_upper + TOLERANCE) & (least >= self.row_lower - TOLERANCE)
        single = ~kept & (np.bincount(self.row, minlength=rows) == 1)
        self._bound(single[self.row])
        gone = kept | single
        self._keep(~gone[self.row])
        self.row_lower[gone], self.row_upper[gone] = -np.inf, np.inf
        return not self.missed and bool((self.upper - self.lower <= TOLERANCE)[self.column].any())

    def _substitute(self, decided: npt.NDArray[np.bool_]) -> None:
        """Remove decided columns from the rows."""
        known, number = decided[self.column], np.zeros(len(self.row_lower))
        for begin in range(0, len(known), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            row, column, factor = (entries[part][known[part]] for entries in (self.row, self.column, self.factor))
            number += np.bincount(row, factor * self.lower[column], len(number))
        self.row_lower, self.row_upper = self.row_lower - number, self.row_upper - number
        self._keep(~known)

    def _bound(self, entries: npt.NDArray[np.bool_]) -> None:
        """Turn rows that have only these entries into bounds."""
        row, column, factor = self.row[entries], self.column[entries], self.factor[entries]
        ends = self.row_lower[row] / factor, self.row_upper[row] / factor
        np.maximum.at(self.lower, column, np.minimum(*ends))
        np.minimum.at(self.upper, column, np.maximum(*ends))
        whole = column[self.integral[column]]  # with fractional bounds, HiGHS reports other than the best as optimal
        self.lower[whole], self.upper[whole] = np.ceil(self.lower[whole] - BROKEN), np.floor(self.upper[whole] + BROKEN)
        for row_number, short in zip(row.tolist(), (self.lower - self.upper)[column].tolist(), strict=True):
            if short > TOLERANCE:
                self.missed[row_number] = short

    def _keep(self, entries: npt.NDArray[np.bool_]) -> None:
        self.row, self.column, self.factor = self.row[entries], self.column[entries], self.factor[entries]
