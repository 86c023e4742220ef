"""What decisions hold in each stage, noted by what changes from one stage to the next, and the rows that limit it.

Of hundreds of tensors that are idle in a stage, few come or go before the next: the recursion of the bytes in memory U of POET (Patil
et al. 2022) and Checkmate (Jain et al. 2020). What the rows say is the sum all the same.
"""

from array import array
from collections import defaultdict

import numpy as np

from port_planner.milp.columns import Term
from port_planner.milp.highs import LinearModel

_ROUNDING = 1e-12
"""Relative: of sums that reach a limit and do not pass it."""


class HeldBytes:
    """Bytes that columns stand for, by stage. The step goes round: stage `size` is the first one of the next step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changes: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(size + 1)]

    def add(self, column: int, nbytes: int, first: int, end: int) -> None:
        """Note that a column stands for bytes from stage `first` to the one before `end`, at most once around."""
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
        """Return the columns that stand for more bytes, or fewer, in a stage than in the one before, and how many."""
        return [(column, nbytes) for column, nbytes in self._changes[stage].items() if nbytes]


class HeldRows:
    """Writes rows: what is held in a stage, with further terms and what is fixed, is at most the limit; bytes are scaled.

    Of rows with the same terms only the one with the highest fixed load says something, and none that cannot be broken does.
    """

    def __init__(self, model: LinearModel, byte_scale: float, limit: float) -> None:
        self._model, self._byte_scale, self._limit = model, byte_scale, limit
        self._upper = np.array(model.upper)
        self._held: dict[int, int] = {}
        self._offered: dict[tuple[Term, ...], tuple[float, str]] = {}

    @property
    def held(self) -> list[Term]:
        """What is held in the stage that rows are offered for."""
        return [(column, nbytes / self._byte_scale) for column, nbytes in self._held.items()]

    def advance(self, changes: list[tuple[int, int]]) -> None:
        """Go on to a stage before which this changes; rows of the stages before are written."""
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
        """Offer the row of what is held and `further` terms beside a fixed load."""
        key = tuple(further)
        if key not in self._offered or self._offered[key][0] < load:
            self._offered[key] = load, name

    def write(self) -> None:
        """Write what was offered since something changed last."""
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
