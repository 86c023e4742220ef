"""Instructions and their time, by hand: reads ask early, writes go on behind, and what a step
leaves the next waits for.
"""

from dataclasses import replace

import pytest

from port_planner.ir.costs import Flash
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import Code, PlanError, Program
from tests.planner.ir.lowering.small_graph import A, B, W, costs, graph

PAGE_A = Plan((Decision(A, 1, 4, Action.PAGE),))
AROUND_W = Plan((Decision(W, 0, 4, Action.PAGE), Decision(W, 4, 0, Action.PAGE)))


def shown(program: Program) -> list[tuple[str, int]]:
    return [(instruction.code.name, instruction.index) for instruction in program.instructions]


def test_nothing_decided_is_the_operators_and_what_is_freed() -> None:
    program = lower(graph(), costs(base=1000), Plan())
    assert shown(program) == [("RUN", 0), ("RUN", 1), ("RUN", 2), ("FREE", B), ("RUN", 3), ("RUN", 4), ("FREE", A)]
    assert program.timeline == (1840, 2240, 2280, 1880, 1880)
    assert (program.peak_bytes, program.peak_op) == (2280, 2)
    assert (program.seconds, program.compute_seconds, program.stall_seconds) == (5.0, 5.0, 0.0)
    assert program.joules == 5 * 5.0 + 2.0 * 5.0, "operators, and two watts as long as the step lasts"
    assert program.starts_on_flash == program.cross_step == program.replayed == frozenset()


def test_a_page_goes_out_behind_compute_and_is_asked_for_in_time() -> None:
    program = lower(graph(), costs(), PAGE_A)
    assert shown(program) == [
        ("RUN", 0),
        ("RUN", 1),
        ("WRITE", A),
        ("READ", A),
        ("RUN", 2),
        ("FREE", B),
        ("WAIT_WRITE", A),
        ("RUN", 3),
        ("WAIT_READ", A),
        ("RUN", 4),
        ("FREE", A),
    ]
    assert (program.read_bytes, program.written_bytes) == (400, 400)
    assert program.joules == pytest.approx(25.0 + 400 * 0.001 + 400 * 0.002 + 2.0 * program.seconds)


def test_a_page_takes_the_time_and_joules_of_its_target() -> None:
    table = costs()
    disk = Flash("disk", 200.0, 100.0, 0.0, 0.5, 0.25)
    table = replace(table, device=replace(table.device, scratch_targets=(disk,)))
    program = lower(graph(), table, Plan((replace(PAGE_A.decisions[0], target=1),)))
    assert program.written_to == (0, 400)
    writes = [(i.index, i.target) for i in program.instructions if i.code is Code.WRITE]
    assert writes == [(A, 1)]
    assert program.seconds == pytest.approx(2.0 + 4.0 + 2.0 + 1.0), (
        "four seconds out, two back, nothing beside them but ops"
    )
    assert program.joules == pytest.approx(25.0 + 400 * 0.5 + 400 * 0.25 + 2.0 * program.seconds)
    with pytest.raises(PlanError, match="has 1 paging targets"):
        lower(graph(), costs(), Plan((replace(PAGE_A.decisions[0], target=1),)))
    with pytest.raises(PlanError, match="what is persistent belongs on number 0"):
        lower(graph(), table, Plan((replace(AROUND_W.decisions[0], target=1),)))


def test_a_write_that_compute_covers_costs_no_second_and_a_slow_one_what_it_takes_more() -> None:
    """Written in a second beside op 2, read in a second beside op 3."""
    assert lower(graph(), costs(bytes_per_s=500.0), PAGE_A).stall_seconds == 0.0
    slow = lower(graph(), costs(bytes_per_s=200.0), PAGE_A)
    assert slow.seconds == pytest.approx(2.0 + 2.0 + 2.0 + 1.0), (
        "two seconds out, two back, with two of them behind ops"
    )
    assert slow.stall_seconds == pytest.approx(slow.seconds - 5.0)


