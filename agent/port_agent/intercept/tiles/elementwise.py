"""Tile operators whose operands do not fit together, with the same bits.

An elementwise operator over whole contiguous tensors gives the same bits in consecutive tiles under one condition.
Each number must be computed in a vector as in the whole tensor, or round the same way without one
(`port_planner.exactness.vector_ends`). A softmax along the last dimension gives the same bits on whole rows, which
its kernel computes independently. Operators that only move elements run in runs of them (`element_copies`). A tile of
a paged-out operand is read into a buffer, and a tile of a result whose storage is paged out goes straight to its
page. So AdamW on an embedding never has four such tensors in RAM, and the loss of a language model never has both
logits and their logarithms there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from port_agent.intercept.residency.dispatch_keys import counts_inside
from port_agent.intercept.residency.operands import makes_storage, tensors_in, written_arguments
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, StorageTable, untyped_storage
from port_agent.intercept.tiles.element_copies import ElementRun, element_runs, only_copies
from port_agent.intercept.tiles.rows import converted_dtype
from port_agent.intercept.tiles.tile_buffers import MAX_PENDING_WRITES, TileBuffers
from port_agent.paging.pager import CHUNK
from port_planner.exactness.vector_ends import MIN_SHARE, rounds_apart
from port_planner.ir.lowering.update_slices import runs_in_slices
from port_planner.operators import operator_of, overload_name
from port_planner.operators.row import VECTOR, Reads

_CONVERTING = "aten::_to_copy"
"""Operators that are elementwise if they convert floating-point numbers to another type (`converted_dtype`)."""

_SAME_ORDER = (None, torch.contiguous_format, torch.preserve_format)
"""Memory formats of a copy that keep the order of a contiguous tensor's elements."""

TILE_BYTES = 4 * CHUNK
"""Bytes of each operand in a tile: a multiple of the checksummed chunk, and efficient for flash."""

_LARGEST_ITEM_BYTES = 16
"""Bytes of the largest element, complex128."""

TILED_FROM = 256
"""Fraction of the limit: operands that together take less are not examined, because operators except those over
lists have fewer than 16.
"""


