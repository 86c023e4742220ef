"""What a schedule costs, worked out by hand; and every rule it may break, by its message."""

from dataclasses import replace

import pytest

from port_planner.problem.problem import (
    Choice,
    GapDecision,
    Packing,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Slicing,
    Stage,
    Tensor,
)
from port_planner.problem.replay import (
    page_out_ready,
    read_window,
    replay,
    transfer_window,
    transfers_fit,
    write_window,
)

STAGES = tuple(Stage(f"s{t}", 1.0, 2.0) for t in range(8))
FLASH = Paging(0, 0.5, 0.25, 3.0, 5.0)
A = Tensor(
    "a",
    10,
    (0, 1, 7),
    (0,),
    rematerializations=(Rematerialization(0.5, 4.0, (), 3),),
    paging=(FLASH,),
    packings=(Packing(4, 0.2, 1.5),),
)
B = Tensor("b", 20, (1, 2, 6), (1,), rematerializations=(Rematerialization(1.0, 6.0, ((0, 0),)),), paging=(FLASH,))
BUSY = Tensor("busy", 30, (3, 4), (3,), rematerializations=(None,))
PROBLEM = Problem(STAGES, (A, B, BUSY), None, static_watts=2.0)
GAP_A, GAP_B = 0, 1
REAL = replace(PROBLEM, semantics=Semantics.REAL)
PAGE_B = Schedule((Choice(GAP_B, 6, GapDecision.PAGE),))


def test_keeping_everything_costs_nothing_but_memory() -> None:
    found = replay(PROBLEM, Schedule())
    assert found.valid and found.load_bytes.tolist() == [10, 30, 30, 60, 60, 30, 30, 10]
    assert (found.peak_bytes, found.peak_stage) == (60, 3)
    assert (found.joules, found.overhead_joules, found.seconds, found.recompute_seconds) == (16.0, 0.0, 8.0, 0.0)


def test_workspace_and_what_a_stage_holds_anyway_count() -> None:
    stages = (*STAGES[:3], replace(STAGES[3], workspace_bytes=7, fixed_bytes=5), *STAGES[4:])
    assert replay(replace(PROBLEM, stages=stages), Schedule()).load_bytes[3] == 72


def test_a_page_is_gone_until_it_is_read_and_paid_both_ways() -> None:
    found = replay(PROBLEM, PAGE_B)
    assert found.valid and found.load_bytes.tolist() == [10, 30, 30, 40, 40, 10, 30, 10]
    assert (found.written_bytes, found.read_bytes, found.overhead_joules) == (20, 20, 8.0)
    assert found.stall_seconds == 0.0


def test_with_real_transfers_a_page_needs_its_buffer_while_it_moves() -> None:
    found = replay(REAL, PAGE_B)
    assert found.load_bytes.tolist() == [10, 30, 30, 60, 40, 30, 30, 10], "written at 3, read at 5"
    assert found.stall_seconds == 0.0


def test_what_compute_does_not_cover_is_waited_for_at_the_static_watts() -> None:
    stages = tuple(replace(stage, seconds=0.1) for stage in STAGES)
    found = replay(replace(REAL, stages=stages), PAGE_B)
    assert found.stall_seconds > 0
    assert found.static_joules == pytest.approx(2.0 * found.stall_seconds)
    assert found.seconds == pytest.approx(0.8 + found.stall_seconds)
    assert found.joules == pytest.approx(16.0 + 8.0 + found.static_joules)


def test_elastic_transfers_wait_only_for_what_the_whole_step_cannot_cover() -> None:
    elastic = replace(PROBLEM, semantics=Semantics.ELASTIC)
    assert replay(elastic, PAGE_B).stall_seconds == 0.0
    quick = replace(elastic, stages=tuple(replace(stage, seconds=0.05) for stage in STAGES))
    assert replay(quick, PAGE_B).stall_seconds == pytest.approx(0.75 - 0.4)


def test_a_rematerialization_takes_its_time_joules_and_workspace_when_it_returns() -> None:
    found = replay(PROBLEM, Schedule((Choice(GAP_A, 7, GapDecision.RECOMPUTE),)))
    assert found.valid and (found.recompute_seconds, found.seconds, found.overhead_joules) == (0.5, 8.5, 4.0)
    assert found.load_bytes.tolist() == [10, 30, 20, 50, 50, 20, 20, 13]


