"""Operators are divided within both memories: what is planned of the choice keeps to them, and is no slower than one
device alone within them.
"""

from dataclasses import replace

import pytest

from port_agent.prepare.placement.divide import PlacedJob, PlacementError, placed_job
from port_agent.prepare.placement.memories import PlacementMemory
from port_agent.prepare.pools import Pools
from port_planner.ir.device_kinds import CPU
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.make_bundle import CapturedJob
from port_planner.problem.placed_step import on_kind
from tests.agent.prepare.placement.placed_job import LINKS, WORKSPACE, captured_job, device_costs, tables
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

PATIENCE_S = 10.0
AMPLE = 1 << 30


@pytest.fixture(scope="module")
def captured() -> CapturedJob:
    SimBackend().use_own_bits(True)
    return captured_job()


def divide(captured: CapturedJob, memory: PlacementMemory) -> PlacedJob:
    return placed_job(captured, *tables(captured), NAME, LINKS, 1.0, memory, time_limit_s=PATIENCE_S)


def held(found: PlacedJob, memory: PlacementMemory) -> tuple[int, int]:
    """Return what the step holds of the host's memory and of the device's if nothing is paged."""
    graph = found.captured.graphs["step"]
    program = lower(graph, memory.costs(graph, found.measured.ops[0]), Plan(), check_budget=False)
    return program.beside_bytes, program.peak_bytes


def test_a_device_that_is_short_keeps_less_and_is_no_slower_than_one_device_within_the_budgets(
    captured: CapturedJob,
) -> None:
    ample = PlacementMemory(Pools(AMPLE, AMPLE), device_costs())
    free = divide(captured, ample)
    _, on_device = held(free, ample)
    moved = paged = 0
    for share in (0.5, 0.3):
        memory = PlacementMemory(Pools(AMPLE, int(share * on_device)), device_costs())
        found = divide(captured, memory)
        seconds = memory.planned_seconds(found.captured.graphs["step"], found.measured.ops[0])
        assert seconds is not None
        assert all(seconds <= alone * (1 + 1e-9) for alone in found.alone.values())
        assert CPU in found.alone
        moved += found.kinds["step"] != free.kinds["step"]
        paged += held(found, memory)[1] > memory.pools.computing_bytes
    assert moved >= 1 and moved + paged >= 2, "what does not fit runs elsewhere, or is paged"


def test_a_host_that_is_short_hands_operators_to_the_device(captured: CapturedJob) -> None:
    ample = PlacementMemory(Pools(AMPLE, AMPLE), device_costs())
    free = divide(captured, ample)
    on_host, _ = held(free, ample)
    memory = PlacementMemory(Pools(int(0.6 * on_host), AMPLE), device_costs())
    found = divide(captured, memory)
    assert held(found, memory)[0] <= memory.pools.ram_bytes < on_host
    assert found.kinds["step"].count(NAME) > free.kinds["step"].count(NAME) and set(found.alone) == {NAME}


def test_one_memory_for_both_holds_what_lies_on_either(captured: CapturedJob) -> None:
    shared = replace(device_costs(), scratch_targets=())
    ample = PlacementMemory(Pools(AMPLE), shared)
    free = divide(captured, ample)
    graph = free.captured.graphs["step"]
    on_host, _ = held(free, ample)
    assert ample.costs(graph, free.measured.ops[0]).device.base_bytes == on_host > 0
    whole = sum(held(free, ample))
    memory = PlacementMemory(Pools(int(0.8 * whole)), shared)
    found = divide(captured, memory)
    seconds = memory.planned_seconds(found.captured.graphs["step"], found.measured.ops[0])
    assert seconds is not None and all(seconds <= alone * (1 + 1e-9) for alone in found.alone.values())


def test_where_one_device_is_as_fast_within_its_budget_the_error_says_what_it_takes_there(
    captured: CapturedJob,
) -> None:
    """Without room on the device the CPU computes all; what it takes is the plan's figure."""
    memory = PlacementMemory(Pools(AMPLE, WORKSPACE // 2), device_costs())
    with pytest.raises(PlacementError, match="plan with --device cpu"):
        divide(captured, memory)
    graph = on_kind(captured.graphs["step"], CPU)
    on_cpu, _ = tables(captured)
    tight = PlacementMemory(Pools(1000, AMPLE), device_costs())
    assert tight.planned_seconds(graph, on_cpu.ops[0]) is None, "the CPU alone keeps to the host's budget"
