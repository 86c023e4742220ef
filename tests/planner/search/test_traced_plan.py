"""Plans of a step that was seen to run: within the bytes, cheaper than the least recently
used, in a process of its own.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.ir.traced import TracedOp, TracedPlan, TracedRequest, TracedStep, TracedStorage, read_traced_plans
from port_planner.search.traced_plan import traced_plans
from port_planner.search.wear import SPARING_TIME

MIB = 1 << 20
DEVICE = DeviceCosts("card", 0, 2.0, 4.0, Flash("pages", 45e6, 25e6, 1e-4, 1e-8, 2e-8))


def adam(layers: int) -> TracedStep:
    """Return forward and backward over weights of 1 MiB, then Adam on each: gradients end with the step."""
    n = layers
    forward = [TracedOp(0.002, 0, (i,)) for i in range(n)]
    backward = [TracedOp(0.004, 0, (i,), (), (3 * n + i,)) for i in reversed(range(n))]
    update = [TracedOp(0.001, MIB, (i, n + i, 2 * n + i, 3 * n + i), (i, n + i, 2 * n + i)) for i in range(n)]
    storages = [TracedStorage(MIB, s < 3 * n, 3 * n) for s in range(4 * n)]
    return TracedStep((*forward, *backward, *update), tuple(storages))


def held(step: TracedStep, plan: TracedPlan) -> Sequence[int]:
    """Return the bytes held while each operator of the second step runs, counted without the planner's model."""
    leaves = {(d.after, d.storage) for d in plan.departures}
    resident = {s for s, storage in enumerate(step.storages) if storage.persistent}
    found: list[int] = []
    for _ in range(2):
        found.clear()
        for i, op in enumerate(step.ops):
            resident |= {*op.reads, *op.makes}
            found.append(sum(step.storages[s].nbytes for s in resident) + op.workspace_bytes)
            resident -= {s for s in (*op.reads, *op.makes) if (i, s) in leaves}
        resident = {s for s in resident if step.storages[s].persistent}
    return found


@pytest.mark.parametrize("room", [8, 12, 20])
def test_every_plan_holds_its_bytes_and_the_search_beats_the_greedy_one(room: int) -> None:
    step = adam(6)
    plans = list(traced_plans(TracedRequest(step, DEVICE, room * MIB, search_s=2.0)))
    assert plans[0].strategy == "greedy"
    assert [p.joules for p in plans] == sorted((p.joules for p in plans), reverse=True)
    for plan in plans:
        assert max(held(step, plan)) <= room * MIB and plan.peak_bytes <= room * MIB


@pytest.mark.parametrize("search_s", [0.0, 2.0])
def test_flash_that_wears_out_is_spared_for_a_little_time(search_s: float) -> None:
    n = 8
    forward = [TracedOp(0.01, 0, (0,), (), (1 + i,), repeatable=True) for i in range(n)]
    backward = [TracedOp(0.05, 0, (0, 1 + i)) for i in reversed(range(n))]
    activations = (TracedStorage(MIB, False, 2 * n - i) for i in range(n))
    step = TracedStep((*forward, *backward), (TracedStorage(MIB, True, 2 * n), *activations))
    fast = Flash("pages", 1e9, 1e9, 1e-4, 1e-9, 1e-9)
    planned = {}
    for wear in (0.0, 5e-6):
        device = DeviceCosts("device", 0, 2.0, 4.0, replace(fast, wear_joules_per_byte=wear))
        *_, planned[wear] = traced_plans(TracedRequest(step, device, 4 * MIB, search_s))
    assert planned[0.0].written_bytes >= (n - 3) * MIB
    assert planned[5e-6].written_bytes == 0
    assert planned[0.0].seconds < planned[5e-6].seconds <= SPARING_TIME * planned[0.0].seconds
    assert planned[5e-6].joules == pytest.approx(6.0 * planned[5e-6].seconds), "a price is not energy"


def test_nothing_leaves_where_all_fits() -> None:
    (plan,) = traced_plans(TracedRequest(adam(3), DEVICE, 64 * MIB, search_s=0.0))
    assert plan.departures == () and plan.seconds == pytest.approx(3 * 0.007)


def test_what_passes_through_in_tiles_may_leave_where_it_is_made() -> None:
    """An operator takes and makes 12 MiB of 10; what it made is not there all the time afterwards."""
    ops = (
        TracedOp(0.01, 0, (0,), (), (1,)),
        TracedOp(0.01, 0, (0, 1), (), (2,)),
        TracedOp(0.01, 0, (2,)),
        TracedOp(0.01, 0, (0, 3)),
        TracedOp(0.01, 0, (2,)),
    )
    storages = tuple(TracedStorage(4 * MIB, s in (0, 3), 5) for s in range(4))
    plans = list(traced_plans(TracedRequest(TracedStep(ops, storages), DEVICE, 10 * MIB, search_s=0.0)))
    assert len(plans) == 1 and plans[0].peak_bytes <= 10 * MIB


def test_there_is_no_plan_where_an_operator_leaves_no_room() -> None:
    step = TracedStep((TracedOp(0.1, 2 * MIB, (0,)),), (TracedStorage(MIB, True, 1),))
    assert list(traced_plans(TracedRequest(step, DEVICE, MIB, search_s=0.0))) == []


@pytest.mark.process
def test_the_process_writes_whole_plans_and_never_loads_torch() -> None:
    request = TracedRequest(adam(4), DEVICE, 8 * MIB, search_s=0.0)
    program = "import sys; from port_planner.search.traced_plan import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=msgspec.msgpack.encode(request), capture_output=True, check=True)
    assert list(read_traced_plans(done.stdout)) == list(traced_plans(request)) != []
