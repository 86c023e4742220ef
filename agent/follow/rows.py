"""Rows of a table that lies in its file, a stretch of the table at a time.

An embedding's lookup touches a page for each row, and the kernel maps more than that page: 64 KiB around it, or all of a
large folio (up to 2 MiB). A hundred rows from all over a table brought most of it in. So the rows of each stretch are
copied, and its pages go back before the next. Copies have the bits of what is copied.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent.follow.storages import Storage, StorageTable, drop_mapping, untyped_storage

STRETCH_BYTES = 8 << 20
"""Of the table, of which any page may come in at once."""

_INDEX_ARGUMENT = {"aten::embedding": 1, "aten::index_select": 2}


def looks_up_rows(func: Any) -> bool:
    """Tell whether an operator reads rows of a table that may lie in its file."""
    return func._schema.name in _INDEX_ARGUMENT


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A call of `embedding` or of `index_select` along the first dimension, whose table lies in its file."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storage: Storage

    @property
    def table(self) -> torch.Tensor:
        """The table, [rows, ...]."""
        table: torch.Tensor = self.args[0]
        return table

    @property
    def indices(self) -> torch.Tensor:
        """Which rows are read, in any shape."""
        indices: torch.Tensor = self.args[_INDEX_ARGUMENT[self.func._schema.name]]
        return indices

    @property
    def need_bytes(self) -> int:
        """What the call makes, its copy in order of the table's rows, and the stretch that is mapped."""
        made_bytes = self.indices.numel() * self.table.shape[1:].numel() * self.table.element_size()
        return 2 * made_bytes + self.mapped_bytes

    @property
    def mapped_bytes(self) -> int:
        """What is resident of the table at once."""
        return STRETCH_BYTES

    def run(self) -> torch.Tensor:
        """Return what the whole call would, and raise what it would."""
        flat, rows = self.indices.reshape(-1), self.table.shape[0]
        ascending, order = torch.sort(flat)
        step = max(1, STRETCH_BYTES * rows // self.storage.nbytes)
        starts = torch.arange(step, rows, step, dtype=flat.dtype)
        bounds = [0, *torch.searchsorted(ascending, starts).tolist(), flat.numel()]
        out = torch.empty((flat.numel(), *self.table.shape[1:]), dtype=self.table.dtype)
        memory = untyped_storage(self.table)
        position = _INDEX_ARGUMENT[self.func._schema.name]
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                part = [*self.args]
                part[position] = ascending[begin:end]
                out.index_copy_(0, order[begin:end], self.func(*part, **self.kwargs))
                drop_mapping(memory)
        shape = self.indices.shape if self.func._schema.name == "aten::embedding" else flat.shape
        return out.view(*shape, *self.table.shape[1:])


def mapped_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any], table: StorageTable) -> MappedRows | None:
    """Return the call as one that reads a table stretch by stretch; None where it runs whole."""
    position = _INDEX_ARGUMENT.get(func._schema.name)
    if position is None or len(args) <= position or func._schema.overload_name not in ("", "default"):
        return None
    rows, indices = args[0], args[position]
    if func._schema.name == "aten::index_select" and args[1] != 0:
        return None
    if rows.layout is not torch.strided or rows.dim() == 0 or not isinstance(indices, torch.Tensor):
        return None
    storage = table.known(rows)
    if storage is None or not storage.in_file or storage.resident or storage.watched:
        return None
    return MappedRows(func, tuple(args), kwargs, storage) if storage.nbytes > 2 * STRETCH_BYTES else None
