"""eq11, eq12 and what alternatives do to the other rows: a schedule passes exactly where the replay
finds room and time for it.
"""

from dataclasses import replace

import numpy as np
import pytest

from port_planner.milp.columns import Breadth
from port_planner.milp.highs import HighsSession
from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import (
    Alternative,
    Choice,
    GapDecision,
    Packing,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Stage,
    StageChange,
    StageGroup,
    Tensor,
    TileSaving,
    verify_problem,
)
from port_planner.problem.replay import replay
from port_planner.search.solve import Outcome, solve
from tests.planner.brute_force import random_problem, with_variants
from tests.planner.milp.pinned import EXACT, allowed, pinned, some_schedules, unlimited


def workspaces(problem: Problem) -> Problem:
    """Return the problem with a workspace for each rematerialization: stages are full before they run, too."""
    tensors = tuple(
        replace(t, rematerializations=tuple(r and replace(r, workspace_bytes=i) for r in t.rematerializations))
        for i, t in enumerate(problem.tensors)
    )
    return replace(problem, tensors=tensors)


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_a_schedule_passes_in_what_the_replay_says_and_not_in_a_byte_less(semantics: Semantics) -> None:
    packing = semantics is Semantics.REAL
    for seed in range(12):
        problem = unlimited(workspaces(with_variants(random_problem(seed, semantics=semantics, packing=packing), seed)))
        verify_problem(problem)
        boundless = Formulation(replace(problem, ram_bytes=1), EXACT)
        for schedule in some_schedules(boundless, 25):
            found = replay(replace(problem, ram_bytes=None), schedule)
            if found.valid:
                exactly, less = (replace(problem, ram_bytes=found.peak_bytes - n) for n in (0, 1))
                assert allowed(Formulation(exactly, EXACT, schedule), schedule), (seed, schedule)
                assert not allowed(Formulation(less, EXACT, schedule), schedule), (seed, schedule)
                assert not allowed(Formulation(less, Breadth(), schedule), schedule), (seed, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [Semantics.POET, Semantics.REAL])
def test_seconds_and_joules_of_alternatives_are_those_of_the_replay(semantics: Semantics) -> None:
    for seed in range(8):
        problem = replace(unlimited(with_variants(random_problem(seed, semantics=semantics), seed)), ram_bytes=1 << 20)
        for schedule in some_schedules(Formulation(replace(problem, ram_bytes=1), EXACT), 15):
            found = replay(problem, schedule)
            if found.valid:
                formulation = Formulation(problem, EXACT, schedule)
                run = pinned(formulation, schedule)
                cost = found.overhead_joules + problem.static_watts * found.stall_seconds
                assert run.objective * formulation.joule_scale == pytest.approx(cost, abs=1e-6)
                just, late = (replace(problem, deadline_s=found.seconds + more) for more in (1e-6, -1e-3))
                assert allowed(Formulation(just, EXACT, schedule), schedule)
                hurried = Formulation(late, EXACT, schedule)
                assert hurried.start_values(schedule) is None or not allowed(hurried, schedule)


TILES = TileSaving(0, 6, (0, 5), (0,))
"""Of `held`, the two tiles of three that are not there while one is."""

CHAIN = Problem(
    stages=tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(6)),
    tensors=(
        Tensor(
            "held",
            9,
            (0, 5),
            (0,),
            rematerializations=(Rematerialization(1.0, 3.0, ()),),
            paging=(Paging(0, 0, 0, 4.0, 4.0),),
        ),
        Tensor("with it", 4, (0, 5), (0,), rematerializations=(None,)),
    ),
    ram_bytes=8,
    groups=(
        StageGroup("chain", (Alternative("whole"), Alternative("3 tiles", (StageChange(5, 0.1, 0.5),), (TILES,)))),
    ),
)
"""A tensor that has room in tiles alone, and only if it is not kept between the two stages that touch it."""


def test_tiles_save_only_what_is_not_kept_whole() -> None:
    formulation = Formulation(CHAIN, EXACT)
    run = HighsSession(formulation.model).run(10.0)
    assert run.values is not None
    schedule = formulation.schedule(run.values)
    assert schedule == Schedule((Choice(0, 5, GapDecision.RECOMPUTE),), variants=((0, 1),))
    assert replay(CHAIN, schedule).valid and replay(CHAIN, schedule).overhead_joules == 3.5
    early = replace(schedule, choices=(Choice(0, 4, GapDecision.RECOMPUTE),))
    for other in (replace(schedule, variants=()), replace(schedule, choices=()), early):
        assert not replay(CHAIN, other).valid
        assert not allowed(formulation, other)


def test_the_relaxation_with_alternatives_is_no_dearer_than_any_schedule() -> None:
    for seed in range(12):
        problem = with_variants(random_problem(seed), seed)
        bound = Formulation(problem, replace(EXACT, optimistic=True))
        run = HighsSession(bound.model, relaxed=True).run(10.0)
        for schedule in some_schedules(bound, 30):
            found = replay(problem, schedule)
            if found.valid:
                assert run.bound * bound.joule_scale <= found.overhead_joules + 1e-6, seed


