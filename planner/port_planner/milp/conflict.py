"""Which rows make a model infeasible, and by how much: an elastic phase over the limits that a user can change."""

import enum
from array import array
from dataclasses import dataclass, replace

import numpy as np

from port_planner.base.units import format_bytes, format_seconds
from port_planner.milp.columns import Columns
from port_planner.milp.highs import HighsSession, LinearModel, SolverStatus

LEAST = 1e-6
"""Smallest violation in the model's units (percent of its budget): a row missed by less counts as met."""


class Limit(enum.Enum):
    """The subject of a row's limit; the value is the prefix of the row's name."""

    MEMORY_BEFORE = "eq5_memory_before"
    MEMORY_IN_STAGE = "eq5_in_stage"
    MEMORY_AFTER = "eq6_memory_after"
    DEADLINE = "eq8_deadline"
    WEAR = "eq9_wear"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A limit that cannot be kept: the row's name, and by how much it is missed, in bytes or seconds."""

    row: str
    limit: Limit
    amount: float

    def __str__(self) -> str:
        seconds = self.limit is Limit.DEADLINE
        return f"{self.row} by {format_seconds(self.amount) if seconds else format_bytes(round(self.amount))}"


def shortfalls(f: Columns, time_limit_s: float) -> tuple[Shortfall, ...]:
    """Return the limits that the relaxed model misses, the worst first; their sum is as small as possible.

    Empty if the relaxation meets them all, or if the time was too short. Then whole decisions, or what lowering adds,
    are the cause, and no row can be named. Solves one LP.
    """
    elastic, slack_of = _elastic(f.model)
    run = HighsSession(elastic, relaxed=True).run(time_limit_s)
    missed = dict(f.model.impossible)
    if run.status is SolverStatus.OPTIMAL and run.values is not None:
        missed |= {name: float(run.values[v]) for name, v in slack_of.items()}
    found = [
        Shortfall(name, limit, amount * (f.second_scale if limit is Limit.DEADLINE else f.byte_scale))
        for name, amount in missed.items()
        if amount > LEAST and (limit := _limit_of(name)) is not None
    ]
    return tuple(sorted(found, key=lambda s: (-s.amount, s.row)))


def _elastic(model: LinearModel) -> tuple[LinearModel, dict[str, int]]:
    """Return the model with every limit missed at a price and all else free, and the column that misses each limit."""
    elastic = replace(
        model, names=model.names.copy(), cost=[0.0] * model.columns, lower=model.lower.copy(),
        upper=model.upper.copy(), integral=model.integral.copy(), row_start=[0], index=array("i"), value=array("d"),
        row_lower=[], row_upper=[], row_names=[], impossible={},
    )  # fmt: skip
    slack_of: dict[str, int] = {}
    for r, name in enumerate(model.row_names):
        part = slice(model.row_start[r], model.row_start[r + 1])
        terms = list(zip(model.index[part], model.value[part], strict=True))
        if _limit_of(name) is not None:
            slack_of[name] = elastic.column(f"missed({name})", 1.0, np.inf)
            terms.append((slack_of[name], -1.0))
        elastic.row(name, terms, model.row_lower[r], model.row_upper[r])
    return elastic, slack_of


def _limit_of(name: str) -> Limit | None:
    stem = name.partition("(")[0]
    return next((limit for limit in Limit if limit.value == stem), None)
