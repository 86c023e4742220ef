"""What is promised for a job, and whether it comes true on a virtual clock."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from port_agent.facts.readings import Answer, Facts, IdleSignal, Power
from port_agent.jobs.job import JobPromise, JobRequestError, JobSpec
from port_agent.policy.decide import Memory, Now, Policy, ResourceLimits, decide
from port_agent.policy.usual_times import UsualTimes
from port_agent.supervisor.job.plan_choice import PlanFigures
from port_agent.supervisor.job.promise import check_known, promise, promised_plan
from port_agent.supervisor.job.run_state import RunConditions
from port_agent.supervisor.job.worker_kinds import BundleFacts

MIB = 1 << 20
BEGIN = datetime(2026, 3, 2)
HOUR_S = 3600.0
PLANS = (
    PlanFigures(0, 400 * MIB, step_s=2.0, step_joules=10.0, written_bytes=30 * MIB, wear_joules=1.0),
    PlanFigures(1, 200 * MIB, step_s=3.0, step_joules=14.0, written_bytes=0),
)
AROUND = RunConditions(ResourceLimits(memory_bytes=1 << 30), None, flash_budget_bytes_per_day=1 << 40)
SPEC = JobSpec("job", "job.port")


def always(days: int = 2) -> UsualTimes:
    times = UsualTimes()
    times.look(BEGIN.timestamp(), 1.0)
    times.look((BEGIN + timedelta(days=days)).timestamp(), 1.0)
    return times


def promised(spec: JobSpec, conditions: RunConditions = AROUND, before_s: float = 0.0) -> JobPromise | None:
    facts, wall_s = BundleFacts(PLANS, steps_per_epoch=100), BEGIN.timestamp()
    plan = promised_plan(spec, facts, conditions, wall_s)
    return None if plan is None else promise(spec, facts, plan, conditions, always(), wall_s, before_s)


def test_a_step_the_whole_and_the_end() -> None:
    found = promised(replace(SPEC, epochs=3), before_s=400.0)
    end: Any = pytest.approx(BEGIN.timestamp() + 1000.0)
    assert found == JobPromise(0, 400 * MIB, 2.0, 10.0, 30 * MIB, 300, end, 1)


def test_data_that_is_not_the_bundles_has_no_end() -> None:
    for spec in (replace(SPEC, data="/data"), replace(SPEC, waits_for_data=True)):
        found = promised(spec)
        assert found is not None and (found.steps, found.ends_at, found.nights) == (None, None, None)
    by_steps = promised(replace(SPEC, data="/data", steps=7))
    assert by_steps is not None and by_steps.steps == 7


def test_a_job_that_leaves_its_schedule_is_refused_when_it_is_submitted() -> None:
    facts = BundleFacts(PLANS, steps_per_epoch=100, known_steps=250)
    check_known(replace(SPEC, epochs=2), facts)
    check_known(
        replace(SPEC, waits_for_data=True, epochs=9), facts
    )  # how much arrives is not known: its worker refuses
    with pytest.raises(
        JobRequestError, match=r"trains 300 steps, but its bundle has .* of only 250; plan it again with more --epochs"
    ):
        check_known(replace(SPEC, epochs=3), facts)


@pytest.mark.parametrize("without_epochs", [{"data": "/data"}, {"waits_for_data": True}, {"federated": True}])
def test_rates_that_follow_losses_of_epochs_are_refused_where_there_are_none(without_epochs: dict[str, Any]) -> None:
    facts = BundleFacts(PLANS, steps_per_epoch=100, follows_losses=True)
    check_known(SPEC, facts)
    with pytest.raises(JobRequestError, match=r"follow the losses of its own epochs \(ReduceLROnPlateau\)"):
        check_known(replace(SPEC, **without_epochs), facts)


def test_nothing_is_promised_where_no_plan_fits() -> None:
    assert promised(SPEC, replace(AROUND, limits=ResourceLimits(memory_bytes=100 * MIB))) is None


def test_the_plan_of_an_ordinary_day() -> None:
    short_of_flash = promised(replace(SPEC, steps=10**6), replace(AROUND, flash_budget_bytes_per_day=1 << 30))
    assert short_of_flash is not None and short_of_flash.plan == 1
    in_a_hurry = promised(replace(SPEC, steps=100, deadline_at=BEGIN.timestamp() + 240.0))
    assert in_a_hurry is not None and in_a_hurry.plan == 0


def test_flash_that_is_spent_before_the_day_is_over_makes_a_job_longer() -> None:
    facts = BundleFacts(PLANS[:1], steps_per_epoch=43200)
    half = replace(AROUND, flash_budget_bytes_per_day=43200 * 30 * MIB // 2)
    found = promise(SPEC, facts, PLANS[0], half, always(), BEGIN.timestamp(), 0.0)
    assert found is not None and found.ends_at == pytest.approx(BEGIN.timestamp() + 2 * 86400.0)


@dataclass(frozen=True)
class Habit:
    """When somebody's device is plugged in and left alone: from an evening hour to a
    morning hour, some evenings not.
    """

    evening_h: float
    morning_h: float
    weekend_h: float
    """How much longer it is left alone on Saturday and Sunday mornings."""
    spread_h: float
    forgets: float
    """Share of the evenings on which the charger is forgotten."""

    def history(self, seed: int, days: int) -> list[tuple[datetime, datetime]]:
        rng = random.Random(seed)
        spans = []
        for day in range(days):
            midnight = BEGIN + timedelta(days=day)
            late = self.weekend_h if (midnight + timedelta(days=1)).weekday() >= 5 else 0.0
            begin = midnight + timedelta(hours=self.evening_h + rng.gauss(0.0, self.spread_h))
            end = midnight + timedelta(hours=24.0 + self.morning_h + late + rng.gauss(0.0, self.spread_h))
            if rng.random() >= self.forgets:
                spans.append((begin, end))
        return spans


LAPTOP = Habit(evening_h=22.5, morning_h=7.0, weekend_h=2.0, spread_h=0.5, forgets=0.1)
PI = Habit(evening_h=1.0, morning_h=-7.0, weekend_h=-6.0, spread_h=0.5, forgets=0.0)
"""Always plugged in, in use in the evenings and on weekend afternoons."""

LOOK_S = 300.0
LEARNS_DAYS, LASTS_DAYS = 42, 35


def trains_at(spans: list[tuple[datetime, datetime]]) -> Callable[[float], bool]:
    """Return a function that runs the real policy over a history and says whether it trains, look after look."""
    memory, left = Memory(), [(begin.timestamp(), end.timestamp()) for begin, end in reversed(spans)]

    def look(wall_s: float) -> bool:
        nonlocal memory
        while left and left[-1][1] <= wall_s:
            left.pop()
        charging = bool(left) and left[-1][0] <= wall_s
        idle = IdleSignal("input", Answer.YES if charging else Answer.NO, "")
        power = Power.EXTERNAL if charging else Power.BATTERY
        facts = Facts(power=power, battery_percent=80.0, idle_signals=(idle,))
        decision = decide(facts, Policy(), Now(wall_s, datetime.fromtimestamp(wall_s)), memory)
        memory = decision.memory
        return decision.state.trains

    return look


def promised_over_actual(habit: Habit, seed: int, needed_h: float) -> float:
    """Return the promised time until a job is done over what it took, on a device of this habit."""
    trains, times = trains_at(habit.history(seed, LEARNS_DAYS + LASTS_DAYS)), UsualTimes()
    submitted_s = (BEGIN + timedelta(days=LEARNS_DAYS, hours=12)).timestamp()
    wall_s = BEGIN.timestamp()
    while wall_s < submitted_s:
        times.look(wall_s, float(trains(wall_s)))
        wall_s += LOOK_S
    spec, facts = replace(SPEC, steps=int(needed_h * HOUR_S / 2.0)), BundleFacts(PLANS[:1])
    given = promise(spec, facts, PLANS[0], AROUND, times, submitted_s, 0.0)
    assert given is not None and given.ends_at is not None
    done_s = 0.0
    while done_s < needed_h * HOUR_S:
        done_s += LOOK_S * trains(wall_s)
        wall_s += LOOK_S
    return (given.ends_at - submitted_s) / (wall_s - submitted_s)


NEEDED_H = (6, 8, 12, 14, 25, 30, 40, 60, 70, 100)


@pytest.mark.slow
def test_ten_jobs_on_a_device_of_steady_habits_end_when_it_was_promised() -> None:
    for seed, needed_h in enumerate(NEEDED_H):
        assert promised_over_actual(PI, seed, needed_h) == pytest.approx(1.0, rel=0.15)


@pytest.mark.slow
def test_most_jobs_do_where_the_charger_is_forgotten_one_evening_in_ten() -> None:
    ratios = [promised_over_actual(LAPTOP, seed, needed_h) for seed, needed_h in enumerate(NEEDED_H)]
    assert sum(ratio == pytest.approx(1.0, rel=0.15) for ratio in ratios) >= 6
