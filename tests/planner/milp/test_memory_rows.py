"""eq5, eq6 and eq10: a schedule passes exactly where the replay finds room for it."""

from dataclasses import replace

import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import (
    GapDecision,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Slicing,
    Stage,
    Tensor,
)
from port_planner.problem.replay import replay
from tests.planner.milp.pinned import EXACT, allowed, pinned, problems, some_schedules, unlimited, without

MEMORY = ("eq5_memory_before", "eq5_in_stage", "eq6_memory_after")


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_stage_by_stage_exactly_what_has_room_passes(semantics: Semantics) -> None:
    fits = too_large = 0
    for problem in problems(semantics):
        formulation = Formulation(unlimited(problem), EXACT)
        for schedule in some_schedules(formulation, 25):
            found = replay(formulation.problem, schedule)
            if any("budget" not in error for error in found.errors):
                continue
            fits, too_large = fits + found.valid, too_large + (not found.valid)
            assert allowed(formulation, schedule) is found.valid, found.errors
            if not found.valid:
                assert allowed(formulation, schedule, without(formulation.model, *MEMORY))
    assert min(fits, too_large) > 10


@pytest.mark.slow
def test_holding_a_stages_intermediates_together_lets_nothing_pass_that_has_no_room() -> None:
    stricter = 0
    for problem in problems(first=100, count=40):
        exact, together = (Formulation(unlimited(problem), breadth) for breadth in (EXACT, Breadth()))
        for schedule in some_schedules(together, 15):
            if allowed(together, schedule):
                assert replay(together.problem, schedule).valid
            else:
                stricter += allowed(exact, schedule)
    assert stricter, "else the exact rows would be worth nothing"


@pytest.mark.slow
def test_a_bound_forbids_nothing_that_has_room() -> None:
    for problem in problems():
        bound = Formulation(unlimited(problem), replace(EXACT, optimistic=True))
        for schedule in some_schedules(bound, 10):
            assert allowed(bound, schedule) or not replay(bound.problem, schedule).valid


def workspace_problem(workspace_bytes: int) -> Problem:
    """Return a problem in which one tensor of 10 B is idle while another of 10 B is in use."""
    stages = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(6))
    again = Rematerialization(1.0, 1.0, (), workspace_bytes)
    idle = Tensor("idle", 10, (0, 5), (0,), rematerializations=(again,))
    busy = Tensor("busy", 10, (2, 3), (2,), rematerializations=(None,))
    return Problem(stages, (idle, busy), ram_bytes=19)


@pytest.mark.parametrize("breadth", [EXACT, Breadth()])
@pytest.mark.parametrize(("workspace_bytes", "passes"), [(9, True), (10, False)])
def test_the_workspace_of_a_rematerialization_counts(breadth: Breadth, workspace_bytes: int, passes: bool) -> None:
    problem = workspace_problem(workspace_bytes)
    formulation = Formulation(problem, breadth)
    run = HighsSession(formulation.model).run(10.0)
    assert (run.values is not None) is passes
    if run.values is not None:
        assert replay(problem, formulation.schedule(run.values)).peak_bytes == 19


def test_a_budget_that_no_decision_can_keep_is_named() -> None:
    problem = replace(workspace_problem(0), ram_bytes=9)
    formulation = Formulation(problem, EXACT)
    assert formulation.model.impossible and set(formulation.model.impossible) <= {
        f"eq6_memory_after({s})" for s in range(6)
    }
    assert max(formulation.model.impossible.values()) * formulation.byte_scale == pytest.approx(1.0)


def test_a_page_that_stays_compressed_in_ram_counts_until_it_is_read() -> None:
    stages = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(6))
    zram = Paging(1, 0.0, 0.0, 1.0, 1.0, stored_bytes=4)
    idle = Tensor("idle", 10, (0, 5), (0,), rematerializations=(None,), paging=(zram,))
    busy = Tensor("busy", 10, (2, 3), (2,), rematerializations=(None,))
    for ram, passes in ((14, True), (13, False)):
        problem = Problem(stages, (idle, busy), ram_bytes=ram, targets=("flash", "zram"))
        assert (HighsSession(Formulation(problem, EXACT).model).run(10.0).values is not None) is passes


SLICED = Problem(
    stages=tuple(Stage(f"s{t}", 1.0, 1.0, workspace_bytes=20 * (t == 4)) for t in range(8)),
    tensors=(
        Tensor("w", 20, (1, 4), (4,), True, (None,), (Paging(0, 0.1, 0.1, 1.0, 1.0),)),
        Tensor("m", 20, (4,), (4,), True, (None,), (Paging(0, 0.1, 0.1, 1.0, 1.0),)),
        Tensor("g", 20, (3, 4), (3,), False, (None,)),
    ),
    ram_bytes=45,
    slicings=(Slicing(4, (0, 1), 20, 5),),
)
"""An update at stage 4 of 80 bytes in whole, 25 in slices, within a budget of 45."""


def test_an_update_in_slices_needs_what_it_streams_on_flash_before_and_after() -> None:
    formulation = Formulation(SLICED, EXACT)
    run = HighsSession(formulation.model).run(10.0)
    assert run.values is not None
    schedule = formulation.schedule(run.values)
    assert schedule.sliced == (0,) and replay(SLICED, schedule).valid
    kept = replace(schedule, choices=schedule.choices[1:])
    roomy = Formulation(replace(SLICED, ram_bytes=79), EXACT)
    assert not allowed(roomy, kept) and not replay(roomy.problem, kept).valid
    assert allowed(roomy, kept, without(roomy.model, "eq10_slices", *MEMORY))
    assert not allowed(formulation, replace(schedule, sliced=())), "whole it does not fit"


def test_a_member_that_comes_back_early_is_not_streamed() -> None:
    formulation = Formulation(SLICED, EXACT)
    run = HighsSession(formulation.model).run(10.0)
    assert run.values is not None
    schedule = formulation.schedule(run.values)
    moved = tuple(
        replace(choice, stage=choice.stage - 1) if SLICED.gaps[choice.gap].before == 4 else choice
        for choice in schedule.choices
    )
    assert moved != schedule.choices and all(choice.decision is GapDecision.PAGE for choice in moved)
    early = replace(schedule, choices=moved)
    roomy = Formulation(replace(SLICED, ram_bytes=79), EXACT)
    assert not allowed(roomy, early) and not replay(roomy.problem, early).valid


def test_rows_that_say_nothing_new_are_left_out() -> None:
    saved = 0
    for problem in problems(packing=False):
        model = Formulation(problem, EXACT).model
        rows = [r for r, name in enumerate(model.row_names) if name.partition("(")[0] in MEMORY]
        held = [
            tuple(zip(model.index[a:b], model.value[a:b], strict=True))
            for a, b in ((model.row_start[r], model.row_start[r + 1]) for r in rows)
        ]
        assert len(set(held)) == len(held)
        saved += problem.size - sum(name.startswith("eq6") for name in model.row_names)
        roomy = Formulation(replace(problem, ram_bytes=1 << 40), EXACT)
        assert not [name for name in roomy.model.row_names if name.partition("(")[0] in MEMORY]
        assert pinned(roomy, Schedule()).objective == 0.0
    assert saved
