"""Products with a frozen weight that is read from its file in blocks of output columns, to the bit.

A language model's head is often its largest tensor. If it is a mapping of a safetensors file, blocks of it are read in
place. The pages of one block are released before the next is read, so the whole is never resident. Columns of a product
are independent of each other, and kernels that compute them in wide blocks give the bits of the whole. A comparison on
this machine, for each shape, layout, data type and number of threads (`_equal_in_blocks`), shows whether they do, and
is kept for the next process. Otherwise the product runs whole.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from port_agent.intercept.residency.storages import (
    Storage,
    StorageTable,
    address_of,
    drop_mapping,
    read_ahead,
    span,
    untyped_storage,
)
from port_planner.exactness.cancelling import RESIDUE, mirrored
from port_planner.exactness.half_products import sums_bytes
from port_planner.exactness.kept_answers import KeptAnswers
from port_planner.exactness.tiles import Operands, tiles_equal
from port_planner.operators import operator_of


def is_product(func: Any) -> bool:
    """Return whether an operator multiplies by a weight that may be in its file."""
    return _weight_of(func) is not None or func._schema.name in _WIDENED


_WIDENED = {
    "port_agent::grid_linear": True,
    "port_agent::grid_addmm_input_gradient": True,
    "port_agent::grid_input_gradient": False,
}
"""Our own products with a 16-bit weight that is widened during multiplication -> whether it
is multiplied transposed.
"""

STORED = "stored"
"""Mark of a product whose weight is not quantized: the weight itself is used as it is in its file."""


def _widened_product(operand: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(operand, weight.to(operand.dtype))


def _unwidened(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]] | None:
    """Return a product with a widened weight as one with two operands; None for others, and for one with a bias."""
    transposed = _WIDENED.get(func._schema.name)
    if transposed is None or kwargs or args[3] is not None or args[4] != STORED:
        return None
    return _widened_product, (args[0], args[1].t() if transposed else args[1])


def _weight_of(func: Any) -> int | None:
    """Return which argument of a product is the weight, [inner, columns]; None for other operators."""
    known = operator_of(func._schema.name)
    return known.weight if known.factors is not None else None


BLOCK_BYTES = 8 << 20
"""Fewest bytes of a block of the weight: smaller blocks need more calls, larger ones take memory from other tensors."""

_BLOCK_SHARE = 1 / 8
"""Share of the limit for a block, if that is more than BLOCK_BYTES."""

_SHARE = 1 / 8
"""Share of the limit above which a weight runs in blocks if its columns are contiguous, which costs nothing."""

_COPIED_SHARE = 1 / 2
"""Share of the limit for a weight whose blocks must be gathered from the rows of the file. Gathering costs a third of
the product's time, and the memory of two blocks.
"""

_GATHERED_SLICES = 4
"""Slices of BLOCK_BYTES in which the rows of a weight are mapped to gather columns. Smaller slices are as fast."""

_SLICES_MAPPED = 3
"""Mapped slices that exist at once: one, and large folios at both its ends."""

_PACKED = 2
"""Copies of a weight that exist when it is multiplied whole along its rows; kernels of half
precision make a packed copy.
"""

_COLUMNS = 64
"""Blocks begin at multiples of this, so that no kernel's last columns, which are computed in a different order, lie
inside the whole.
"""

_ALIGNMENT = 64
"""Bytes of a cache line, by which kernels may choose."""

_COMPARED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_PLACES, _COMPARED_AT_ONCE_ROWS = 64, 16
"""Number of places in a compared weight that receive random numbers, and rows at each place."""

_END_ROWS = 8
"""Number of first and last rows of the other operand that contain numbers."""

_MADV_NOHUGEPAGE = 15
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class MappedProduct:
    """A product, such as `mm` or `addmm`, whose weight is in its file; `step` output columns make a block."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storage: Storage
    position: int
    """Position of the weight among the arguments."""
    step: int
    form: tuple[Any, ...]
    """Properties that determine which kernels run: of products with equal form, all or none
    have the bits of the whole.
    """

    @property
    def weight(self) -> torch.Tensor:
        """The weight, [inner, columns]."""
        weight: torch.Tensor = self.args[self.position]
        return weight

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the computation, which may be wider than the weight's."""
        dtype: torch.dtype = self.args[self.position - 1].dtype
        return dtype

    @property
    def widened(self) -> bool:
        """Whether blocks of the weight are converted before they are multiplied."""
        return self.dtype != self.weight.dtype

    @property
    def read_bytes(self) -> int:
        """Bytes read from the file."""
        return self.storage.nbytes

    @property
    def need_bytes(self) -> int:
        """Bytes of the product's result and workspace."""
        inner, columns = self.weight.shape
        rows: int = self.args[self.position - 1].shape[0]
        block = _widest(columns, self.step)
        gathered = 0 if self.weight.stride(0) == 1 else inner * block * self.weight.element_size()
        widened = inner * block * self.dtype.itemsize if self.widened else 0
        return rows * (columns + block) * self.dtype.itemsize + gathered + widened + self.mapped_bytes

    @property
    def compared_bytes(self) -> int:
        """Bytes of the whole call's result and workspace, and of a block."""
        inner, columns = self.weight.shape
        operand = self.args[self.position - 1]
        rows: int = operand.shape[0]
        block = _widest(columns, self.step)
        gathered = 0 if self.weight.stride(0) == 1 else inner * block
        filled = _compared_rows(operand) * inner
        held_bytes = int((rows * (columns + block) + gathered + filled) * self.dtype.itemsize)
        return held_bytes + accumulated_bytes(rows, columns, self.dtype)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weight's mapping that are resident at once."""
        if self.weight.stride(0) == 1:
            inner, columns = self.weight.shape
            return int(inner) * _widest(columns, self.step) * self.weight.element_size()
        return _SLICES_MAPPED * BLOCK_BYTES // _GATHERED_SLICES

    def run(self) -> torch.Tensor:
        """Return what the whole call would return."""
        return _blockwise(self)


