"""Synthetic operands: numbers of the kind that operators read, and indices within bounds."""

from collections.abc import Iterable, Sequence

import torch

from port_planner.exactness.tiles import Operands
from port_planner.ir.graph import ITEM_BYTES, Ref, StepGraph, Storage, Value, operands
from port_planner.ir.torch_operators import dtype
from port_planner.operators import operator_of
from port_planner.operators.row import Reads

SEED = 20
_SPREAD = 0.5
"""Standard deviation of synthetic numbers, with which exponentials neither overflow nor become equal."""


def made_up(graph: StepGraph, s: int, ops: Iterable[int], edges: Sequence[int]) -> torch.Tensor:
    """Return bytes for a storage: numbers of the kind that the ops read, or indices within their
    bounds, with `edges` among them.
    """
    generator = torch.Generator().manual_seed(SEED + s)
    value, bound = _read_as(graph, s, ops)
    flat = torch.empty(graph.storages[s].nbytes // ITEM_BYTES[value.dtype], dtype=dtype(value.dtype))
    if flat.is_floating_point():
        flat.normal_(0, _SPREAD, generator=generator)
    elif not flat.is_complex():
        flat.random_(0, bound, generator=generator)
        known = torch.tensor([edge for edge in edges if edge < bound][: flat.numel()])
        flat[: known.numel()] = known
    return as_bytes(flat, graph.storages[s])


def _read_as(graph: StepGraph, s: int, ops: Iterable[int]) -> tuple[Value, int]:
    """Return a value as which ops read a storage, and the upper bound of integers in it."""
    found: Value | None = None
    bound = 2
    for i in ops:
        op = graph.ops[i]
        for v in operands(op):
            if graph.values[v].storage == s and found is None:
                found = graph.values[v]
        known = operator_of(op.name)
        table, index = (op.args[k] for k in known.indices) if known.indices is not None else (None, None)
        if not isinstance(index, Ref) or graph.values[index.value].storage != s:
            continue
        if isinstance(table, int):
            bound = table
        elif isinstance(table, Ref):
            shape = graph.values[table.value].shape
            bound = shape[0] if known.reads is Reads.ROWS else shape[-1]
    if found is None:
        raise ValueError(f"storage {s} is not read by these ops")
    return found, bound


def stand_in(layout: torch.Tensor, seed: int) -> torch.Tensor:
    """Return numbers in the layout of a tensor without memory, alone in their storage."""
    return Operands(layout.dtype, seed, _SPREAD).like(layout)


def as_bytes(tensor: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (storage.nbytes,), (1,))
