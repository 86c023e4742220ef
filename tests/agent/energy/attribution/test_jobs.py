"""Jobs at work at the same time share what is drawn by their CPU time, and the parts add up to
the whole on any timeline.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_agent.energy.attribution.jobs import JobsAttributor
from port_agent.energy.attribution.one_job import Charge, EnergyPhase, MeteredStep, PhaseCosts
from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.sources.power_source import Kind

BASELINE = 3.0


class Cpu:
    """The CPU time of a worker."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def attributor(baseline: float | None = BASELINE) -> JobsAttributor:
    return JobsAttributor(PhaseCosts(4.0), lambda source: baseline)


def interval(start_s: float, end_s: float, joules: float | None) -> Interval:
    return Interval(start_s, end_s, joules, "meter", Kind.MEASURED)


def step(wall_s: float) -> MeteredStep:
    return MeteredStep(0, 0, wall_s, {EnergyPhase.FORWARD: wall_s})


def by_job(charges: list[Charge]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for charge in charges:
        sums[charge.job] = sums.get(charge.job, 0.0) + charge.gross_joules
    return sums


def test_two_jobs_share_by_their_cpu_time() -> None:
    meter, host, board = attributor(), Cpu(), Cpu()
    meter.start_job("host", 0.0, host)
    meter.start_job("board", 0.0, board)
    host.seconds, board.seconds = 3.0, 1.0
    meter.add(interval(0.0, 4.0, 28.0))
    meter.finish_step("host", step(4.0), 4.0)
    meter.finish_step("board", step(2.0), 4.0)
    charges, steps = meter.settle(4.0)
    assert by_job(charges) == pytest.approx({"host": 21.0, "board": 7.0})
    static = {c.job: c.gross_joules for c in charges if c.phase is EnergyPhase.STATIC}
    assert static == pytest.approx({"host": 9.0, "board": 3.0})
    assert {s.job: (s.gross_joules, s.net_joules) for s in steps} == {
        "host": pytest.approx((21.0, 12.0)),
        "board": pytest.approx((3.5, 2.0)),
    }
    assert meter.busy and meter.jobs == ("host", "board")


def test_alone_a_job_has_all_of_it_whatever_it_computes() -> None:
    meter = attributor()
    meter.start_job("board", 0.0, float)
    meter.add(interval(0.0, 2.0, 10.0))
    meter.stop_job("board", 2.0)
    charges, _ = meter.settle(2.0)
    assert by_job(charges) == pytest.approx({"board": 10.0}) and not meter.jobs


def test_a_paused_job_has_nothing_while_another_is_at_work_and_idling_is_nobodys() -> None:
    meter, one, two = attributor(), Cpu(), Cpu()
    meter.start_job("1", 0.0, one)
    meter.start_job("2", 0.0, two)
    meter.pause("1", 0.0)
    one.seconds, two.seconds = 0.5, 0.5
    meter.add(interval(0.0, 2.0, 10.0))
    meter.pause("2", 2.0)
    meter.add(interval(2.0, 4.0, 6.0))
    meter.resume("1", 4.0)
    meter.add(interval(4.0, 5.0, 7.0))
    meter.finish_step("1", step(1.0), 5.0)
    charges, steps = meter.settle(5.0)
    assert by_job(charges) == pytest.approx({"2": 10.0, "": 6.0, "1": 7.0})
    assert steps[0].known_joules == pytest.approx(7.0)


def test_a_worker_that_is_gone_counts_as_it_did_before() -> None:
    meter, host, board = attributor(), Cpu(), Cpu()
    meter.start_job("host", 0.0, host)
    meter.start_job("board", 0.0, board)
    host.seconds, board.seconds = 3.0, 1.0
    meter.add(interval(0.0, 4.0, 28.0))
    host.seconds, board.seconds = 0.0, 1.5  # its group is removed, and nobody counts for it any more
    meter.add(interval(4.0, 6.0, 14.0))
    meter.stop_job("host", 6.0)
    charges, _ = meter.settle(6.0)
    assert by_job(charges)["host"] == pytest.approx(21.0 + 14.0 * 1.5 / 2.0)


def test_a_gap_is_a_gap_for_each() -> None:
    meter, one = attributor(), Cpu()
    meter.start_job("1", 0.0, one)
    meter.start_job("2", 0.0, float)
    meter.add(interval(0.0, 2.0, None))
    meter.finish_step("1", step(2.0), 2.0)
    meter.finish_step("2", step(2.0), 2.0)
    _, steps = meter.settle(2.0)
    assert [s.known_joules for s in steps] == [None, None]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["start", "stop", "pause", "resume", "step"]),
        st.floats(0.1, 5.0),
        st.floats(0.0, 40.0),
        st.floats(0.0, 3.0),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(deadline=None)
@given(MOVES, st.sampled_from([BASELINE, None]))
def test_the_parts_add_up_to_the_whole(
    moves: list[tuple[str, str, float, float, float]], baseline: float | None
) -> None:
    meter, now_s, total = attributor(baseline), 0.0, 0.0
    cpus: dict[str, Cpu] = {}
    charges: list[Charge] = []
    for job, move, seconds, joules, cpu_s in moves:
        if job in cpus:
            cpus[job].seconds += cpu_s
        meter.add(interval(now_s, now_s + seconds, joules))
        now_s, total = now_s + seconds, total + joules
        match move:
            case "start":
                cpus[job] = Cpu()
                meter.start_job(job, now_s, cpus[job])
            case "stop" if job in meter.jobs:
                meter.stop_job(job, now_s)
            case "pause" if job in meter.jobs:
                meter.pause(job, now_s)
            case "resume" if job in meter.jobs:
                meter.resume(job, now_s)
            case "step" if job in meter.jobs:
                meter.finish_step(job, step(seconds / 2), now_s)
        charges += meter.settle(now_s)[0]
    for job in meter.jobs:
        meter.stop_job(job, now_s)
    charges += meter.settle(now_s)[0]
    assert sum(charge.gross_joules for charge in charges) == pytest.approx(total)
