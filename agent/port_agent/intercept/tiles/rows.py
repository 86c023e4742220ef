"""Rows of a table that stays in its file, read from one part of the table at a time.

An embedding's lookup touches a page for each row, and the kernel maps more than that page: 64 KiB around it, or a
whole large folio (up to 2 MiB). A hundred rows spread over a table would load most of it. So the rows of each
part are copied, and its pages are released before the next. Copies have the bits of the original. A whole table,
or a part of it, is copied the same way. It may also be converted, because the conversion of a number does not
depend on its neighbours.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from port_agent.intercept.residency.operands import written_arguments
from port_agent.intercept.residency.storages import Storage, StorageTable, drop_mapping, read_ahead, untyped_storage
from port_planner.operators import operator_of
from port_planner.operators.row import Reads

TILE_BYTES = 8 << 20
"""Bytes of a part of the table, any page of which may be loaded at once."""

_PLAIN_COPY: Mapping[str, tuple[object, ...]] = {
    "layout": (None, torch.strided),
    "memory_format": (None, torch.contiguous_format, torch.preserve_format),
    "non_blocking": (None, False),
    "pin_memory": (None, False),
}
"""Arguments of a copy that can be made in parts."""

AROUND_BYTES = 4 << 20
"""Bytes that may become resident around a part that is copied: a large folio at each end."""


def looks_up_rows(func: Any) -> bool:
    """Return whether an operator reads rows of a table that may be in its file."""
    return _index_of(func) is not None


def _index_of(func: Any) -> int | None:
    """Return which argument of a lookup contains the row numbers; None for other operators."""
    known = operator_of(func._schema.name)
    return known.indices[1] if known.reads is Reads.ROWS and known.indices is not None else None


def copies(func: Any) -> bool:
    """Return whether an operator copies its operand, which may be in its file."""
    return operator_of(func._schema.name).copies and not written_arguments(func)


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A call of `embedding` or of `index_select` along the first dimension, whose table is in its file."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storage: Storage
    position: int
    """Position of the argument that contains the row numbers."""

    @property
    def table(self) -> torch.Tensor:
        """The table, [rows, ...]."""
        table: torch.Tensor = self.args[0]
        return table

    @property
    def indices(self) -> torch.Tensor:
        """The rows that are read, in any shape."""
        indices: torch.Tensor = self.args[self.position]
        return indices

    @property
    def need_bytes(self) -> int:
        """Bytes of the result, its copy in the order of the table's rows, and the mapped part."""
        made_bytes = self.indices.numel() * self.table.shape[1:].numel() * self.table.element_size()
        return 2 * made_bytes + self.mapped_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the table that are resident at once."""
        return TILE_BYTES

    def run(self) -> torch.Tensor:
        """Return what the whole call would return, and raise what it would raise."""
        flat, rows = self.indices.reshape(-1), self.table.shape[0]
        ascending, order = torch.sort(flat)
        step = max(1, TILE_BYTES * rows // self.storage.nbytes)
        starts = torch.arange(step, rows, step, dtype=flat.dtype)
        bounds = [0, *torch.searchsorted(ascending, starts).tolist(), flat.numel()]
        out = torch.empty((flat.numel(), *self.table.shape[1:]), dtype=self.table.dtype)
        memory = untyped_storage(self.table)
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                part = [*self.args]
                part[self.position] = ascending[begin:end]
                out.index_copy_(0, order[begin:end], self.func(*part, **self.kwargs))
                drop_mapping(memory)
        shape = self.indices.shape if self.func._schema.name == "aten::embedding" else flat.shape
        return out.view(*shape, *self.table.shape[1:])


@dataclass(frozen=True, slots=True)
class MappedCopy:
    """A call that copies a contiguous table, or a contiguous part of it, from its file."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storage: Storage

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the copy."""
        dtype: torch.dtype = self.kwargs.get("dtype") or self.args[0].dtype
        return dtype

    @property
    def read_bytes(self) -> int:
        """Bytes read from the file."""
        return int(self.args[0].nbytes)

    @property
    def need_bytes(self) -> int:
        """Bytes of the result, and of the pages read at once."""
        return int(self.args[0].numel()) * self.dtype.itemsize + self.mapped_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the table that are resident at once."""
        return min(self.read_bytes, TILE_BYTES) + AROUND_BYTES

    def run(self) -> torch.Tensor:
        """Return the copy."""
        table: torch.Tensor = self.args[0]
        out = torch.empty(table.shape, dtype=self.dtype)
        source, target, memory = table.view(-1), out.view(-1), untyped_storage(table)
        step = TILE_BYTES // table.element_size()
        for start in range(0, len(source), step):
            if start + step < len(source):
                read_ahead(source[start + step : start + 2 * step])
            target[start : start + step] = source[start : start + step]
            drop_mapping(memory)
        return out


def mapped_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], table: StorageTable) -> MappedCopy | None:
    """Return the call as one that copies a table part by part; None if it runs whole."""
    copied = args[0]
    if not copies(func) or converted_dtype(copied, kwargs) is None:
        return None
    storage = _in_its_file(copied, table)
    return None if storage is None or copied.is_conj() else MappedCopy(func, tuple(args), kwargs, storage)


def converted_dtype(copied: torch.Tensor, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the data type of an elementwise conversion on the CPU, in the same order; None for any other copy."""
    if any(kwargs.get(name) not in plain for name, plain in _PLAIN_COPY.items()):
        return None
    if (
        copied.layout is not torch.strided
        or not copied.is_contiguous()
        or kwargs.get("device") not in (None, copied.device)
    ):
        return None
    dtype = kwargs.get("dtype") or copied.dtype
    if dtype is not copied.dtype and not (dtype.is_floating_point and copied.is_floating_point()):
        return None
    return dtype


def mapped_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any], table: StorageTable) -> MappedRows | None:
    """Return the call as one that reads a table part by part; None if it runs whole."""
    position = _index_of(func)
    if position is None or len(args) <= position or func._schema.overload_name not in ("", "default"):
        return None
    rows, indices = args[0], args[position]
    if func._schema.name == "aten::index_select" and args[1] != 0:
        return None
    if rows.layout is not torch.strided or rows.dim() == 0 or not isinstance(indices, torch.Tensor):
        return None
    storage = _in_its_file(rows, table)
    return None if storage is None else MappedRows(func, tuple(args), kwargs, storage, position)


def _in_its_file(tensor: torch.Tensor, table: StorageTable) -> Storage | None:
    """Return the storage of a tensor whose parts may be read in place; None for a small tensor,
    and for one that is in RAM.
    """
    storage = table.known(tensor)
    if storage is None or not storage.in_file or storage.resident or storage.watched:
        return None
    return storage if storage.nbytes > 2 * TILE_BYTES else None
