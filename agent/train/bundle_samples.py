"""The samples of a bundle: rows are read from the file when a batch needs them, so data sets need no RAM."""

import os
from collections.abc import Sequence

import torch

from planner.ir.bundle.bundle import Bundle, BundleError
from planner.ir.bundle.safetensors_io import Member
from planner.ir.torch_operators import dtype


class Samples:
    """Columns of a data set inside a bundle; `prefix` is "train/" or "eval/"."""

    def __init__(self, bundle: Bundle, prefix: str) -> None:
        self._bundle = bundle
        self._fd = os.open(bundle.path, os.O_RDONLY | os.O_CLOEXEC)
        keys = sorted((k for k in bundle.data if k.startswith(prefix)), key=lambda k: int(k.removeprefix(prefix)))
        self._columns: list[Member] = [bundle.data[k] for k in keys]
        counts = {c.shape[0] if c.shape else 0 for c in self._columns}
        if len(counts) > 1:
            raise BundleError(f"{bundle.path}: the data's columns have different lengths {sorted(counts)}")
        self.count = counts.pop() if counts else 0

    def batch(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return one tensor per column with these rows, in this order."""
        return [self._gather(column, rows) for column in self._columns]

    def _gather(self, column: Member, rows: Sequence[int]) -> torch.Tensor:
        width = column.nbytes // column.shape[0]
        result = torch.empty((len(rows), *column.shape[1:]), dtype=dtype(column.dtype))
        flat = result.view(-1).view(torch.uint8).numpy()
        for i, row in enumerate(rows):
            if not 0 <= row < column.shape[0]:
                raise BundleError(f"row {row} does not exist, the data has {column.shape[0]}")
            data = self._bundle.read(self._fd, column, row * width, width)
            flat[i * width : (i + 1) * width] = memoryview(data)
        return result

    def close(self) -> None:
        os.close(self._fd)
