"""Elementwise operators whose operands do not fit together run piece by piece, with the same bits.

An elementwise operator over whole contiguous tensors gives the same bits on consecutive pieces that start at multiples of
the vector width (`planner.ir.lowering.update_slices`). A piece of an operand that is away is read into a buffer; a piece
of a result whose storage is away goes straight to its page: AdamW on an embedding never has four such tensors in RAM.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from agent.follow.operands import makes_storage, tensors_in
from agent.follow.residency import Residency
from agent.follow.storages import Storage, StorageTable, allocated_bytes, data_ptr, untyped_storage
from agent.train.pager import CHUNK, Transfer
from planner.ir.lowering.update_slices import ELEMENTWISE

_FUSED = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_")

_LISTS = frozenset(
    f"aten::_foreach_{name}"
    for name in (
        "add_.List", "add_.Scalar", "add_.ScalarList", "sub_.List", "mul_.Scalar", "mul_.List", "mul_.ScalarList",
        "mul_.Tensor", "div_.List", "div_.Scalar", "div_.ScalarList", "addcmul_.Scalar", "addcmul_.ScalarList",
        "addcdiv_.Scalar", "addcdiv_.ScalarList", "lerp_.Scalar", "lerp_.List", "sqrt_", "neg_",
    )
)  # fmt: skip

_CREATING = frozenset(("aten::zeros_like", "aten::empty_like"))
"""They read nothing: there is nothing to cut."""

PIECE_BYTES = 4 * CHUNK
"""Bytes of each operand in a piece: a multiple of the checksummed chunk, and what flash likes to move at once."""

_LARGEST_ITEM_BYTES = 16
"""Of an element, complex128."""

PIECEWISE_FROM = 256
"""Operands that together take less than this part of the limit are not looked at: of all but lists there are fewer than 16."""

_WRITES_UNDER_WAY = 2
"""Pieces of results that may wait for the medium; each keeps its buffer."""


class PieceBuffers:
    """The pieces of a call's large operands: views where they are resident, buffers where they are away."""

    def __init__(self, residency: Residency, away: dict[int, Storage]) -> None:
        self._residency, self._away = residency, away
        self._writes: deque[Transfer] = deque()

    def load(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a contiguous tensor, at the beginning of a buffer of whole chunks where it is away.

        Raises PageError, or RuntimeError where the tensor is away and has no page: a defect of the follower.
        """
        storage = self._away.get(untyped_storage(tensor)._cdata)
        if storage is None:
            return tensor.view(-1)[start:stop]
        if storage.region is None:
            raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page to read")
        pager, begin, nbytes = (
            self._residency.pager,
            start * tensor.element_size(),
            (stop - start) * tensor.element_size(),
        )
        whole = min(-(-nbytes // CHUNK) * CHUNK, storage.region.nbytes - begin)  # a tensor may end before its storage
        buffer = torch.empty(whole, dtype=torch.uint8)
        pager.wait(pager.read(storage.region, data_ptr(untyped_storage(buffer)), buffer, begin, whole))
        return buffer[:nbytes].view(tensor.dtype)

    def store(self, storage: Storage, piece: torch.Tensor, start: int) -> None:
        """Write the buffer that a piece of a result begins to the page of its storage, from element `start` on.

        Raises PageError, or RuntimeError where the storage has no page: a defect of the follower.
        """
        if storage.region is None:
            raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page to write")
        pager, begin, buffer = self._residency.pager, start * piece.element_size(), untyped_storage(piece)
        self._writes.append(pager.write(storage.region, data_ptr(buffer), piece, begin, allocated_bytes(buffer)))
        while len(self._writes) > _WRITES_UNDER_WAY:
            pager.wait(self._writes.popleft())

    def finish(self) -> None:
        """Return when all that was stored is written. Raises PageError."""
        while self._writes:
            self._residency.pager.wait(self._writes.popleft())


def pieces_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], limit_bytes: float) -> list[torch.Tensor] | None:
    """Return the large operands of a call that must run piece by piece.

    None where it may, or has to, run whole.
    """
    if math.isinf(limit_bytes) or not is_elementwise(func):
        return None
    tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
    largest = max((t.numel() for t in tensors), default=0)
    if largest * _LARGEST_ITEM_BYTES * (len(tensors) + 1) <= limit_bytes:
        return None
    large = [t for t in tensors if t.numel() == largest]
    if any(t.layout is not torch.strided for t in tensors) or any(1 != t.numel() != largest for t in tensors):
        return None
    if any(t.is_conj() or t.is_neg() for t in tensors) or not _shown_alike(large):
        return None
    nbytes = {untyped_storage(t)._cdata: t.numel() * t.element_size() for t in large}
    made = largest * large[0].element_size() if large and makes_storage(func) else 0
    if sum(nbytes.values()) + made <= limit_bytes or largest * large[0].element_size() < 2 * PIECE_BYTES:
        return None
    shape = large[0].shape
    whole = all(t.is_contiguous() and t.shape == shape and t.storage_offset() == 0 for t in large)
    return large if whole and all(t.dim() <= len(shape) for t in tensors) else None


def _shown_alike(large: Sequence[torch.Tensor]) -> bool:
    """Tell whether operands that share a storage have one data type: a piece of it is read once for all."""
    return len({(untyped_storage(t)._cdata, t.dtype) for t in large}) == len({untyped_storage(t)._cdata for t in large})


def buffers_bytes(large: Sequence[torch.Tensor]) -> int:
    """Return what the pieces of a call take at most: one of each operand, one that is made, and those that are being written."""
    return PIECE_BYTES * (len(large) + 1 + _WRITES_UNDER_WAY)


@cache
def is_elementwise(func: Any) -> bool:
    """Tell whether an operator may run piece by piece."""
    name = _full_name(func)
    return name not in _CREATING and (name in ELEMENTWISE or name in _LISTS or name.startswith(_FUSED))


def run_piecewise(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], large: list[torch.Tensor], written: list[Storage],
    residency: Residency, table: StorageTable,
) -> Any:  # fmt: skip
    """Run an elementwise call piece by piece and return what the whole call would. Raises PageError."""
    away = {
        s.key: s for s in (table.known(t) for t in large)
        if s is not None and not s.resident and s.region is not None
    }  # fmt: skip
    buffers = PieceBuffers(residency, away)
    elements = large[0].numel()
    step = PIECE_BYTES // max(t.element_size() for t in large)
    large_keys = {id(t) for t in large}
    changed = {s.key for s in written}
    result: _Result | None = None
    for start in range(0, elements, step):
        stop = min(start + step, elements)
        loaded: dict[int, torch.Tensor] = {}

        def piece(
            tensor: torch.Tensor, start: int = start, stop: int = stop, loaded: dict[int, torch.Tensor] = loaded
        ) -> torch.Tensor:
            key = untyped_storage(tensor)._cdata
            if key not in loaded:
                loaded[key] = buffers.load(tensor, start, stop)
            return loaded[key]

        out = func(*_replaced(args, large_keys, piece), **dict(_replaced_items(kwargs, large_keys, piece)))
        for key in changed & away.keys() & loaded.keys():
            buffers.store(away[key], loaded[key], start)
        if makes_storage(func):
            result = result or _Result(out.dtype, large, residency, table)
            result.put(buffers, out, start)
    buffers.finish()
    if result is not None:
        return result.finish()
    return _returned(func, args)


class _Result:
    """A result that is made piece by piece: its storage is away from the beginning where it does not fit."""

    def __init__(
        self, dtype: torch.dtype, large: Sequence[torch.Tensor], residency: Residency, table: StorageTable
    ) -> None:
        nbytes = large[0].numel() * dtype.itemsize
        fits = residency.could_hold(nbytes + buffers_bytes(large))
        if fits:
            residency.make_room(nbytes + buffers_bytes(large))
        self.tensor = torch.empty(large[0].shape, dtype=dtype)
        self._storage = table.of(self.tensor)
        if self._storage is not None and not fits:
            residency.bear_away(self._storage)

    def put(self, buffers: PieceBuffers, piece: torch.Tensor, start: int) -> None:
        if self._storage is not None and not self._storage.resident:
            buffers.store(self._storage, piece, start)
        else:
            self.tensor.view(-1)[start : start + piece.numel()].copy_(piece)

    def finish(self) -> torch.Tensor:
        if self._storage is not None and not self._storage.resident:
            self._storage.clean = True
        return self.tensor


def _full_name(func: Any) -> str:
    name = str(func._schema.name)
    overload = func._schema.overload_name
    return f"{name}.{overload}" if overload else name


def _returned(func: Any, args: Sequence[Any]) -> Any:
    """Return what an in-place operator returns: its first argument, or nothing."""
    return args[0] if func._schema.returns else None


def _replaced(values: Sequence[Any], large: set[int], piece: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [_replace(value, large, piece) for value in values]


def _replaced_items(
    values: dict[str, Any], large: set[int], piece: Callable[[torch.Tensor], torch.Tensor]
) -> list[tuple[str, Any]]:
    return [(name, _replace(value, large, piece)) for name, value in values.items()]


def _replace(value: Any, large: set[int], piece: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) in large:
            return piece(value)
        return value.reshape(1) if value.dim() > 1 else value  # a single number, as pieces have one dimension
    if isinstance(value, (list, tuple)):
        return [_replace(part, large, piece) for part in value]
    return value
