"""What a program and the process that plans for it exchange survives the way there and back."""

import msgspec

from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.ir.traced import (
    Departure,
    TracedOp,
    TracedPlan,
    TracedRequest,
    TracedStep,
    TracedStorage,
    pack_traced_plan,
    read_traced_plans,
)

DEVICE = DeviceCosts("device", 0, 2.0, 4.0, Flash("pages", 1e8, 5e7, 1e-4, 1e-9, 2e-9))


def test_a_request_and_a_plan_come_back_as_they_were() -> None:
    ops = (TracedOp(0.1, 5, (0,), (), (1,), repeatable=True), TracedOp(0.2, 0, (0, 1), (0,)))
    step = TracedStep(ops, (TracedStorage(1 << 20, True, 2), TracedStorage(1 << 16, False, 2)))
    request = TracedRequest(step, DEVICE, 1 << 20, 3.0, deadline_s=4.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=TracedRequest) == request


def test_plans_are_read_while_they_are_written() -> None:
    plans = [TracedPlan((Departure(0, 1, True),), name, 1.5, 0.5, 9.0, 1 << 20, 1 << 19) for name in ("greedy", "milp")]
    written = b"".join(map(pack_traced_plan, plans))
    assert list(read_traced_plans(written)) == plans
    first = len(pack_traced_plan(plans[0]))
    for end in range(len(written)):
        assert list(read_traced_plans(written[:end])) == plans[: end >= first]
