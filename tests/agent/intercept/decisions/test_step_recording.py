"""A step as it is recorded for the planner, and a plan of it by segment."""

from collections.abc import Sequence

import torch

from port_agent.intercept.decisions.step_recording import StepRecording
from port_agent.intercept.residency.storages import Storage, StorageTable
from port_agent.intercept.residency.trace import Trace
from port_planner.ir.traced import Departure, TracedOp, TracedStorage

FORWARD, UPDATE = Trace(), Trace()


def storages(count: int) -> tuple[Sequence[Storage], list[torch.Tensor]]:
    """Return records of storages, and what keeps them alive."""
    table = StorageTable(smallest_bytes=0)
    tensors = [torch.empty(64) for _ in range(count)]
    return [s for s in map(table.of, tensors) if s is not None], tensors


def recorded() -> StepRecording:
    """Record a forward pass that makes an activation and a gradient, and an update: storages
    in the order of their use.
    """
    (weight, activation, gradient, before), _alive = storages(4)
    recording = StepRecording((FORWARD, UPDATE))
    recording.ended(before)
    recording.add([weight, weight], [activation], [], 0.5, 7, repeatable=True)
    recording.add([weight, activation], [gradient], [], 0.25, 0, repeatable=False)
    recording.ended(activation)
    recording.end_segment(FORWARD)
    recording.add([weight, gradient], [], [weight], 0.125, 0, repeatable=False)
    recording.end_segment(UPDATE)
    return recording


def test_operators_and_lives_are_those_that_were_seen() -> None:
    recording = recorded()
    assert recording.complete and not recording.broken
    step = recording.step()
    assert step.ops == (
        TracedOp(0.5, 7, (0,), (), (1,), repeatable=True),
        TracedOp(0.25, 0, (0, 1), (), (2,)),
        TracedOp(0.125, 0, (0, 2), (0,)),
    )
    assert step.storages == (
        TracedStorage(256, persistent=True, ends=3),
        TracedStorage(256, persistent=False, ends=2),
        TracedStorage(256, persistent=False, ends=3),
    )


def test_a_plan_hangs_on_positions_and_operands_of_segments() -> None:
    forward, update = recorded().segment_plans([Departure(0, 0, False), Departure(0, 1, True), Departure(2, 2, False)])
    assert forward.leaving == {0: {0: False, 1: False, 2: True}}  # the weight was two operands of the first operator
    assert forward.remade == {0}
    assert update.leaving == {0: {1: False}} and update.remade == set()


def test_another_segment_breaks_it() -> None:
    recording = StepRecording((FORWARD, UPDATE))
    recording.end_segment(UPDATE)
    assert recording.broken and not recording.complete


def test_without_an_expected_step_every_segment_is_its_own() -> None:
    recording = StepRecording()
    recording.end_segment(UPDATE)
    assert recording.segments == (UPDATE,) and not recording.broken and not recording.complete
