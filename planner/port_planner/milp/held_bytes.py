"""The bytes that decisions hold in each stage, kept as changes from stage to stage, and the rows that limit them.

Few of the hundreds of idle tensors of a stage come or go before the next. This is the recursion of the bytes in memory
U of POET (Patil et al. 2022) and Checkmate (Jain et al. 2020); the rows still state the full sum.
"""

from array import array
from collections import defaultdict

import numpy as np

from port_planner.milp.columns import Term
from port_planner.milp.highs import LinearModel

_ROUNDING = 1e-12
"""Relative tolerance for sums that reach a limit without exceeding it."""


class HeldBytes:
    """Bytes that columns stand for, by stage. The step is cyclic: stage `size` is the first of the next step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changes: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(size + 1)]

    def add(self, column: int, nbytes: int, first: int, end: int) -> None:
        """Record that a column stands for bytes from stage `first` to the one before `end`, at most once around."""
        if first >= end or not nbytes:
            return
        turns = first // self._size * self._size
        first, end = first - turns, end - turns
        self._changes[first][column] += nbytes
        if end > self._size:
            self._changes[0][column] += nbytes
            end -= self._size
        self._changes[end][column] -= nbytes

    def changes(self, stage: int) -> list[tuple[int, int]]:
        """Return the columns that stand for more or fewer bytes than in the stage before, and the differences."""
        return [(column, nbytes) for column, nbytes in self._changes[stage].items() if nbytes]


class HeldRows:
    """Writes rows: the bytes held in a stage, plus further terms and a fixed load, are at most
    the limit; bytes are scaled.

    Of rows with the same terms, only the one with the highest fixed load matters. Rows that
    cannot be broken are left out.
    """

    def __init__(self, model: LinearModel, byte_scale: float, limit: float) -> None:
        self._model, self._byte_scale, self._limit = model, byte_scale, limit
        self._upper = np.array(model.upper)
        self._held: dict[int, int] = {}
        self._offered: dict[tuple[Term, ...], tuple[float, str]] = {}

    @property
    def held(self) -> list[Term]:
        """The terms held in the stage for which rows are offered."""
        return [(column, nbytes / self._byte_scale) for column, nbytes in self._held.items()]

    def advance(self, changes: list[tuple[int, int]]) -> None:
        """Go to a stage before which this changes; rows of earlier stages are written."""
        if not changes:
            return
        self.write()
        for column, nbytes in changes:
            left = self._held.get(column, 0) + nbytes
            if left:
                self._held[column] = left
            else:
                del self._held[column]

    def offer(self, name: str, further: list[Term], load: float) -> None:
        """Offer the row of the held and `further` terms, with a fixed load."""
        key = tuple(further)
        if key not in self._offered or self._offered[key][0] < load:
            self._offered[key] = load, name

    def write(self) -> None:
        """Write the rows offered since the last change."""
        columns = np.fromiter(self._held, np.int32, len(self._held))
        factors = np.fromiter(self._held.values(), np.float64, len(self._held)) / self._byte_scale
        held = array("i", columns.tobytes()), array("d", factors.tobytes())
        max_held = float(factors @ self._upper[columns])
        for further, (load, name) in self._offered.items():
            most = max_held + sum(a * self._model.upper[v] for v, a in further if a > 0)
            if load + most <= self._limit * (1 + _ROUNDING):
                continue
            if any(v in self._held for v, _ in further):
                self._model.row(name, [*self.held, *further], -np.inf, self._limit - load)
            else:
                self._model.row(name, further, -np.inf, self._limit - load, *held)
        self._offered.clear()