def accumulated_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of 32-bit sums that a product of this size needs, if this processor keeps
    them for shorter numbers.

    148 MiB for 256 rows of 151,936 in bfloat16, on an AVX-512 without bfloat16 and on a Cortex-A72 alike.
    """
    return rows * columns * sums_bytes(dtype)


def gathered_bytes(table: torch.Tensor) -> int:
    """Return what a product gathers at a time from a table, [inner, columns] as stored in its file,
    and what it maps meanwhile.
    """
    mapped_bytes = _SLICES_MAPPED * BLOCK_BYTES // _GATHERED_SLICES
    return max(_COLUMNS * table.shape[0] * table.element_size(), 2 * BLOCK_BYTES) + mapped_bytes


class MappedProducts:
    """Chooses which products run in blocks, and remembers comparisons."""

    def __init__(self, table: StorageTable, make_free: Callable[[int], object]) -> None:
        """`make_free` is called, before a comparison runs, with the bytes that it takes."""
        self._table, self._make_free = table, make_free
        self._equal = KeptAnswers()

    def of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], limit_bytes: float) -> MappedProduct | None:
        """Return the call as a product that may run in blocks; None if it may or must run whole."""
        widened = _unwidened(func, args, kwargs)
        position = _weight_of(func) if widened is None else 1
        if position is None or len(args) <= position or func._schema.overload_name not in ("", "default"):
            return None
        func, args = widened or (func, args)
        storage = self._table.known(args[position])
        if storage is None or not storage.in_file or storage.resident or storage.watched:
            return None
        weight = args[position]
        by_rows = weight.stride(0) != 1
        crowded = self._others_would_leave((_PACKED if by_rows else 1) * storage.nbytes, limit_bytes)
        if not crowded and storage.nbytes <= (_COPIED_SHARE if by_rows else _SHARE) * limit_bytes:
            return None
        if weight.dtype not in _COMPARED or weight.is_conj() or weight.is_neg() or (by_rows and weight.stride(1) != 1):
            return None
        column_bytes = weight.shape[0] * args[position - 1].element_size()
        block_bytes = BLOCK_BYTES if crowded else max(BLOCK_BYTES, _BLOCK_SHARE * limit_bytes)
        step, columns = _COLUMNS, weight.shape[1]
        while 4 * step <= columns and _widest(columns, 2 * step) * column_bytes <= block_bytes:
            step *= 2
        if 2 * step > columns:
            return None
        form = (func if widened is None else "widened", *map(_form, args), *map(_form, kwargs.values()), step)
        if self._equal.get(form) is False:
            return None
        return MappedProduct(func, tuple(args), kwargs, storage, position, step, form)

    def has_bits_of_whole(self, product: MappedProduct) -> bool:
        """Return whether a product may run in blocks; a new form is compared.

        All operands but its weight are resident.
        """

        def compare() -> bool:
            self._make_free(product.compared_bytes)
            if product.widened:  # its blocks are those of a product in the wider type
                (inner, columns), by_rows = product.weight.shape, product.weight.stride(0) == 1
                shape = (columns, inner) if by_rows else (inner, columns)
                return large_product_equal_in_blocks(product.args[0], shape, product.step, by_rows=by_rows)
            return _equal_in_blocks(product)

        try:
            return self._equal.equal(product.form, compare)
        except OSError:  # no address space for the comparison, this time
            return False

    def _others_would_leave(self, nbytes: int, limit_bytes: float) -> bool:
        """Return whether `nbytes` fit only if tensors are evicted that are not in a file and may have to be written."""
        written_bytes = self._table.resident_bytes - self._table.mapped_bytes
        return bool(written_bytes + nbytes > limit_bytes)


def _form(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride(), address_of(argument) % _ALIGNMENT
    return argument


def _blockwise(product: MappedProduct) -> torch.Tensor:
    """Run the product; the mapping of its weight is released block by block."""
    position = product.position
    rows, columns = product.args[position - 1].shape[0], product.weight.shape[1]
    out = torch.empty((rows, columns), dtype=product.dtype)
    for start, stop, block in _computed_blocks(product, product.args, untyped_storage(product.weight)):
        out[:, start:stop] = block
    return out


def _computed_blocks(
    product: MappedProduct, args: Sequence[Any], memory: torch.UntypedStorage | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield each block of the product with `args`, and its bounds; its part of `memory` is then released."""
    position = product.position
    weight = args[position]
    columns = weight.shape[1]
    for start, stop in column_blocks(columns, product.step):
        part = list(args)
        if weight.stride(0) == 1:
            part[position] = weight[:, start:stop]
            if memory is not None and stop < columns:
                read_ahead(weight[:, stop : stop + product.step])
        else:
            part[position] = _gathered(weight, start, stop, memory)
        if position == 2 and args[0].dim() > 0 and args[0].shape[-1] == columns:
            part[0] = args[0][..., start:stop]
        yield start, stop, product.func(*part, **product.kwargs)
        if memory is not None:
            drop_mapping(memory)


