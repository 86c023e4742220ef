"""eq7: what a schedule waits for in the model is what it waits for in the replay, and never less than in a bound."""

from dataclasses import replace

import pytest

from port_planner.milp.milp_model import Formulation
from port_planner.problem.problem import GapDecision, Paging, Problem, Schedule, Semantics, Stage, Tensor
from port_planner.problem.replay import replay
from tests.planner.brute_force import cost
from tests.planner.milp.pinned import EXACT, pinned, problems, some_schedules, unlimited, without

MEMORY = ("eq5_memory_before", "eq5_in_stage", "eq6_memory_after")


def barely_short(problem: Problem) -> Problem:
    """Return the problem with memory that is short by a byte if nothing is decided, transfers that take their time."""
    return replace(unlimited(problem), ram_bytes=max(replay(problem, Schedule()).peak_bytes - 1, 1), static_watts=2.0)


def with_slow_transfers(problem: Problem, seconds: float) -> Problem:
    """Return the problem with transfers that take `seconds` each way."""
    tensors = tuple(
        replace(t, paging=tuple(replace(p, seconds_in=seconds, seconds_out=seconds) for p in t.paging))
        for t in problem.tensors
    )
    return replace(problem, tensors=tensors)


def paging(formulation: Formulation) -> list[Schedule]:
    """Return schedules that page."""
    return [s for s in some_schedules(formulation, 500) if any(c.decision is GapDecision.PAGE for c in s.choices)][:15]


def crowded(count: int) -> Problem:
    """Return a step of eight seconds with `count` tensors that are idle all the while and take 2.5 s each way."""
    stages = tuple(Stage(f"s{t}", 1.0, 1.0) for t in range(8))
    idle = Tensor("idle", 10, (0, 7), (0,), rematerializations=(None,), paging=(Paging(0, 2.5, 2.5, 1.0, 1.0),))
    return Problem(stages, (idle,) * count, 1, semantics=Semantics.REAL, static_watts=2.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_does_not_fit_beside_compute_stalls_and_is_paid_for(count: int) -> None:
    formulation = Formulation(crowded(count), EXACT)
    roomy = without(formulation.model, *MEMORY)
    stalls = set()
    for schedule in paging(formulation):
        found = replay(formulation.problem, schedule)
        run = pinned(formulation, schedule, roomy)
        assert run.values is not None
        stalls.add(found.stall_seconds > 0)
        stall = sum(run.values[v] for v in formulation.stalls.values()) * formulation.second_scale
        assert stall == pytest.approx(found.stall_seconds, abs=1e-6)
        assert run.objective * formulation.joule_scale == pytest.approx(cost(formulation.problem, found), abs=1e-5)
        free = pinned(formulation, schedule, without(roomy, "eq7_stall"))
        assert free.objective * formulation.joule_scale == pytest.approx(found.overhead_joules, abs=1e-5)
    assert stalls == ({False} if count == 1 else {False, True})


def test_as_a_whole_transfers_wait_for_what_all_compute_cannot_cover() -> None:
    """The replay of captured steps says at best; so does the model that bounds them."""
    stalled = 0
    for problem in problems(Semantics.ELASTIC, packing=False):
        slow = with_slow_transfers(barely_short(problem), 9.0)
        timeless = Formulation(slow, replace(EXACT, timeless=True))
        for schedule in paging(timeless):
            found = replay(slow, schedule)
            if any("budget" not in error for error in found.errors):
                continue
            run = pinned(timeless, schedule, without(timeless.model, *MEMORY))
            assert run.values is not None
            stalled += found.stall_seconds > 0
            stall = run.values[timeless.stalls[-1]] * timeless.second_scale
            assert stall == pytest.approx(found.stall_seconds, abs=1e-6)
    assert stalled > 5


def test_a_transfer_hides_only_where_its_buffer_and_compute_are() -> None:
    """With windows the wait is never shorter than as a whole, and no longer than all transfers together."""
    longer = 0
    for problem in problems(Semantics.ELASTIC, packing=False):
        short = barely_short(problem)
        windows, whole = Formulation(short, EXACT), Formulation(short, replace(EXACT, timeless=True))
        for schedule in paging(windows):
            run, least = pinned(windows, schedule), pinned(whole, schedule)
            if run.values is None or least.values is None:
                continue
            stall, at_least = (
                r.values[f.stalls[-1]] * f.second_scale
                for r, f in ((run, windows), (least, whole))
                if r.values is not None
            )
            transfers = sum(_seconds(short, schedule))
            assert at_least - 1e-6 <= stall <= transfers + 1e-6
            longer += stall > at_least + 1e-6
            for columns in windows.gaps.values():
                for hidden in (*columns.read_ahead.values(), *columns.write_behind.values()):
                    paged = sum(run.values[v] for v in columns.page.values())
                    assert run.values[hidden] <= paged + 1e-6, "only what is paged can hide"
    assert longer, "else windows would say nothing"


def _seconds(problem: Problem, schedule: Schedule) -> list[float]:
    """Return the seconds of every transfer of a schedule, a write for each read at most."""
    used = [
        problem.tensors[problem.gaps[c.gap].tensor].paging for c in schedule.choices if c.decision is GapDecision.PAGE
    ]
    return [p[0].seconds_in + p[0].seconds_out for p in used]
