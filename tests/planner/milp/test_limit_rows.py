"""eq8 and eq9: a schedule passes exactly where the replay finds it in time and within the day's writes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from port_planner.milp.highs import HighsSession, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import Problem, Schedule, Semantics
from port_planner.problem.replay import replay
from tests.planner.milp.pinned import EXACT, allowed, problems, some_schedules, without


def barely_short(problem: Problem, **limits: float | None) -> Problem:
    """Return the problem with these limits alone, and memory that is short by a byte if nothing is decided."""
    least = max(replay(problem, Schedule()).peak_bytes - 1, 1)
    changes: dict[str, Any] = {"ram_bytes": least, "deadline_s": None, "write_limit_bytes": None, **limits}
    return replace(problem, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_a_deadline_passes_what_takes_that_long_and_nothing_longer(semantics: Semantics) -> None:
    tried = 0
    for problem in problems(semantics):
        free = barely_short(problem)
        for schedule in some_schedules(Formulation(free, EXACT), 8):
            found = replay(free, schedule)
            if not found.valid or found.seconds <= free.base_seconds:
                continue
            tried += 1
            for seconds, in_time in ((found.seconds, True), (found.seconds * (1 - 1e-4), False)):
                held = Formulation(replace(free, deadline_s=seconds), EXACT)
                if held.start_values(schedule) is None:
                    assert not in_time, "a rematerialization that alone takes too long is not offered"
                    continue
                assert allowed(held, schedule) is in_time
                assert allowed(held, schedule, without(held.model, "eq8_deadline"))
    assert tried > 8


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_deadline_below_the_step_itself_is_named_with_what_is_missing(share: float) -> None:
    problem = next(p for p in problems() if p.base_seconds > 0)
    formulation = Formulation(barely_short(problem, deadline_s=share * problem.base_seconds), EXACT)
    assert HighsSession(formulation.model).run(1.0).status is SolverStatus.INFEASIBLE
    if "eq8_deadline" in formulation.model.impossible:
        missing = formulation.model.impossible["eq8_deadline"] * formulation.second_scale
        assert missing == pytest.approx((1 - share) * problem.base_seconds)
    else:
        assert "eq8_deadline" in formulation.model.row_names


@pytest.mark.slow
def test_wear_passes_what_is_written_and_not_a_byte_more() -> None:
    tried = 0
    for problem in problems(packing=False):
        free = barely_short(problem)
        for schedule in some_schedules(Formulation(free, EXACT), 10):
            found = replay(free, schedule)
            if not found.valid or not found.written_bytes:
                continue
            tried += 1
            for limit, passes in ((found.written_bytes, True), (found.written_bytes - 1, False)):
                held = Formulation(replace(free, write_limit_bytes=float(limit)), EXACT)
                assert allowed(held, schedule) is passes
                assert allowed(held, schedule, without(held.model, "eq9_wear"))
    assert tried > 5


def test_without_a_limit_there_is_no_row() -> None:
    for problem in problems(count=4):
        model = Formulation(barely_short(problem), EXACT).model
        assert not {"eq8_deadline", "eq9_wear"} & {*model.row_names, *model.impossible}


def test_a_bound_counts_only_a_rematerializations_own_share_of_time() -> None:
    """Operators that bring back several tensors in passing are paid once between them."""
    problem = next(p for p in problems(packing=False) if p.base_seconds > 0 and _dear(p))
    tensors = tuple(
        replace(t, paging=(), rematerializations=tuple(r and replace(r, own_share=0.5) for r in t.rematerializations))
        for t in problem.tensors
    )
    free = barely_short(replace(problem, tensors=tensors))
    schedules = [s for s in some_schedules(Formulation(free, EXACT)) if replay(free, s).valid and s.choices]
    for schedule in schedules:
        took = replay(free, schedule).recompute_seconds
        held = replace(free, deadline_s=free.base_seconds + 0.6 * took)
        bound = Formulation(held, replace(EXACT, optimistic=True))
        assert bound.start_values(schedule) is not None and (took == 0 or allowed(bound, schedule))
    assert any(replay(free, schedule).recompute_seconds for schedule in schedules)


def _dear(problem: Problem) -> bool:
    free = barely_short(replace(problem, tensors=tuple(replace(t, paging=()) for t in problem.tensors)))
    found = [replay(free, s) for s in some_schedules(Formulation(free, EXACT))]
    return bool(np.any([one.valid and one.recompute_seconds > 0 for one in found]))