def _gathered(weight: torch.Tensor, start: int, stop: int, memory: torch.UntypedStorage | None) -> torch.Tensor:
    """Return columns of a weight stored row by row, copied from a few rows of the file at a time."""
    inner = weight.shape[0]
    gathered = torch.empty((inner, stop - start), dtype=weight.dtype)
    step = max(1, BLOCK_BYTES // _GATHERED_SLICES // (weight.stride(0) * weight.element_size()))
    for first in range(0, inner, step):
        gathered[first : first + step] = weight[first : first + step, start:stop]
        if memory is not None:
            drop_mapping(memory)
    return gathered


def column_blocks(columns: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks; the last one includes a remainder that is too small for a block of its own."""
    start = 0
    while columns - start >= 2 * step:
        yield start, start + step
        start += step
    yield start, columns


def _widest(columns: int, step: int) -> int:
    """Return the number of columns of the largest block, which is the last."""
    return columns - max(columns // step - 1, 0) * step


def _equal_in_blocks(product: MappedProduct) -> bool:
    """Return whether a product of this form, run in blocks, has the bits of the whole.

    The order in which terms are added does not depend on their values. So the given operands are replaced by others of
    the same shapes, layouts and alignment whose sums cancel. Most of their pages are zeros, which take no RAM; only a
    few rows and some parts of the weight contain numbers. Raises OSError.
    """
    position = product.position
    numbers = Operands(product.weight.dtype)
    with contextlib.ExitStack() as stack:
        args = [numbers.like(a).mul_(RESIDUE) for a in product.args[: position - 1]]
        args += [_zeros_like(a, stack) for a in product.args[position - 1 :]]
        _fill_rows(args[position - 1], numbers.generator)
        _fill_runs(product, args[position], numbers.generator)
        whole = product.func(*args, **product.kwargs)
        return tiles_equal(whole, _computed_blocks(product, args, None), dim=1)


def large_product_equal_in_blocks(operand: torch.Tensor, weight: tuple[int, int], step: int, *, by_rows: bool) -> bool:
    """Return whether `operand` times a weight of this shape has the bits of the whole in blocks of
    `step` columns of the result.

    `weight`: [inner, columns] as it lies in memory, or, `by_rows`, [columns, inner]. It takes no RAM,
    however large. Raises OSError.
    """
    rows, columns = weight
    with contextlib.closing(ZeroMapping(rows * columns * operand.element_size())) as zeros:
        stand_in = zeros.tensor(0, operand.dtype).view(rows, columns)
        factor = stand_in.t() if by_rows else stand_in
        storage: Any = None  # not in a file: nothing is read
        return _equal_in_blocks(MappedProduct(torch.ops.aten.mm.default, (operand, factor), {}, storage, 1, step, ()))


def _zeros_like(operand: torch.Tensor, stack: contextlib.ExitStack) -> torch.Tensor:
    """Return zeros in an operand's layout. They take no RAM until they are written, and exist until `stack` closes."""
    lead_bytes = address_of(operand) % mmap.PAGESIZE
    zeros = stack.enter_context(contextlib.closing(ZeroMapping(lead_bytes + span(operand) * operand.element_size())))
    return zeros.tensor(lead_bytes, operand.dtype).as_strided(operand.shape, operand.stride())


def _filled(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a part of the result of `_zeros_like` with numbers, and return it. Raises OSError."""
    flat = rows.as_strided((span(rows),), (1,))
    make_writable(flat)
    flat.normal_(generator=generator)
    return rows


def _fill_rows(operand: torch.Tensor, generator: torch.Generator) -> None:
    """Fill the first and last rows of the operand that a weight multiplies, mirrored; fill all rows
    if they are not contiguous.
    """
    rows = operand.shape[0]
    some = rows > _compared_rows(operand)
    for first, stop in ((0, _END_ROWS), (rows - _END_ROWS, rows)) if some else ((0, rows),):
        numbers = _filled(operand[first:stop], generator)
        if 0 not in numbers.stride():  # a tensor that repeats one number is mirrored
            mirrored(numbers, 1, 1)


def _compared_rows(operand: torch.Tensor) -> int:
    rows: int = operand.shape[0]
    return min(2 * _END_ROWS, rows) if operand.stride(0) >= operand.shape[1] else rows


def _fill_runs(product: MappedProduct, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill rows of a weight, in its memory order, mirrored to the operand's.

    The rows are terms spread over each sum or, for output columns, the first and last of the blocks that can differ.
    """
    inner, columns = weight.shape
    if weight.stride(0) != 1:
        half = inner // 2
        for first in range(0, half, max(inner // _PLACES, _COMPARED_AT_ONCE_ROWS)):
            stop = min(first + _COMPARED_AT_ONCE_ROWS, half)
            numbers = _filled(weight[first:stop], generator)
            _filled(weight[2 * half - stop : 2 * half - first], generator).copy_(numbers.flip(0)).neg_()
        return
    blocks = list(column_blocks(columns, product.step))
    for start, stop in {blocks[0], blocks[len(blocks) // 2], blocks[-2], blocks[-1]}:
        for first, last in ((start, start + _COMPARED_AT_ONCE_ROWS), (stop - _COLUMNS, stop)):
            mirrored(_filled(weight[:, first:last].t(), generator), 1, -1)


class ZeroMapping:
    """Private memory of zeros that takes no RAM until it is written. Raises OSError if there is none."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self._memory.madvise(_MADV_NOHUGEPAGE)
        self._start = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._nbytes = nbytes

    def tensor(self, lead_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor after `lead_bytes`; only a part that was made writable may be written."""
        array = (ctypes.c_char * self._nbytes).from_address(self._start)
        return torch.frombuffer(array, dtype=dtype, offset=lead_bytes)

    def close(self) -> None:
        """Release the memory; no tensor in it may be used any more."""
        self._memory.close()


def make_writable(part: torch.Tensor) -> None:
    """Make the pages of a part of a `ZeroMapping` writable; RLIMIT_DATA counts only those. Raises OSError."""
    first = address_of(part) // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = address_of(part) + part.numel() * part.element_size() - first
    if _mprotect(first, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
