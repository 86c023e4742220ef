"""Memories bound the choice of devices: what is found is what trying every placement and every page finds,
and holds what is counted.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from port_planner.ir.costs import CostTable, Flash, OpCost
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.problem.placed_step import placed_step
from port_planner.search.placement.device_memory import (
    DeviceMemory,
    DevicePage,
    HeldStorage,
    IdleSpan,
    MemoryPool,
    PageTarget,
    held_of,
    overfull,
    pool_bytes,
)
from port_planner.search.placement.operator_devices import (
    DeviceChoice,
    DeviceChoiceError,
    DeviceLink,
    DeviceProblem,
    Goal,
    HandedContents,
    choose_devices,
    on_devices,
    on_one_device,
    together_of,
)
from tests.planner.steps import costs_of, tiny_step

HOST, DEVICE = 0, 1
PAGED = Flash("host memory", 20.0, 20.0, 0.02, 0.01, 0.01, capacity_bytes=1)


def bounded_problem(seed: int) -> DeviceProblem:
    """Return five operators on two devices with a weight, of which one or both memories are short."""
    rng, count = random.Random(seed), 5
    costs = tuple(
        tuple(
            OpCost(rng.uniform(0.1, 1) * (8 if d == HOST else 1), rng.randint(0, 3), rng.uniform(0.1, 3))
            for d in range(2)
        )
        for _ in range(count)
    )
    held, contents = [], []
    for i in range(count - 1):
        readers = tuple(sorted(rng.sample(range(i + 1, count), rng.randint(1, min(2, count - i - 1)))))
        nbytes = rng.randint(1, 9)
        held.append(HeldStorage(nbytes, i, HOST, (i, *readers), (readers,)))
        contents.append(HandedContents(nbytes, i, readers))
    weight = rng.randint(2, 9)
    held.append(HeldStorage(weight, count - 1, HOST, (1, count - 1), ((1, count - 1),), lasting=True))
    contents.append(HandedContents(weight, count - 1, (1, count - 1)))
    held.append(HeldStorage(2, None, HOST, (0,), ((0,),), lasting=True, copies_last=True, written=False))
    contents.append(HandedContents(2, None, (0,)))
    between = DeviceLink(rng.uniform(0, 0.1), rng.uniform(0, 0.05), rng.uniform(0, 0.1))
    free = DeviceLink()
    rooms = rng.choice(((60, 17), (60, 15), (26, 40), (30, 20)))
    pools = tuple(MemoryPool(frozenset({m}), room) for m, room in enumerate(rooms))
    memory = DeviceMemory((HOST, DEVICE), tuple(held), pools, (PageTarget(DEVICE, PAGED, HOST),))
    if seed % 4 == 3:  # one memory for both: copies take of it all the same
        memory = replace(memory, pools=(MemoryPool(frozenset({HOST, DEVICE}), sum(rooms) // 2),))
    return DeviceProblem(costs, tuple(contents), ((free, between), (between, free)), 0.2, memory=memory)


def every_choice(problem: DeviceProblem) -> list[DeviceChoice]:
    """Return all placements with all pages that keep to their memories."""
    memory, count = problem.memory, len(problem.costs)
    assert memory is not None
    pages = [DevicePage(h, gap, 0) for h, held in enumerate(memory.held) for gap in held.gaps(count)]
    found = []
    for devices in itertools.product(range(2), repeat=count):
        for chosen in itertools.product((False, True), repeat=len(pages)):
            taken = [page for page, take in zip(pages, chosen, strict=True) if take]
            if not overfull(memory, pool_bytes(memory, problem.costs, devices, taken)):
                found.append(on_devices(problem, devices, taken))
    return found


@pytest.mark.slow
def test_the_choice_is_the_best_that_memories_have_room_for() -> None:
    paged = divided = impossible = 0
    for seed in range(16):
        problem = bounded_problem(seed)
        choices = every_choice(problem)
        if not choices:
            with pytest.raises(DeviceChoiceError, match="within its memory"):
                choose_devices(problem, Goal.SECONDS)
            impossible += 1
            continue
        alone = [
            min((c for c in choices if set(c.devices) == {d}), key=lambda c: c.seconds, default=None) for d in range(2)
        ]
        single = min((c for c in alone if c is not None), key=lambda c: c.seconds, default=None)
        least = min(c.seconds for c in choices if single is None or c.joules <= single.joules * (1 + 1e-9))
        found = choose_devices(problem, Goal.SECONDS)
        assert found.seconds == pytest.approx(least, rel=2e-4), seed
        assert problem.memory is not None
        assert not overfull(problem.memory, pool_bytes(problem.memory, problem.costs, found.devices, found.pages)), seed
        for one in on_one_device(problem, Goal.SECONDS).values():
            assert found.seconds <= one.seconds * (1 + 1e-9), seed
        paged += bool(found.pages)
        divided += len(set(found.devices)) > 1
    assert paged >= 3 and divided >= 5 and impossible >= 1, (paged, divided, impossible)


def test_what_is_counted_is_what_the_placed_step_holds() -> None:
    """A program of the placed step holds no more of either memory, and little less."""
    graph = tiny_step().graphs["step"]
    rng = random.Random(1)
    table = costs_of(graph, workspace=3000)
    costs = tuple((cost, cost) for cost in table.ops)
    memory = DeviceMemory((HOST, DEVICE), held_of(graph), ())
    memory = replace(memory, pools=tuple(MemoryPool(frozenset({m}), 0) for m in range(2)))
    kinds = ("cpu", "sim")
    for _ in range(6):
        devices = [rng.randrange(2) for _ in graph.ops]
        for group in together_of(graph):
            for i in group:
                devices[i] = devices[group[0]]
        made = placed_step(graph, [kinds[d] for d in devices])
        free = OpCost(0.0, 0, 0.0)
        ops = tuple(
            free
            if i is None
            else table.ops[i]
            if devices[i] == DEVICE
            else replace(table.ops[i], workspace_bytes=0, beside_bytes=table.ops[i].workspace_bytes)
            for i in made.origin
        )
        program = lower(made.graph, CostTable(table.device, ops), Plan())
        host, device = pool_bytes(memory, costs, devices, ()).max(axis=1)
        largest = max(s.nbytes for s in graph.storages)
        assert 0 <= device - program.peak_bytes <= largest
        assert 0 <= host - program.beside_bytes <= largest


def test_a_gap_around_the_end_of_the_step_covers_both_ends() -> None:
    gap = IdleSpan(3, 1)
    assert [gap.covers(i) for i in range(5)] == [True, False, False, False, True]
    assert [IdleSpan(0, 3).covers(i) for i in range(5)] == [False, True, True, False, False]


def test_each_stretch_that_is_too_full_is_named_by_its_fullest_moment() -> None:
    memory = DeviceMemory((0,), (), (MemoryPool(frozenset({0}), 10),))
    taken = np.array([[11, 14, 12, 3, 11]])
    assert overfull(memory, taken) == {(0, 1), (0, 4)}
