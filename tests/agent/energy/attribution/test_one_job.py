"""Attribution closes on any timeline: phases, static, idle and gaps add up to what the source saw."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_agent.energy.attribution.one_job import Attributor, Charge, EnergyPhase, MeteredStep, PhaseCosts, StepEnergy
from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.sources.power_source import Kind
from port_agent.worker.protocol import StepDone

BASELINE = 3.0


def attributor(baseline: float | None = BASELINE, costs: PhaseCosts | None = None) -> Attributor:
    """Return an attributor with a fixed idle baseline."""
    return Attributor(costs or PhaseCosts(4.0), lambda source: baseline)


def step(number: int = 0, wall_s: float = 1.0, **phases_s: float) -> MeteredStep:
    """Return a step event."""
    return MeteredStep(number, 0, wall_s, {EnergyPhase(name): seconds for name, seconds in phases_s.items()})


def interval(start_s: float, end_s: float, joules: float | None) -> Interval:
    """Return an interval of the measured source."""
    return Interval(start_s, end_s, joules, "meter", Kind.MEASURED)


def by_phase(charges: list[Charge]) -> dict[EnergyPhase, float]:
    """Return gross joules by phase."""
    sums: dict[EnergyPhase, float] = {}
    for charge in charges:
        sums[charge.phase] = sums.get(charge.phase, 0.0) + charge.gross_joules
    return sums


def test_step_gets_static_and_its_phases_by_time() -> None:
    meter = attributor()
    meter.start_job("a", 0.0)
    meter.finish_step(step(wall_s=2.0, forward=0.5, backward=1.0, update=0.5), 2.0)
    meter.add(interval(0.0, 2.0, 14.0))
    charges, steps = meter.settle(2.0)
    assert by_phase(charges) == pytest.approx(
        {EnergyPhase.STATIC: 6.0, EnergyPhase.FORWARD: 2.0, EnergyPhase.BACKWARD: 4.0, EnergyPhase.UPDATE: 2.0}
    )
    assert (steps[0].gross_joules, steps[0].net_joules, steps[0].known_joules) == (14.0, 8.0, 14.0)


def test_hidden_transfer_takes_its_own_joules_and_stall_takes_none() -> None:
    costs = PhaseCosts(4.0, read_joules_per_byte=1e-9, write_joules_per_byte=2e-9)
    event = MeteredStep(
        0,
        0,
        2.0,
        {EnergyPhase.FORWARD: 1.0, EnergyPhase.STALL: 1.0, EnergyPhase.PAGE_IN: 1.5, EnergyPhase.PAGE_OUT: 1.5},
        10**9,
        10**9,
    )
    shares = costs.shares(event)
    assert shares == pytest.approx(
        {EnergyPhase.FORWARD: 4 / 7, EnergyPhase.PAGE_IN: 1 / 7, EnergyPhase.PAGE_OUT: 2 / 7}
    )


def test_seconds_of_waits_and_transfers_are_kept_where_they_take_no_joules() -> None:
    meter = attributor(costs=PhaseCosts(4.0, read_joules_per_byte=1e-9))
    meter.start_job("a", 0.0)
    event = MeteredStep(
        0, 0, 2.0, {EnergyPhase.FORWARD: 1.5, EnergyPhase.STALL: 0.5, EnergyPhase.PAGE_IN: 1.25}, paged_in_bytes=10**9
    )
    meter.finish_step(event, 2.0)
    meter.add(interval(0.0, 1.0, 5.0))
    meter.add(interval(1.0, 2.0, 5.0))
    charges, steps = meter.settle(2.0)
    seconds: dict[EnergyPhase, float] = {}
    for charge in charges:
        seconds[charge.phase] = seconds.get(charge.phase, 0.0) + charge.seconds
    assert seconds == pytest.approx(
        {EnergyPhase.STATIC: 2.0, EnergyPhase.FORWARD: 1.5, EnergyPhase.STALL: 0.5, EnergyPhase.PAGE_IN: 1.25}
    )
    assert steps[0].phases[EnergyPhase.STALL] == 0.0
    assert sum(steps[0].phases.values()) == pytest.approx(10.0)


def test_time_of_a_step_that_no_phase_claims_is_other() -> None:
    assert PhaseCosts(1.0).shares(step(wall_s=4.0, forward=1.0)) == {EnergyPhase.FORWARD: 0.25, EnergyPhase.OTHER: 0.75}
    assert PhaseCosts(1.0).shares(step(wall_s=1.0, stall=1.0)) == {EnergyPhase.OTHER: 1.0}


def test_idle_before_after_and_while_paused() -> None:
    meter = attributor()
    meter.add(interval(0.0, 10.0, 30.0))
    meter.start_job("a", 2.0)
    meter.pause(4.0)
    meter.resume(7.0)
    meter.stop_job(9.0)
    charges, _ = meter.settle(10.0)
    assert by_phase(charges) == pytest.approx(
        {EnergyPhase.IDLE: 18.0, EnergyPhase.STATIC: 12.0, EnergyPhase.OTHER: 0.0}
    )


def test_energy_of_a_running_step_waits_for_its_event() -> None:
    meter = attributor()
    meter.start_job("a", 0.0)
    meter.add(interval(0.0, 1.0, 5.0))
    assert meter.settle(1.0) == ([], [])
    meter.add(interval(1.0, 2.0, 5.0))
    meter.finish_step(step(wall_s=1.5, forward=1.5), 1.5)
    charges, steps = meter.settle(2.0)
    assert sum(charge.gross_joules for charge in charges) == pytest.approx(7.5)
    assert steps[0].gross_joules == pytest.approx(7.5)


def test_gap_leaves_a_step_unknown_rather_than_cheap() -> None:
    meter = attributor()
    meter.start_job("a", 0.0)
    meter.add(interval(0.0, 1.0, 5.0))
    meter.add(interval(1.0, 2.0, None))
    meter.finish_step(step(wall_s=2.0, forward=2.0), 2.0)
    charges, steps = meter.settle(2.0)
    assert steps[0].known_joules is None
    assert steps[0].unmeasured_s == 1.0
    assert [(c.phase, c.seconds, c.gross_joules) for c in charges if c.phase is EnergyPhase.UNMEASURED] == [
        (EnergyPhase.UNMEASURED, 1.0, 0.0)
    ]


def test_steps_before_the_first_reading_are_unknown() -> None:
    meter = attributor()
    meter.start_job("a", 0.0)
    meter.finish_step(step(0, wall_s=1.0, forward=1.0), 1.0)
    meter.finish_step(step(1, wall_s=1.0, forward=1.0), 2.0)
    meter.add(interval(1.5, 3.0, 9.0))
    meter.stop_job(3.0)
    _, steps = meter.settle(3.0)
    assert [(s.event.step, s.known_joules, s.unmeasured_s) for s in steps] == [(0, None, 1.0), (1, None, 0.5)]


def test_without_baseline_net_is_unknown_and_gross_whole() -> None:
    meter = attributor(baseline=None)
    meter.start_job("a", 0.0)
    meter.finish_step(step(wall_s=1.0, forward=1.0), 1.0)
    meter.add(interval(0.0, 1.0, 5.0))
    charges, steps = meter.settle(1.0)
    assert all(charge.net_joules is None for charge in charges)
    assert (steps[0].gross_joules, steps[0].net_joules) == (5.0, None)


def test_hours_of_one_step_keep_memory_bounded_and_energy_whole() -> None:
    meter = attributor()
    meter.start_job("a", 0.0)
    for second in range(20_000):
        meter.add(interval(second, second + 1.0, 5.0))
    assert len(meter._intervals) <= 1201
    meter.finish_step(step(wall_s=20_000.0, forward=20_000.0), 20_000.0)
    charges, steps = meter.settle(20_000.0)
    assert sum(charge.gross_joules for charge in charges) == pytest.approx(100_000.0)
    assert steps[0].gross_joules == pytest.approx(100_000.0)


def test_event_of_the_wire() -> None:
    phases_s = {"forward": 0.5, "pack": 0.1, "unpack": 0.2, "novel": 0.25}
    done = StepDone(
        step=7, epoch=1, loss=0.5, wall_s=2.0, cpu_s=2.0, paged_in_bytes=10, planned_s=1.5, phases_s=phases_s
    )
    event = MeteredStep.of(done, plan=2)
    assert event.phases_s == pytest.approx(
        {EnergyPhase.FORWARD: 0.5, EnergyPhase.PACKING: 0.3, EnergyPhase.OTHER: 0.25}
    )
    assert (event.step, event.epoch, event.loss, event.planned_s, event.planned_joules, event.plan) == (
        7,
        1,
        0.5,
        1.5,
        None,
        2,
    )


def _metered(wall_s: float, phases_s: dict[str, float]) -> MeteredStep:
    """Return the metered step of a report with these phases."""
    done = StepDone(step=0, epoch=0, loss=None, wall_s=wall_s, cpu_s=wall_s, phases_s=phases_s)
    return MeteredStep.of(done, plan=0)


def test_waits_booked_twice_are_taken_out_and_transfers_stay_as_measured() -> None:
    event = _metered(2.0, {"forward": 1.0, "backward": 1.0, "stall": 0.5, "page_in": 0.6, "page_out": 0.9})
    assert event.phases_s == pytest.approx(
        {
            EnergyPhase.FORWARD: 0.75,
            EnergyPhase.BACKWARD: 0.75,
            EnergyPhase.STALL: 0.5,
            EnergyPhase.PAGE_IN: 0.6,
            EnergyPhase.PAGE_OUT: 0.9,
        }
    )
    all_wait = _metered(1.0, {"forward": 1.0, "stall": 1.0})
    assert PhaseCosts().shares(all_wait) == {EnergyPhase.OTHER: 1.0}


ACTIONS = st.sampled_from(["start", "stop", "pause", "resume", "step", "short step", "settle", "nothing"])
SECONDS = st.floats(0.0, 30.0)
FRACTION = st.floats(0.0, 1.2)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    timeline=st.lists(st.tuples(SECONDS, ACTIONS, FRACTION, FRACTION, FRACTION), min_size=1, max_size=60),
    cuts=st.lists(st.tuples(st.floats(0.01, 20.0), st.one_of(st.none(), st.floats(0.0, 400.0))), max_size=80),
    baseline=st.one_of(st.none(), st.floats(0.0, 10.0)),
)
def test_parts_add_up_on_random_timelines(
    timeline: list[tuple[float, str, float, float, float]],
    cuts: list[tuple[float, float | None]],
    baseline: float | None,
) -> None:
    meter = attributor(baseline)
    pending = list(cuts)
    measured_s = now_s = 0.0
    total = gap_s = 0.0
    charges: list[Charge] = []
    steps: list[StepEnergy] = []
    for number, (wait_s, action, *parts) in enumerate(timeline):
        now_s += wait_s
        while pending and measured_s + pending[0][0] <= now_s:
            seconds, watts = pending.pop(0)
            joules = None if watts is None else watts * seconds
            meter.add(interval(measured_s, measured_s + seconds, joules))
            measured_s += seconds
            total += joules or 0.0
            gap_s += seconds if joules is None else 0.0
        wall_s = wait_s * (0.5 if action == "short step" else 1.0)
        if action == "start":
            meter.start_job(f"job {number}", now_s)
        elif action == "stop":
            meter.stop_job(now_s)
        elif action == "pause":
            meter.pause(now_s)
        elif action == "resume":
            meter.resume(now_s)
        elif "step" in action and meter.busy:
            phases = {"forward": parts[0] * wall_s, "page_in": parts[1] * wall_s, "stall": parts[2] * wall_s}
            meter.finish_step(step(number, wall_s, **phases), now_s)
        elif action == "settle":
            more = meter.settle(now_s)
            charges += more[0]
            steps += more[1]
    meter.stop_job(now_s)
    more = meter.settle(max(now_s, measured_s))
    charges, steps = charges + more[0], steps + more[1]

    assert sum(charge.gross_joules for charge in charges) == pytest.approx(total, rel=1e-9, abs=1e-9)
    unmeasured_s = sum(charge.seconds for charge in charges if charge.phase is EnergyPhase.UNMEASURED)
    assert unmeasured_s == pytest.approx(gap_s, abs=1e-6)
    assert all(charge.gross_joules >= 0 for charge in charges)
    for charge in charges:
        assert charge.net_joules is None or -1e-9 <= charge.net_joules <= charge.gross_joules + 1e-9
    ends = [charge.end_s for charge in charges]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(ends))
    for done in steps:
        assert sum(done.phases.values()) == pytest.approx(done.gross_joules, abs=1e-9)
