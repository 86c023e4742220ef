"""A column of a data set that lies in a file while a bundle is made: data larger than memory passes through it."""

import mmap
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from port_planner.base.tensor_bytes import chunks_of_tensor
from port_planner.job import JobError

_CHUNK_BYTES = 4 << 20

_THERE = (list, tuple, range, str, bytes, bytearray, memoryview, array)
"""Sequences whose items are all in memory: torch reads them at once."""


class ColumnFile:
    """Rows of one data type and shape, appended to an unnamed file in order, and read back into new tensors.

    `folder`: on the disk that stores them; None: the system's folder for temporary files.
    """

    def __init__(self, dtype: torch.dtype, row_shape: tuple[int, ...], folder: Path | None = None) -> None:
        self.dtype = dtype
        self._row_shape = row_shape
        self._row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        self._rows = self._offset = 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the column is there)
        except OSError as error:
            raise self._not_kept(error) from error

    @classmethod
    def of_mapped(cls, mapped: "np.memmap[Any, Any]") -> "ColumnFile":
        """Return the rows of a file that numpy maps. They stay in that file; nothing may be appended."""
        column = cls.__new__(cls)
        column.dtype = torch.from_numpy(np.empty(0, mapped.dtype)).dtype
        column._row_shape, column._rows, column._offset = mapped.shape[1:], len(mapped), mapped.offset
        column._row_bytes = mapped[:1].nbytes
        column._file = Path(str(mapped.filename)).open("rb", buffering=0)  # noqa: SIM115 (as above)
        return column

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._rows, *self._row_shape))

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: torch.Tensor) -> None:
        """Add `rows`, [n, *row shape]; raise JobError if the disk is full."""
        try:
            for chunk in chunks_of_tensor(rows):
                while chunk:
                    chunk = chunk[self._file.write(chunk) :]
        except OSError as error:
            raise self._not_kept(error) from error
        self._rows += len(rows)

    def __getitem__(self, rows: slice | torch.Tensor, /) -> torch.Tensor:
        wanted = range(self._rows)[rows] if isinstance(rows, slice) else rows.tolist()
        found = bytearray(len(wanted) * self._row_bytes)
        into = memoryview(found)
        for place, row in enumerate(wanted):
            self._read(row * self._row_bytes, into[place * self._row_bytes : (place + 1) * self._row_bytes])
        shape = (len(wanted), *self._row_shape)
        return torch.frombuffer(found, dtype=self.dtype).view(shape) if found else torch.empty(shape, dtype=self.dtype)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of all rows."""
        total = self._rows * self._row_bytes
        for start in range(0, total, _CHUNK_BYTES):
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, total - start)))
            self._read(start, chunk)
            yield chunk

    def _read(self, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._file.fileno(), [into], self._offset + offset)
            if not count:
                raise JobError("the file of a column of the data was truncated after it was opened; plan again")
            offset, into = offset + count, into[count:]

    def _not_kept(self, error: OSError) -> JobError:
        return JobError(
            f"the rows of the data could not be kept on the disk while the bundle is made, after {self._rows} of them: "
            f"{error.strerror}; free space, or choose another --page-dir"
        )


Column = torch.Tensor | ColumnFile
"""A row per sample."""


def as_column(values: Any, folder: Path | None = None) -> Column:
    """Return a tensor, an array or nested numbers as a tensor; a column in a file, or an array that maps
    a whole file, stays there.

    Values that yield their rows one by one (a column of a `datasets.Dataset`) go to a file in a `folder`. Raises
    JobError if the disk cannot hold them or a row's shape differs from the first. Raises TypeError, ValueError or
    RuntimeError if they are not numbers.
    """
    if isinstance(values, ColumnFile):
        return values
    if is_read_by_rows(values):
        return _of_rows(values, folder)
    if (
        isinstance(values, np.memmap)
        and isinstance(values.base, mmap.mmap)  # of the whole mapping: a partial one does not tell where it begins
        and values.mode in ("r", "r+")  # "c": changes stay out of the file
        and values.flags.c_contiguous
        and values.filename
        and values.ndim
        and values.size
    ):
        return ColumnFile.of_mapped(values)
    return torch.as_tensor(values)


def is_read_by_rows(values: Any) -> bool:
    """Return whether values are a sequence that reads each row on request, rather than numbers in memory or a column
    file.
    """
    return isinstance(values, Sequence) and not isinstance(values, _THERE)


def _of_rows(rows: Sequence[Any], folder: Path | None) -> Column:
    column: ColumnFile | None = None
    for number, values in enumerate(rows):
        row = torch.as_tensor(values)
        column = column or ColumnFile(row.dtype, tuple(row.shape), folder)
        if (row.dtype, tuple(row.shape)) != (column.dtype, tuple(column.shape[1:])):
            raise JobError(
                f"row {number} of a column is {row.dtype} {list(row.shape)}, and {column.dtype} "
                f"{list(column.shape[1:])} in row 0: all rows have one shape; pad them, or give a DataLoader whose "
                "collate_fn does"
            )
        column.append(row[None])
    return torch.empty(0) if column is None else column