def test_what_another_alternative_dominates_has_no_column_unless_it_is_known() -> None:
    worse = Alternative("more of all", (StageChange(5, 0.2, 0.6),), (TILES,))
    problem = replace(CHAIN, groups=(replace(CHAIN.groups[0], alternatives=(*CHAIN.groups[0].alternatives, worse)),))
    assert set(Formulation(problem, EXACT).variants) == {(0, 0), (0, 1)}
    known = Schedule(variants=((0, 2),))
    assert set(Formulation(problem, EXACT, known).variants) == {(0, 0), (0, 1), (0, 2)}
    assert Formulation(problem, EXACT).start_values(known) is None
    start = Formulation(problem, EXACT, known).start_values(known)
    assert start is not None and np.isclose(sum(start.values()), 2)


def _stages(count: int = 4) -> tuple[Stage, ...]:
    return tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(count))


def _in_tiles(tensor: int, nbytes: int, stage: int, gaps: tuple[int, ...] = ()) -> StageGroup:
    tiles = Alternative("tiles", (), (TileSaving(tensor, nbytes, (stage,), gaps),))
    return StageGroup("chain", (Alternative("whole"), tiles))


BUSY = Tensor("busy", 12, (1,), (1,), rematerializations=(None,))
AGAIN = Tensor("again", 5, (0, 2), (0,), rematerializations=(Rematerialization(1.0, 1.0, (), 10),))

BORN = Problem(
    _stages(),
    (AGAIN, BUSY, Tensor("born", 9, (2,), (2,), rematerializations=(None,))),
    15,
    groups=(_in_tiles(2, 6, 2),),
)
"""What comes back at stage 2 needs 15 bytes, before a tensor is made there in tiles."""

LATER = Problem(
    _stages(),
    (AGAIN, BUSY, replace(AGAIN, name="later", nbytes=9, rematerializations=(Rematerialization(1.0, 1.0, ()),))),
    15,
    groups=(_in_tiles(2, 6, 2, (2,)),),
)
"""What comes back first at stage 2 needs 15 bytes, before another tensor comes back in tiles."""


@pytest.mark.parametrize(("problem", "gaps"), [(BORN, (0,)), (LATER, (0, 2))])
def test_what_is_not_there_yet_saves_nothing(problem: Problem, gaps: tuple[int, ...]) -> None:
    schedule = Schedule(tuple(Choice(g, 2, GapDecision.RECOMPUTE) for g in gaps), variants=((0, 1),))
    for ram, fits in ((15, True), (14, False)):
        budgeted = replace(problem, ram_bytes=ram)
        assert replay(budgeted, schedule).valid is fits
        assert allowed(Formulation(budgeted, EXACT), schedule) is fits


def test_while_a_tensor_is_packed_alternatives_hold_what_they_hold() -> None:
    packed = Tensor("packed", 10, (0, 3), (0,), rematerializations=(None,), packings=(Packing(5, 0.1, 1.0),))
    busy = replace(BUSY, nbytes=13)
    more = StageGroup(
        "kernel", (Alternative("usual"), Alternative("another", (StageChange(0, joules=-1.0, fixed_bytes=4),)))
    )
    schedule = Schedule((Choice(0, 3, GapDecision.PACK),), variants=((0, 1),))
    for ram, fits in ((19, True), (18, False)):
        problem = Problem(_stages(), (packed, busy), ram, groups=(more,))
        assert replay(problem, schedule).valid is fits
        assert allowed(Formulation(problem, EXACT), schedule) is fits


def test_a_shorter_stage_hides_less_of_a_transfer() -> None:
    page = Paging(0, 0.0, 2.0, 1.0, 1.0)
    held = Tensor("held", 9, (0, 5), (0,), rematerializations=(None,), paging=(page,))
    shorter = StageGroup("kernel", (Alternative("usual"), Alternative("shorter", (StageChange(4, -0.5, -1.0),))))
    problem = Problem(
        _stages(6),
        (held, replace(BUSY, accesses=(2,), writes=(2,))),
        12,
        None,
        Semantics.REAL,
        static_watts=3.0,
        groups=(shorter,),
    )
    for variants, stalled_s in (((), 0.0), (((0, 1),), 0.5)):
        schedule = Schedule((Choice(0, 5, GapDecision.PAGE),), variants=variants)
        found, formulation = replay(problem, schedule), Formulation(problem, EXACT)
        assert found.valid and found.stall_seconds == pytest.approx(stalled_s)
        cost = found.overhead_joules + found.static_joules
        assert pinned(formulation, schedule).objective * formulation.joule_scale == pytest.approx(cost)


def test_room_for_a_cheaper_alternative_is_made_by_paging() -> None:
    page = Paging(0, 0.1, 0.1, 1.0, 1.0)
    held = Tensor("held", 9, (0, 4), (0,), rematerializations=(None,), paging=(page,))
    cheaper = StageGroup("kernel", (Alternative("usual"), Alternative("cheaper", (StageChange(2, 0.0, -9.0, 0, 9),))))
    found = solve(Problem(_stages(5), (held,), 9, groups=(cheaper,)))
    assert found.outcome is Outcome.OPTIMAL and found.overhead_joules == pytest.approx(-7.0)
    assert found.schedule is not None and found.schedule.variants == ((0, 1),)
    assert [choice.decision for choice in found.schedule.choices] == [GapDecision.PAGE]