def test_an_intermediate_is_there_only_while_it_is_read() -> None:
    both = Schedule((Choice(GAP_A, 7, GapDecision.RECOMPUTE), Choice(GAP_B, 6, GapDecision.RECOMPUTE)), ((0, 6),))
    found = replay(PROBLEM, both)
    assert found.valid and found.overhead_joules == 4.0 + 4.0 + 6.0
    assert found.load_bytes.tolist() == [10, 30, 0 + 20, 30, 30, 0, 30, 13]


def test_a_packed_tensor_leaves_what_it_packs_to_and_stands_beside_it_at_both_ends() -> None:
    found = replay(PROBLEM, Schedule((Choice(GAP_A, 7, GapDecision.PACK),)))
    assert found.valid and found.load_bytes.tolist() == [10, 34, 24, 54, 54, 24, 24, 14]
    assert (found.overhead_joules, found.seconds) == (1.5, 8.2)


def test_contents_that_lie_on_flash_already_are_not_written_again() -> None:
    twice = Tensor("t", 10, (0, 3, 7), (0,), rematerializations=(None,), paging=(FLASH,))
    problem = Problem(STAGES, (twice,), None, semantics=Semantics.ELASTIC)
    found = replay(problem, Schedule((Choice(0, 3, GapDecision.PAGE), Choice(1, 7, GapDecision.PAGE))))
    assert found.valid and (found.written_bytes, found.read_bytes, found.overhead_joules) == (10, 20, 3.0 + 2 * 5.0)
    changed = replace(twice, writes=(0, 3), rematerializations=(None, None))
    found = replay(
        replace(problem, tensors=(changed,)), Schedule((Choice(0, 3, GapDecision.PAGE), Choice(1, 7, GapDecision.PAGE)))
    )
    assert found.written_bytes == 20


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule((Choice(0, 7, GapDecision.PAGE), Choice(0, 7, GapDecision.RECOMPUTE))), "gap 0 is decided twice"),
        (Schedule((Choice(0, 8, GapDecision.PAGE),)), "gap 0 of tensor 0 returns at stage 8, outside it"),
        (Schedule((Choice(0, 1, GapDecision.RECOMPUTE),)), "returns at stage 1, outside it"),
        (
            Schedule((Choice(2, 8, GapDecision.RECOMPUTE),)),
            "gap 2 of tensor 1 is dead; only intermediates may touch it",
        ),
        (Schedule((Choice(1, 6, GapDecision.PACK),)), "tensor 1 cannot be packed"),
        (Schedule((Choice(0, 7, GapDecision.PAGE, 1),)), "tensor 0 cannot be paged to target 1"),
        (Schedule((Choice(0, 2, GapDecision.PAGE),)), "tensor 0 is read back at stage 2, before its write is done"),
        (Schedule((), ((0, 3),)), "tensor 0 is rematerialized as an intermediate at stage 3, where it is resident"),
        (
            Schedule((Choice(0, 7, GapDecision.RECOMPUTE),), ((0, 4),)),
            "tensor 0 is rematerialized at stage 4, but nothing there needs it",
        ),
        (
            Schedule((Choice(0, 7, GapDecision.RECOMPUTE), Choice(1, 6, GapDecision.RECOMPUTE))),
            "tensor 1 is rematerialized at stage 6, but its input 0 is not resident",
        ),
    ],
)
def test_each_rule_that_is_broken_is_said(schedule: Schedule, message: str) -> None:
    errors = replay(PROBLEM, schedule).errors
    assert any(message in error for error in errors), errors


def test_an_input_that_has_changed_since_is_no_input() -> None:
    changed = replace(A, accesses=(0, 1, 4), writes=(0, 4), rematerializations=(None, None))
    found = replay(replace(PROBLEM, tensors=(changed, B, BUSY)), Schedule((Choice(1, 6, GapDecision.RECOMPUTE),)))
    assert any("input 0" in error for error in found.errors)
    lasting = replace(changed, accesses=(0, 1, 4, 7))
    found = replay(replace(PROBLEM, tensors=(lasting, B, BUSY)), Schedule((Choice(2, 6, GapDecision.RECOMPUTE),)))
    assert "tensor 1 is rematerialized at stage 6, but its input 0 has changed since" in found.errors


