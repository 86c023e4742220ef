"""Numbers among the arguments of operators: only those that change nothing else may change from batch to batch."""

import pytest
import torch

from port_planner.base.errors import CaptureError
from port_planner.capture.numbers import digest_of_calls, numbers_of, put_slots
from port_planner.capture.recorder import StepRecorder, Tape
from port_planner.ir.graph import Ref, Role, Scalar
from port_planner.ir.known_steps import KnownShape, NumberPlace


def tape_of(divisor: int, whole: int = 1, shift: int = 1) -> Tape:
    recorder = StepRecorder()
    x = torch.ones(4, 3)
    recorder.add(x, Role.BATCH, "batch0")
    with recorder:
        torch.add(x / divisor, x, alpha=0.5).roll(shift, 0) * torch.arange(3).add(whole)
    return recorder.tape


def test_numbers_beside_floating_point_may_change_and_those_that_shift_or_count_may_not() -> None:
    tape = tape_of(3)
    found = {(tape.ops[op].name, place): number for (op, place), number in numbers_of(tape).items()}
    assert found == {("aten::div.Tensor", 1): 3.0, ("aten::add.Tensor", "alpha"): 0.5}


def test_a_slot_takes_the_place_of_a_number_that_changes() -> None:
    tape = tape_of(3)
    place = next(place for place in numbers_of(tape) if tape.ops[place[0]].name == "aten::div.Tensor")
    known = KnownShape(0, 2, (NumberPlace(*place, 0),), digest_of_calls(tape_of(2), {place}))
    for other in (tape_of(3, whole=2), tape_of(3, shift=2)):
        with pytest.raises(CaptureError, match="calls other operators than the script alone"):
            put_slots(other, known)
    assert put_slots(tape, known) == 1
    divided = tape.ops[place[0]]
    assert isinstance(divided.args[0], Ref) and divided.args[1] == Scalar(0)
