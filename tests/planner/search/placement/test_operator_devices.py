"""The chosen devices are those that trying all finds, and are never worse than any one device."""

import itertools
import random
from dataclasses import replace

import pytest

from port_planner.ir.costs import OpCost
from port_planner.search.placement.operator_devices import (
    HOST,
    DeviceChoice,
    DeviceChoiceError,
    DeviceLink,
    DeviceProblem,
    Goal,
    HandedContents,
    choose_devices,
    contents_of,
    on_devices,
    on_one_device,
)
from tests.planner.steps import tiny_step

OTHER = {Goal.JOULES: Goal.SECONDS, Goal.SECONDS: Goal.JOULES}


def random_problem(seed: int) -> DeviceProblem:
    """Return up to 8 operators on two devices, or 6 on three, some of which a device does not have."""
    rng = random.Random(seed)
    devices = rng.choice((2, 2, 3))
    count = rng.randint(3, 8 if devices == 2 else 6)
    costs = []
    for _ in range(count):
        row: list[OpCost | None] = [OpCost(rng.uniform(0.1, 3), 0, rng.uniform(0.1, 3)) for _ in range(devices)]
        if rng.random() < 0.15:
            row[rng.randrange(devices)] = None
        costs.append(tuple(row))
    contents = [
        HandedContents(
            rng.randint(0, 9), i, tuple(sorted(rng.sample(range(i + 1, count), rng.randint(1, count - i - 1))))
        )
        for i in range(count - 1)
    ]
    contents += [
        HandedContents(4, None, (0, count - 1)),
        HandedContents(4, count - 1, (), to_host=True),
        HandedContents(6, count - 1, (0,)),
    ]
    links = tuple(
        tuple(
            DeviceLink() if a == b else DeviceLink(rng.uniform(0, 0.2), rng.uniform(0, 0.1), rng.uniform(0, 0.1))
            for b in range(devices)
        )
        for a in range(devices)
    )
    return DeviceProblem(tuple(costs), tuple(contents), links, static_watts=rng.choice((0.0, 0.5)))


def best_of_all(problem: DeviceProblem, goal: Goal) -> float:
    """Return the least that any choice takes which needs no more of the other than the best single device."""
    single = min(on_one_device(problem).values(), key=lambda c: c.amount(goal), default=None)
    options = [[d for d, cost in enumerate(costs) if cost is not None] for costs in problem.costs]
    found: list[DeviceChoice] = [on_devices(problem, devices) for devices in itertools.product(*options)]
    return min(
        c.amount(goal)
        for c in found
        if single is None or c.amount(OTHER[goal]) <= single.amount(OTHER[goal]) * (1 + 1e-9)
    )


@pytest.mark.parametrize("goal", Goal)
def test_the_choice_is_the_best_of_all_and_never_worse_than_one_device(goal: Goal) -> None:
    split = 0
    for seed in range(40):
        problem = random_problem(seed)
        found = choose_devices(problem, goal)
        assert found.amount(goal) == pytest.approx(best_of_all(problem, goal), rel=2e-4), seed
        assert on_devices(problem, found.devices) == found
        for one in on_one_device(problem).values():
            assert found.amount(goal) <= one.amount(goal) * (1 + 1e-9), seed
        best = min(on_one_device(problem).values(), key=lambda c: c.amount(goal), default=None)
        assert best is None or found.amount(OTHER[goal]) <= best.amount(OTHER[goal]) * (1 + 1e-6), seed
        split += len(set(found.devices)) > 1
    assert split >= 10, "operators were hardly ever divided"


def test_transfers_that_cost_too_much_leave_all_on_one_device() -> None:
    for seed in range(10):
        problem = random_problem(seed)
        expensive = tuple(tuple(DeviceLink(1e3, 1e3, 1e3) for _ in row) for row in problem.links)
        apart = replace(problem, links=expensive, contents=tuple(replace(c, nbytes=1) for c in problem.contents))
        if HOST in on_one_device(apart):
            assert set(choose_devices(apart).devices) == {HOST}, "batches come from the host"


def test_a_step_hands_each_contents_to_its_readers_and_weights_to_the_next_step() -> None:
    graph = tiny_step().graphs["step"]
    contents = contents_of(graph)
    updates = [c for c in contents if c.writer is not None and any(i <= c.writer for i in c.readers)]
    assert updates, "what the update leaves in a weight, the next step's forward pass reads"
    assert [c for c in contents if c.to_host], "the loss is read by the caller"
    assert {c.nbytes for c in contents if c.writer is None} <= {
        graph.storages[graph.values[v].storage].nbytes for v in graph.batch
    }
    for c in contents:
        assert all(any(i in graph.uses[s] for s in range(len(graph.storages))) for i in c.readers)


def test_what_cannot_be_chosen_is_said() -> None:
    problem = random_problem(0)
    with pytest.raises(DeviceChoiceError, match="runs on none of the"):
        choose_devices(replace(problem, costs=(tuple(None for _ in problem.links), *problem.costs[1:])))
    with pytest.raises(DeviceChoiceError, match="every operator needs 2 costs"):
        choose_devices(replace(problem, costs=((None,), *problem.costs[1:])))
    missing = replace(problem, costs=((None, *problem.costs[0][1:]), *problem.costs[1:]))
    with pytest.raises(DeviceChoiceError, match="cannot run on device 0"):
        on_devices(missing, [0] * len(problem.costs))