def test_what_moves_holds_its_buffer_until_it_has_moved() -> None:
    """At op 2 a leaves and its landing buffer is there already; at op 3 only a slow card still writes."""
    quick, slow = (lower(graph(), costs(bytes_per_s=rate), PAGE_A) for rate in (400.0, 200.0))
    assert quick.timeline[2:4] == (1680, 880) and slow.timeline[2:4] == (1680, 1280)


def test_where_memory_is_short_it_waits_for_a_write_instead() -> None:
    free = lower(graph(), costs(bytes_per_s=200.0), PAGE_A)
    held = lower(graph(), costs(bytes_per_s=200.0), replace(PAGE_A, ram_bytes=1240))
    assert free.peak_bytes > 1240 >= held.peak_bytes
    assert held.seconds >= free.seconds
    names = shown(held)
    assert names.index(("WAIT_WRITE", A)) < names.index(("RUN", 2)), "before the op that has no room beside it"


def test_contents_that_are_on_flash_are_dropped_and_not_written_again() -> None:
    only_forward = replace(graph(), ops=(*graph().ops[:4], replace(graph().ops[4], writes=())))
    program = lower(only_forward, costs(), AROUND_W)
    assert program.written_bytes == 0 and program.read_bytes == 800
    assert ("FREE", W) in shown(program) and ("WRITE", W) not in shown(program)
    changed = lower(graph(), costs(), AROUND_W)
    assert changed.written_bytes == 400, "after the update alone"


def test_a_step_begins_with_the_writes_that_the_one_before_left_under_way() -> None:
    program = lower(graph(), costs(bytes_per_s=200.0), AROUND_W)
    assert program.starts_on_flash == {W} and program.cross_step == {W}
    names = shown(program)
    assert names[-1] == ("WRITE", W), "its end is not waited for"
    assert names.index(("WAIT_WRITE", W)) < names.index(("RUN", 0)), "the queue of the page thread keeps the order"
    assert program.stall_seconds > 0
    quick = lower(graph(), costs(bytes_per_s=1e9), AROUND_W)
    assert quick.stall_seconds == pytest.approx(0.0, abs=1e-5)


def test_what_runs_again_takes_its_time_and_joules() -> None:
    program = lower(graph(), costs(), Plan((Decision(A, 1, 4, Action.RECOMPUTE),)))
    assert shown(program)[-4:] == [("RUN", 3), ("RERUN", 0), ("RUN", 4), ("FREE", A)]
    assert (program.recompute_seconds, program.compute_seconds, program.seconds) == (1.0, 6.0, 6.0)
    assert program.joules == 6 * 5.0 + 2.0 * 6.0
    assert program.replayed == frozenset(), "nothing random is repeated"
    random = replace(graph(), ops=(replace(graph().ops[0], random=True), *graph().ops[1:]))
    assert lower(random, costs(), Plan((Decision(A, 1, 4, Action.RECOMPUTE),))).replayed == {0}


def test_no_instruction_says_less_than_what_is_there() -> None:
    for plan in (Plan(), PAGE_A, AROUND_W):
        program = lower(graph(), costs(), plan)
        runs = [i for i in program.instructions if i.code is Code.RUN]
        assert len(runs) == 5 and max(i.resident_bytes for i in program.instructions) <= program.peak_bytes


def test_what_a_step_does_not_change_is_on_flash_already() -> None:
    """Written only where another graph changed it, which is waited for; planned as nothing, and nothing worn."""
    step = graph()
    step = replace(step, ops=(*step.ops[:4], replace(step.ops[4], name="aten::add.Tensor", writes=())))
    program = lower(step, costs(), Plan((Decision(W, 0, 4, Action.PAGE),)))
    names = shown(program)
    written = names.index(("WRITE", W))
    assert names[written + 1] == ("WAIT_WRITE", W) and names.count(("WRITE", W)) == 1
    assert (program.written_bytes, program.wear_joules, program.read_bytes) == (0, 0.0, 400)
    assert program.joules == pytest.approx(25.0 + 400 * 0.001 + 2.0 * program.seconds)
    assert lower(graph(), costs(), Plan((Decision(W, 0, 4, Action.PAGE),))).written_bytes == 400