def test_what_cannot_be_computed_again_is_not() -> None:
    once = replace(B, rematerializations=(None,))
    found = replay(replace(PROBLEM, tensors=(A, once, BUSY)), Schedule((Choice(1, 6, GapDecision.RECOMPUTE),)))
    assert "tensor 1 cannot be rematerialized at stage 6" in found.errors


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"ram_bytes": 39}, "stage 3 needs 40 B, the budget is 39 B"),
        ({"deadline_s": 7.9}, "the step takes 8 s, the deadline is 7.9 s"),
        ({"write_limit_bytes": 19.0}, "20 B are written, the limit is 19 B"),
    ],
)
def test_limits_hold_to_the_byte_and_are_named(limits: dict[str, float], message: str) -> None:
    exact = replace(PROBLEM, ram_bytes=40, deadline_s=8.0, write_limit_bytes=20.0)
    assert replay(exact, PAGE_B).valid
    assert replay(replace(exact, **limits), PAGE_B).errors == [message]  # type: ignore[arg-type]


def test_a_sliced_update_holds_buffers_instead_of_what_it_streams() -> None:
    stages = (*STAGES[:4], replace(STAGES[4], workspace_bytes=20), *STAGES[5:])
    weight = Tensor("w", 20, (1, 4), (4,), True, (None,), (FLASH,))
    problem = Problem(stages, (weight,), None, semantics=Semantics.ELASTIC, slicings=(Slicing(4, (0,), 20, 5),))
    away = (Choice(0, 4, GapDecision.PAGE), Choice(1, 9, GapDecision.PAGE))
    whole, sliced = (replay(problem, Schedule(away, sliced=k)) for k in ((), (0,)))
    assert whole.valid and sliced.valid and (whole.load_bytes[4], sliced.load_bytes[4]) == (40, 5)
    for missing in (away[:1], away[1:], (replace(away[0], stage=3), away[1])):
        found = replay(problem, Schedule(missing, sliced=(0,)))
        assert found.errors == ["the update at stage 4 is sliced, but not all that it streams is paged around it"]


def test_a_transfer_fills_the_compute_nearest_to_its_use_and_stalls_there_with_the_rest() -> None:
    assert transfer_window(PROBLEM, 5, 2.5, -1) == [(4, 1.0), (3, 1.0), (2, 0.5)]
    assert transfer_window(PROBLEM, 5, 2.5, 1) == [(5, 1.0), (6, 1.0), (7, 0.5)]
    assert transfer_window(PROBLEM, 1, 1.5, -1) == [(0, 1.0), (7, 0.5)], "around the end of the step"
    assert transfer_window(PROBLEM, 5, 100.0, -1)[0] == (4, 100.0 - 6.0)
    assert sum(part for _, part in transfer_window(PROBLEM, 5, 100.0, -1)) == pytest.approx(100.0)


def test_windows_stay_inside_their_gap() -> None:
    gap = PROBLEM.gaps[GAP_B]
    assert read_window(PROBLEM, gap, 6, 5.0) == [(5, 3.0), (4, 1.0), (3, 1.0)]
    assert write_window(PROBLEM, gap, 5.0) == [(3, 3.0), (4, 1.0), (5, 1.0)]
    assert transfers_fit(REAL, gap, FLASH, 6) and transfers_fit(REAL, gap, FLASH, 5)
    assert not transfers_fit(REAL, gap, FLASH, 4), "the write has the only stage before"
    assert transfers_fit(PROBLEM, gap, FLASH, 4), "POET's transfers take no time"


def test_poet_keeps_what_appears_in_a_stage_for_one_stage_more() -> None:
    gap_after_birth = Problem(STAGES, (replace(A, accesses=(0, 7)),), None).gaps[0]
    poet, real = PROBLEM, REAL
    assert page_out_ready(replace(poet, tensors=(replace(A, accesses=(0, 7)),)), gap_after_birth, None) == 3
    assert page_out_ready(replace(real, tensors=(replace(A, accesses=(0, 7)),)), gap_after_birth, None) == 2
    gap = PROBLEM.gaps[GAP_B]
    assert (page_out_ready(poet, gap, None), page_out_ready(poet, gap, 2)) == (4, 5)
