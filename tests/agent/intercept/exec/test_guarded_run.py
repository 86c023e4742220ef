"""What is said at the end of a program on guarded memory is what its processes took, and claims no more than held."""

from dataclasses import replace

from port_agent.guard import GuardCounters, ProcessUse
from port_agent.intercept.exec.guarded_run import GuardedRun, PageWatch, page_watches

MIB = 1 << 20
COUNTERS = GuardCounters(
    **dict.fromkeys(GuardCounters.__dataclass_fields__, 0)
    | {
        "peak_resident_bytes": 40 * MIB,
        "read_faults": 5,
        "write_faults": 2,
        "read_bytes": 3 * MIB,
        "written_bytes": 4 * MIB,
    }
)
CHILD = ProcessUse(
    pid=7,
    name="python train.py",
    guarded=True,
    peak_bytes=200 * MIB,
    read_faults=10,
    write_faults=20,
    read_bytes=MIB,
    written_bytes=MIB,
)
ALONE = GuardedRun(
    peak_bytes=300 * MIB,
    together_bytes=300 * MIB,
    tensor_bytes=40 * MIB,
    rest_bytes=270 * MIB,
    needed_bytes=0,
    program=None,
    children=(),
    forgotten=0,
    counters=COUNTERS,
)
LAUNCHER = replace(ALONE, together_bytes=600 * MIB, children=(CHILD, replace(CHILD, pid=8, peak_bytes=190 * MIB)))


def test_a_program_alone() -> None:
    said = ALONE.summary(400 * MIB, None, 2.0)
    assert said.startswith(
        "peak 300.0 MiB of 400.0 MiB, tensors 40.0 MiB, the rest 270.0 MiB; 2.0 s; read 3.0 MiB, wrote 4.0 MiB in 7 "
        "faults"
    )
    assert ALONE.summary(None, 50 * MIB, 2.0).startswith("peak 300.0 MiB tensors 40.0 MiB of 50.0 MiB; ")


def test_figures_are_those_of_all_processes() -> None:
    said = LAUNCHER.summary(700 * MIB, None, 2.0)
    assert said.startswith(
        "peak 600.0 MiB of 700.0 MiB, tensors 40.0 MiB, the rest 270.0 MiB, with 2 child processes, the largest "
        "'python train.py' (200.0 MiB)"
    )
    assert "read 5.0 MiB, wrote 6.0 MiB in 67 faults" in said
    facts = LAUNCHER.facts(600 * MIB)
    assert facts["budget_held"] and facts["peak_together_bytes"] == 600 * MIB and facts["read_bytes"] == 5 * MIB
    assert not LAUNCHER.facts(600 * MIB - 1)["budget_held"]
    assert [child["pid"] for child in facts["children"]] == [7, 8]
    assert "with 1 child process (200.0 MiB)" in replace(LAUNCHER, children=(CHILD,)).summary(700 * MIB, None, 2.0)


def test_a_budget_that_did_not_hold_for_all_is_not_claimed() -> None:
    outside = replace(CHILD, pid=9, name="./static", guarded=False, peak_bytes=30 * MIB)
    run = replace(LAUNCHER, children=(CHILD, outside))
    said = run.summary(700 * MIB, None, 2.0)
    assert "of 700.0 MiB" not in said and "the budget was not enforced for all processes" in said
    assert "outside the budget: './static' (9, at least 30.0 MiB)" in said
    assert not run.facts(None)["budget_held"]
    short = replace(LAUNCHER, children=(CHILD, replace(outside, name="/sbin/ldconfig -p", peak_bytes=0)))
    assert "'/sbin/ldconfig -p' (9, ended before it was measured)" in short.summary(700 * MIB, None, 2.0)
    assert not short.facts(700 * MIB)["budget_held"]
    many = replace(LAUNCHER, children=tuple(replace(outside, pid=pid) for pid in range(5)))
    assert " and 2 more: " in many.summary(700 * MIB, None, 2.0)


def test_a_program_whose_place_another_took_is_known_from_outside() -> None:
    program = replace(CHILD, pid=1, written_bytes=9 * MIB)
    run = replace(ALONE, program=program, counters=None)
    assert "wrote 9.0 MiB in 30 faults" in run.summary(700 * MIB, None, None)
    assert "faults" not in run.facts(None)


def test_a_budget_that_was_too_small_is_said_with_what_suffices() -> None:
    run = replace(ALONE, needed_bytes=319 * MIB + 1)
    said = run.summary(260 * MIB, None, 2.0)
    assert said.endswith("; Python, libraries and your objects take 270.0 MiB of 260.0 MiB: give at least 320M")
    assert run.facts(None)["needed_bytes"] == 319 * MIB + 1 and run.facts(None)["rest_bytes"] == 270 * MIB


def test_steps_that_move_many_times_the_tensors_are_said_once_and_again_when_doubled() -> None:
    watch, moved, said = PageWatch("wrote", 3), 0, []
    for step_bytes in (100, 299, 301, 310, 602, 603, 90, 1500):
        moved += step_bytes * MIB
        said.append(watch.step(moved, 100 * MIB))
    assert [bool(line) for line in said] == [False, False, True, False, True, False, False, True]
    assert (
        said[2] == "a step wrote 301.0 MiB of pages, 3.0 times the 100.0 MiB of all tensors: a larger budget moves less"
    )


def test_reading_is_said_where_it_takes_most_of_the_time() -> None:
    wrote, read = page_watches()
    assert wrote.step(301 * MIB, 100 * MIB) and not read.step(1000 * MIB, 100 * MIB)
    assert "read 1.0 GiB of pages" in read.step(2030 * MIB, 100 * MIB)
