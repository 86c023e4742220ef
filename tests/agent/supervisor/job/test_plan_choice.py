"""Which plan a run starts with, its limits, and how often it is saved."""

from dataclasses import replace

import pytest

from port_agent.supervisor.job.plan_choice import (
    PlanFigures,
    WriteAllowance,
    at_measured_speed,
    checkpoint_interval_s,
    choose_plan,
    data_limit,
    eta_s,
    fitting,
    memory_max,
    resident_max,
    smaller_plan,
)

MIB = 1 << 20


FRONTIER = (
    PlanFigures(0, 900 * MIB, 1.0, 5.0),
    PlanFigures(1, 600 * MIB, 1.4, 6.0),
    PlanFigures(2, 400 * MIB, 2.5, 4.0),
)


@pytest.mark.parametrize(
    ("limit", "ceiling", "steps", "left", "warm", "index"),
    [
        (None, None, None, None, False, 2),  # the least energy
        (2000 * MIB, None, 100, 1000.0, False, 2),  # in time
        (2000 * MIB, None, 100, 200.0, False, 0),  # 2.5 s a step is too slow; of the others the least energy
        (700 * MIB, None, 100, 200.0, False, 1),
        (2000 * MIB, None, 100, 50.0, False, 0),  # none in time: the fastest
        (2000 * MIB, 900 * MIB, 100, 50.0, False, 1),  # the fastest was killed before
        (500 * MIB, None, None, None, False, 2),
        (100 * MIB, None, None, None, False, None),
        (2000 * MIB, None, None, None, True, 2),  # the least power: 4 J / 2.5 s
    ],
)
def test_choice_of_the_plan(
    limit: int | None, ceiling: int | None, steps: int | None, left: float | None, warm: bool, index: int | None
) -> None:
    plan = choose_plan(FRONTIER, limit, ceiling, steps_left=steps, time_left_s=left, warm=warm)
    assert (plan.index if plan else None) == index


def test_times_are_taken_as_measured() -> None:
    scaled = at_measured_speed(FRONTIER, 1, 2.8)  # this device needs twice the planned time
    assert [plan.step_s for plan in scaled] == [2.0, 2.8, 5.0]
    assert at_measured_speed(FRONTIER, None, 2.8) == FRONTIER
    assert at_measured_speed(FRONTIER, 1, None) == FRONTIER


def test_smaller_plan_and_limits() -> None:
    smaller = smaller_plan(FRONTIER, 900 * MIB)
    assert smaller is not None and smaller.index == 1
    assert smaller_plan(FRONTIER, 400 * MIB) is None
    assert 400 * MIB < memory_max(400 * MIB) < data_limit(400 * MIB)
    assert (resident_max(400 * MIB), resident_max(40 * MIB)) == (420 * MIB, None)
    assert eta_s(10, 30, 2.0) == 40.0
    assert eta_s(10, None, 2.0) is None


def test_plans_that_differ_in_a_devices_own_memory_are_smaller_by_that() -> None:
    on_device = [PlanFigures(i, 900 * MIB, device_bytes=size * MIB) for i, size in enumerate((4000, 3000, 2000))]
    smaller = smaller_plan(on_device, on_device[0].all_bytes)
    assert smaller is not None and smaller.index == 1
    assert [plan.index for plan in fitting(on_device, None, on_device[1].all_bytes)] == [2]
    assert len(fitting(on_device, memory_max(900 * MIB), None)) == 3, "the host's limit says nothing of the device"


def test_checkpoints_follow_cost_and_wear() -> None:
    budget = 4096 * MIB
    assert checkpoint_interval_s(None, None, budget) == 600.0
    assert checkpoint_interval_s(0.1, MIB // 10, budget) == 10.0  # cheap: often, but not more often than it is worth
    assert checkpoint_interval_s(4.0, MIB, budget) == 200.0  # 2 % of the time
    assert checkpoint_interval_s(60.0, MIB, budget) == 600.0  # a power cut costs at most ten minutes,
    wear = checkpoint_interval_s(1.0, 100 * MIB, budget)  # unless the card would suffer
    assert wear == pytest.approx(86400 * 100 / 2048)


SPARING = (
    PlanFigures(0, 600 * MIB, 1.0, 5.0, written_bytes=100 * MIB, wear_joules=1.0),
    PlanFigures(1, 600 * MIB, 2.0, 8.0, written_bytes=10 * MIB, wear_joules=0.1),
)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("left_bytes", "left_s", "steps", "index"),
    [
        (16 * GIB, 100.0, None, 0),  # 9.8 GiB until midnight
        (9 * GIB, 100.0, None, 1),  # 0.5 GiB by the other
        (9 * GIB, 3600.0, 50, 0),  # it is done before
        (MIB, 3600.0, None, 1),  # none lasts: the one that writes least
    ],
)
def test_a_plan_whose_writes_last_for_the_day(left_bytes: int, left_s: float, steps: int | None, index: int) -> None:
    chosen = choose_plan(SPARING, None, steps_left=steps, allowance=WriteAllowance(left_bytes, left_s))
    assert chosen is not None and chosen.index == index


def test_wear_counts_like_energy() -> None:
    dear = replace(SPARING[0], wear_joules=4.0)
    chosen = choose_plan((dear, SPARING[1]), None)
    assert chosen is not None and chosen.index == 1
