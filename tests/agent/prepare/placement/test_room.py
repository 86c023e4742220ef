"""Operators are divided within both memories: what is planned of the choice keeps to them, and is no slower than one device alone within them."""

from dataclasses import replace

import pytest

from port_agent.prepare.placement.divide import Divided, PlacementError, divided
from port_agent.prepare.placement.room import PlacementRoom
from port_agent.prepare.pools import Pools
from port_planner.ir.devices.kinds import CPU
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.make_bundle import Prepared
from port_planner.problem.placed_step import on_kind
from tests.agent.prepare.placement.placed_job import LINKS, WORKSPACE, device_costs, prepared_job, tables
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

PATIENCE_S = 10.0
AMPLE = 1 << 30


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    SimBackend().use_own_bits(True)
    return prepared_job()


def divide(prepared: Prepared, room: PlacementRoom) -> Divided:
    return divided(prepared, *tables(prepared), NAME, LINKS, 1.0, room, time_limit_s=PATIENCE_S)


def held(found: Divided, room: PlacementRoom) -> tuple[int, int]:
    """Return what the step holds of the host's memory and of the device's if nothing is paged."""
    graph = found.prepared.graphs["step"]
    program = lower(graph, room.costs(graph, found.measured.ops[0]), Plan(), check_budget=False)
    return program.beside_bytes, program.peak_bytes


def test_a_device_that_is_short_keeps_less_and_is_no_slower_than_one_device_within_the_budgets(
    prepared: Prepared,
) -> None:
    ample = PlacementRoom(Pools(AMPLE, AMPLE), device_costs())
    free = divide(prepared, ample)
    _, on_device = held(free, ample)
    moved = paged = 0
    for share in (0.5, 0.3):
        room = PlacementRoom(Pools(AMPLE, int(share * on_device)), device_costs())
        found = divide(prepared, room)
        seconds = room.planned_seconds(found.prepared.graphs["step"], found.measured.ops[0])
        assert seconds is not None
        assert all(seconds <= alone * (1 + 1e-9) for alone in found.alone.values())
        assert CPU in found.alone
        moved += found.kinds["step"] != free.kinds["step"]
        paged += held(found, room)[1] > room.pools.computing_bytes
    assert moved >= 1 and moved + paged >= 2, "what does not fit runs elsewhere, or is paged"


def test_a_host_that_is_short_hands_operators_to_the_device(prepared: Prepared) -> None:
    ample = PlacementRoom(Pools(AMPLE, AMPLE), device_costs())
    free = divide(prepared, ample)
    on_host, _ = held(free, ample)
    room = PlacementRoom(Pools(int(0.6 * on_host), AMPLE), device_costs())
    found = divide(prepared, room)
    assert held(found, room)[0] <= room.pools.ram_bytes < on_host
    assert found.kinds["step"].count(NAME) > free.kinds["step"].count(NAME) and set(found.alone) == {NAME}


def test_one_memory_for_both_holds_what_lies_on_either(prepared: Prepared) -> None:
    shared = replace(device_costs(), scratch_targets=())
    ample = PlacementRoom(Pools(AMPLE), shared)
    free = divide(prepared, ample)
    graph = free.prepared.graphs["step"]
    on_host, _ = held(free, ample)
    assert ample.costs(graph, free.measured.ops[0]).device.base_bytes == on_host > 0
    whole = sum(held(free, ample))
    room = PlacementRoom(Pools(int(0.8 * whole)), shared)
    found = divide(prepared, room)
    seconds = room.planned_seconds(found.prepared.graphs["step"], found.measured.ops[0])
    assert seconds is not None and all(seconds <= alone * (1 + 1e-9) for alone in found.alone.values())


def test_where_one_device_is_as_fast_within_its_budget_the_error_says_what_it_takes_there(prepared: Prepared) -> None:
    """Without room on the device the CPU computes all; what it takes is the plan's figure."""
    room = PlacementRoom(Pools(AMPLE, WORKSPACE // 2), device_costs())
    with pytest.raises(PlacementError, match="plan with --device cpu"):
        divide(prepared, room)
    graph = on_kind(prepared.graphs["step"], CPU)
    on_cpu, _ = tables(prepared)
    tight = PlacementRoom(Pools(1000, AMPLE), device_costs())
    assert tight.planned_seconds(graph, on_cpu.ops[0]) is None, "the CPU alone keeps to the host's budget"
