"""Copies of whole storages between the memories of two kinds of devices, as operators of a graph.

A transfer is torch's own `_to_copy` of all bytes of a storage. The contents are equal on both sides, so no number
depends on where or how often a storage is transferred.
"""

from dataclasses import dataclass

from port_planner.ir.graph import NamedArgument, Op, Phase, Ref, StepGraph, Value

_COPY = "aten::_to_copy"


@dataclass(frozen=True, slots=True)
class StorageTransfer:
    """A copy of storage `source` to storage `target`, which is on another kind of device."""

    source: int
    target: int


def all_bytes(storage: int, nbytes: int) -> Value:
    """Return the value that is a storage's bytes."""
    return Value(storage, "uint8", (nbytes,), (1,), 0)


def transfer_op(source: int, target: int, kind: str, phase: Phase) -> Op:
    """Return the transfer of the value `source`, all bytes of a storage, into the value
    `target` on a kind of device.
    """
    return Op(_COPY, (Ref(source),), (("device", NamedArgument("device", kind)),), (target,), (), phase)


def transfer_of(graph: StepGraph, op: Op) -> StorageTransfer | None:
    """Return the transfer that an operator performs, or None for any other operator."""
    if op.name != _COPY or len(op.args) != 1 or not isinstance(op.args[0], Ref) or op.outputs[0] is None:
        return None
    source, target = graph.values[op.args[0].value], graph.values[op.outputs[0]]
    ends = graph.storages[source.storage], graph.storages[target.storage]
    whole = all(
        value == all_bytes(value.storage, end.nbytes) for value, end in zip((source, target), ends, strict=True)
    )
    if (
        not whole
        or ends[0].device == ends[1].device
        or dict(op.kwargs) != {"device": NamedArgument("device", ends[1].device)}
    ):
        return None
    return StorageTransfer(source.storage, target.storage)
