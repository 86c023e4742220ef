"""A model whose decisions are those of one schedule: is that feasible, at what cost, and which rows forbid it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession, LinearModel, SolverRun, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import Problem, Schedule, Semantics
from tests.planner.brute_force import every_schedule, random_problem

EXACT = Breadth(exact_stages=True)
"""Every return stage, and within a stage rematerialization by rematerialization: no valid schedule is left out."""


def pinned(formulation: Formulation, schedule: Schedule, model: LinearModel | None = None) -> SolverRun:
    """Solve for what follows from the decisions of `schedule`; in `model`, if some rows were taken out."""
    start = formulation.start_values(schedule)
    assert start is not None, "the model does not offer this schedule"
    session = HighsSession(model or formulation.model)
    values = np.array([start[c] for c in start])
    session.bound_columns(list(start), values, values)
    return session.run(10.0)


def allowed(formulation: Formulation, schedule: Schedule, model: LinearModel | None = None) -> bool:
    """Return whether the model lets `schedule` pass."""
    return pinned(formulation, schedule, model).status is SolverStatus.OPTIMAL


def without(model: LinearModel, *stems: str) -> LinearModel:
    """Return the model without the rows of these names, up to their parenthesis."""
    left = LinearModel(list(model.names), list(model.cost), list(model.lower), list(model.upper), list(model.integral))
    for r, name in enumerate(model.row_names):
        if name.partition("(")[0] not in stems:
            terms = range(model.row_start[r], model.row_start[r + 1])
            pairs = [(model.index[t], model.value[t]) for t in terms]
            left.row(name, pairs, model.row_lower[r], model.row_upper[r])
    left.impossible = {name: missed for name, missed in model.impossible.items() if name.partition("(")[0] not in stems}
    return left


def unlimited(problem: Problem) -> Problem:
    """Return the problem without limits but that of memory."""
    return replace(problem, deadline_s=None, write_limit_bytes=None)


def problems(
    semantics: Semantics = Semantics.POET, *, count: int = 12, first: int = 0, packing: bool = True
) -> Iterator[Problem]:
    """Yield small random problems."""
    for seed in range(first, first + count):
        yield random_problem(seed, semantics=semantics, packing=packing)


def some_schedules(formulation: Formulation, most: int = 60) -> list[Schedule]:
    """Return schedules of all kinds that the model offers, spread over all there are."""
    every = list(islice(every_schedule(formulation.problem), 4000))
    offered = [schedule for schedule in every if formulation.start_values(schedule) is not None]
    return offered[:: max(1, len(offered) // most)]