@dataclass(frozen=True, slots=True)
class OperatorTiling:
    """How a call is tiled: a tile is `step` elements of its `large` operands, in whole rows of `row`
    elements if that is not 0.

    `shape`: shape of a result. `runs`: the parts of a result if the operator only moves elements. `least`: if fewer
    elements remain at the end, they belong to the previous tile.
    """

    large: list[torch.Tensor]
    step: int
    row: int
    shape: torch.Size
    made_item_bytes: int
    runs: tuple[ElementRun, ...] = ()
    least: int = 0

    @property
    def made_bytes(self) -> int:
        """Bytes of the result."""
        return self.shape.numel() * self.made_item_bytes

    @property
    def buffers_bytes(self) -> int:
        """Most bytes of tiles: one of each operand, one result, those being written, and partial chunks."""
        tile_bytes = (self.step + self.least) * max(self.made_item_bytes, *(t.element_size() for t in self.large))
        ends_bytes = CHUNK if self.row or self.runs else 0
        return (tile_bytes + ends_bytes) * (len(self.large) + 1 + MAX_PENDING_WRITES)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first element of each tile, and the one after its last."""
        elements, start = self.large[0].numel(), 0
        while start < elements:
            stop = start + self.step
            stop = stop if elements - stop >= self.least and stop < elements else elements
            yield start, stop
            start = stop


def tiling_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], limit_bytes: float) -> OperatorTiling | None:
    """Return the tiling of a call that must run in tiles; None if it may or must run whole."""
    if math.isinf(limit_bytes) or not is_tiled(func):
        return None
    if only_copies(func) and (runs := element_runs(func, args, kwargs)):
        return _copy_tiling(args[0], runs, args[1] if len(args) > 1 else args[0].shape, limit_bytes)
    if only_copies(func) and not runs_in_slices(_full_name(func)):
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
    strides = _strides(large[0].shape)
    if any(t.stride() != strides or t.shape != large[0].shape or t.storage_offset() != 0 for t in large):
        return None
    if kwargs.get("memory_format") not in _SAME_ORDER:
        return None
    if any(t.dim() > large[0].dim() for t in tensors):  # a single number that adds dimensions to the result
        return None
    if _writes_numbers(func, args, kwargs, largest):
        return None
    row, item_bytes = _row(func, args, large), max((t.element_size() for t in large), default=0)
    if row is None or (func._schema.name == _CONVERTING and converted_dtype(args[0], kwargs) is None):
        return None
    nbytes = {id(untyped_storage(t)): t.numel() * t.element_size() for t in large}
    made_item_bytes = _made_item_bytes(func, args, kwargs, largest) if makes_storage(func) else 0
    made_bytes = largest * made_item_bytes
    fills_chunk = CHUNK // min(t.element_size() for t in large)  # for each page that is written in place
    unparted, least = row or fills_chunk, 0
    if sum(nbytes.values()) + made_bytes <= limit_bytes:
        return None
    if _by_vectors(func) and (threads := torch.get_num_threads()) > 1 and rounds_apart(func, args, kwargs):
        if largest % (threads * VECTOR):
            return None
        unparted, least = math.lcm(unparted, threads * VECTOR), threads * MIN_SHARE
    step = max(TILE_BYTES // max(item_bytes, made_item_bytes) // unparted, 1) * unparted
    if largest < 2 * step + least:
        return None
    return OperatorTiling(large, step, row, large[0].shape, made_item_bytes, least=least)


def _made_item_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], largest: int) -> int:
    """Return the bytes of an element of a result: for example, a mask times a number has the number's type.

    Raises what the call would raise.
    """

    def of_none(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((0, *tensor.shape[1:]) if tensor.numel() == largest else tensor.shape)

    made = func(*_replaced(args, of_none), **dict(_replaced_items(kwargs, of_none)))
    return int(made.element_size())


def _copy_tiling(
    source: torch.Tensor, runs: tuple[ElementRun, ...], shape: Sequence[int], limit_bytes: float
) -> OperatorTiling | None:
    """Return the tiling of a result of these runs; None if it may be created whole."""
    item_bytes = source.element_size()
    reached = max(run.start + run.count for run in runs if run.start is not None)
    made = sum(run.count for run in runs)
    step = TILE_BYTES // item_bytes
    if (reached + made) * item_bytes <= limit_bytes or made < 2 * step:
        return None
    return OperatorTiling([source], step, 0, torch.Size(shape), item_bytes, runs)


def _row(func: Any, args: Sequence[Any], large: Sequence[torch.Tensor]) -> int | None:
    """Return the length of rows that must not be divided; 0 if there are none, None if the
    indivisible parts are not rows.
    """
    count = operator_of(func._schema.name).row_operands
    if count == 0:
        return 0
    dim: int = args[count]
    last = large[0].dim() - 1
    return int(large[0].shape[-1]) if len(large) == count and dim in (-1, last) and last > 0 else None


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a new tensor.

    A contiguous tensor may have other strides in a dimension of size 1, and passes them on.
    """
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _shown_alike(large: Sequence[torch.Tensor]) -> bool:
    """Return whether operands that share a storage have one data type, so that a tile of it is
    read once for all of them.
    """
    return len({(id(untyped_storage(t)), t.dtype) for t in large}) == len({id(untyped_storage(t)) for t in large})


def _writes_numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any], largest: int) -> bool:
    """Return whether a call writes single numbers, or storages that several operands share, each
    tile of which is read again.

    The steps of fused optimizers are only read, although their schema says otherwise.
    """
    if operator_of(func._schema.name).fused_update:
        return False
    written = list(tensors_in(args[k] if k < len(args) else kwargs.get(name) for k, name in written_arguments(func)))
    numbers = {id(untyped_storage(t)) for t in tensors_in((*args, *kwargs.values())) if t.numel() != largest}
    return any(id(untyped_storage(t)) in numbers for t in written)


@cache
def is_tiled(func: Any) -> bool:
    """Return whether an operator may run in tiles."""
    name = _full_name(func)
    known = operator_of(name)
    by_rows = known.row_operands > 0 and name == func._schema.name
    return by_rows or name == _CONVERTING or only_copies(func) or known.fused_update or _by_vectors(func)


@cache
def _by_vectors(func: Any) -> bool:
    """Return whether threads process an operator's elements in vectors from the start of their shares,
    regardless of cache lines.
    """
    name = _full_name(func)
    known = operator_of(name)
    return known.reads is not Reads.SHAPES and (runs_in_slices(name) or overload_name(name) in known.in_vectors)


