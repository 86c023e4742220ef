"""A transfer is told from every other operator: all bytes of a storage, to another kind of device."""

from dataclasses import replace

import pytest

from port_planner.ir.devices.transfers import StorageTransfer, all_bytes, transfer_of, transfer_op
from port_planner.ir.graph import NamedArgument, Op, Phase, Ref, Role, StepGraph, Storage, Value

STEP = StepGraph(
    storages=(Storage(8, Role.BATCH, "batch0"), Storage(8, Role.TEMPORARY, "", "sim"), Storage(8, Role.TEMPORARY, "")),
    values=(all_bytes(0, 8), all_bytes(1, 8), Value(0, "float32", (2,), (1,), 0), all_bytes(2, 8), all_bytes(0, 4)),
    ops=(),
    batch=(2,),
    loss=2,
)
TO_SIM = transfer_op(0, 1, "sim", Phase.FORWARD)


def test_a_transfer_says_from_where_to_where() -> None:
    assert transfer_of(STEP, TO_SIM) == StorageTransfer(0, 1)


@pytest.mark.parametrize(
    "other",
    [
        replace(TO_SIM, name="aten::clone"),
        replace(TO_SIM, args=(Ref(2),)),  # as numbers
        replace(TO_SIM, args=(Ref(4),)),  # a part
        replace(TO_SIM, kwargs=()),
        replace(
            TO_SIM, kwargs=(("device", NamedArgument("device", "sim")), ("dtype", NamedArgument("dtype", "float32")))
        ),
        transfer_op(0, 3, "cpu", Phase.FORWARD),  # within one memory
        replace(TO_SIM, outputs=(None,)),
    ],
)
def test_what_does_anything_else_is_none(other: Op) -> None:
    assert transfer_of(STEP, other) is None
