"""eq1 to eq4: one decision per gap; resident after return; inputs resident; contents written once."""

from dataclasses import replace

import numpy as np
import pytest

from port_planner.milp.highs import HighsSession, SolverStatus
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import GapDecision, Paging, Problem, Schedule, Stage, Tensor
from port_planner.problem.replay import replay
from tests.planner.milp.pinned import EXACT, allowed, pinned, problems, some_schedules, unlimited, without


def barely_short(problem: Problem) -> Problem:
    """Return the problem with a budget just below what keeping all takes: only then is anything decided."""
    return replace(unlimited(problem), ram_bytes=max(replay(problem, Schedule()).peak_bytes - 1, 1))


def test_a_gap_without_a_fate_and_one_with_two_are_no_solutions() -> None:
    formulation = next(
        f
        for f in (Formulation(barely_short(p), EXACT) for p in problems())
        if any(c.recompute for c in f.gaps.values())
    )
    columns = next(columns for columns in formulation.gaps.values() if columns.recompute)
    keep, (some, *_) = columns.keep, columns.recompute.values()
    own = [keep, *columns.recompute.values(), *columns.page.values()]
    own += columns.packing()
    for chosen in ([], [keep, some]):
        for model, ends in (
            (formulation.model, SolverStatus.INFEASIBLE),
            (without(formulation.model, "eq1_one_decision", "eq2_presence"), SolverStatus.OPTIMAL),
        ):
            session = HighsSession(model)
            values = np.array([float(c in chosen) for c in own])
            session.bound_columns(own, values, values)
            assert session.run(10.0).status is ends, chosen


@pytest.mark.slow
def test_a_tensor_is_there_from_its_return_to_its_next_use() -> None:
    looked = 0
    for problem in problems():
        formulation = Formulation(barely_short(problem), EXACT)
        for schedule in some_schedules(formulation, 10):
            run = pinned(formulation, schedule)
            if run.values is None:
                continue
            chosen = {choice.gap: choice for choice in schedule.choices}
            for g, columns in formulation.gaps.items():
                choice = chosen.get(g)
                for s, column in columns.presence.items():
                    looked += 1
                    here = choice is None or (
                        choice.decision not in (GapDecision.PACK, GapDecision.PACK_PAGE) and s >= choice.stage
                    )
                    assert run.values[column] == pytest.approx(float(here), abs=1e-6)
    assert looked > 50


@pytest.mark.slow
def test_a_rematerialization_without_an_input_is_forbidden_by_the_row_of_inputs_alone() -> None:
    forbidden = 0
    for problem in problems():
        formulation = Formulation(barely_short(problem), EXACT)
        for schedule in some_schedules(formulation, 20):
            lacking = replace(schedule, intermediates=())
            errors = replay(formulation.problem, lacking).errors
            if not errors or any("input" not in error for error in errors):
                continue
            forbidden += 1
            assert not allowed(formulation, lacking)
            assert allowed(formulation, lacking, without(formulation.model, "eq3_inputs"))
    assert forbidden > 5


@pytest.mark.slow
def test_contents_are_written_once_however_often_they_are_read() -> None:
    looked = 0
    for problem in problems(packing=False):
        formulation = Formulation(barely_short(problem), EXACT)
        for schedule in some_schedules(formulation, 10):
            run, found = pinned(formulation, schedule), replay(formulation.problem, schedule)
            if run.values is None or not found.valid:
                continue
            looked += bool(found.written_bytes)
            tensors = formulation.problem.tensors
            written = sum(tensors[i].nbytes * run.values[v] for (i, _, _), v in formulation.page_out.items())
            assert written == pytest.approx(found.written_bytes, abs=1e-6)
    assert looked > 5


@pytest.mark.parametrize(("writes", "written"), [((), 0), ((3,), 10)])
def test_a_weight_that_is_not_changed_is_not_written(writes: tuple[int, ...], written: int) -> None:
    stages = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(8))
    weight = Tensor("w", 10, (0, 3), writes, True, (None,) * len(writes), (Paging(0, 0.1, 0.1, 1.0, 1.0),))
    busy = Tensor("busy", 10, (5, 6), (5,), rematerializations=(None,))
    formulation = Formulation(Problem(stages, (weight, busy), 19), EXACT)
    run = HighsSession(formulation.model).run(10.0)
    assert run.values is not None
    found = replay(formulation.problem, formulation.schedule(run.values))
    assert found.valid and found.read_bytes == 10 and found.written_bytes == written
    assert len(formulation.page_out) == len(writes)