def run_tiled(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tiling: OperatorTiling,
    written: list[Storage],
    residency: Residency,
    table: StorageTable,
) -> Any:
    """Run a call in tiles and return what the whole call would return. Raises PageError."""
    tensors = list(tensors_in((*args, *kwargs.values())))
    away = {
        s.key: s for s in (table.known(t) for t in tensors) if s is not None and not s.resident and s.page is not None
    }
    buffers = TileBuffers(residency, away, tiling.large[0].device)
    if tiling.runs:
        return _run_copies(tiling, buffers, residency, table)
    numbers = {id(t): _number(t, buffers) for t in tensors if t.numel() == 1}
    changed = {s.key for s in written}
    result: _Result | None = None
    of_tile = list(args)
    if count := operator_of(func._schema.name).row_operands:
        of_tile[count] = -1
    for start, stop in tiling.bounds():
        loaded: dict[int, torch.Tensor] = {}

        def tile(
            tensor: torch.Tensor, start: int = start, stop: int = stop, loaded: dict[int, torch.Tensor] = loaded
        ) -> torch.Tensor:
            if id(tensor) in numbers:
                return numbers[id(tensor)]
            key = id(untyped_storage(tensor))
            if key not in loaded:
                loaded[key] = buffers.load(tensor, start, stop)
            return loaded[key].view(-1, tiling.row) if tiling.row else loaded[key]

        out = func(*_replaced(of_tile, tile), **dict(_replaced_items(kwargs, tile)))
        for key in changed & away.keys() & loaded.keys():
            buffers.store(away[key], loaded[key], start)
        if makes_storage(func):
            result = result or _Result(out.dtype, tiling, residency, table)
            result.put(buffers, out, start)
    buffers.finish()
    if result is not None:
        return result.finish()
    return _changed(func, args, kwargs)


def _run_copies(
    tiling: OperatorTiling, buffers: TileBuffers, residency: Residency, table: StorageTable
) -> torch.Tensor:
    """Create a result from its runs. Raises PageError."""
    (source,) = tiling.large
    result = _Result(source.dtype, tiling, residency, table)
    zeros = torch.zeros(tiling.step, dtype=source.dtype)
    place = 0
    for run in tiling.runs:
        for begin in range(0, run.count, tiling.step):
            count = min(tiling.step, run.count - begin)
            start = None if run.start is None else run.start + begin
            tile = zeros[:count] if start is None else buffers.load(source, start, start + count)
            result.put(buffers, tile, place)
            place += count
    buffers.finish()
    return result.finish()


class _Result:
    """A result that is computed in tiles; its storage is initially paged out if it does not fit."""

    def __init__(self, dtype: torch.dtype, tiling: OperatorTiling, residency: Residency, table: StorageTable) -> None:
        need_bytes = tiling.made_bytes + tiling.buffers_bytes
        make = partial(torch.empty, tiling.shape, dtype=dtype, device=tiling.large[0].device)
        if residency.could_fit(need_bytes):
            residency.make_free(need_bytes)
            self.tensor = make()
        else:
            self.tensor = residency.bear_away(make)
        self._storage = table.of(self.tensor)

    def put(self, buffers: TileBuffers, tile: torch.Tensor, start: int) -> None:
        if self._storage is not None and not self._storage.resident:
            buffers.append(self._storage, tile, start)
        else:
            self.tensor.view(-1)[start : start + tile.numel()].copy_(tile.view(-1))

    def finish(self) -> torch.Tensor:
        if self._storage is not None and not self._storage.resident:
            self._storage.clean = True
        return self.tensor


def _full_name(func: Any) -> str:
    name = str(func._schema.name)
    overload = func._schema.overload_name
    return f"{name}.{overload}" if overload else name


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator that writes to its first argument, or `out`, after counting the write."""
    if counts_inside(func) and not operator_of(func._schema.name).fused_update:  # detached tensors do not count writes
        increment_version(t for t in args[0] if not t.is_inference())
    return kwargs.get("out", args[0]) if func._schema.returns else None


def _number(tensor: torch.Tensor, buffers: TileBuffers) -> torch.Tensor:
    """Return a single number with no more dimensions than a tile, wherever its storage is. Raises PageError."""
    place = int(tensor.storage_offset())
    number = buffers.load(tensor, place, place + 1)
    return number if tensor.dim() > 0 else number.view(())


def _replaced(values: Sequence[Any], tile: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [_replace(value, tile) for value in values]


def _replaced_items(values: dict[str, Any], tile: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[str, Any]]:
    return [(name, _replace(value, tile)) for name, value in values.items()]


def _replace(value: Any, tile: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return tile(value)
    if isinstance(value, (list, tuple)):
        return [_replace(part, tile) for part in value]
    return value
