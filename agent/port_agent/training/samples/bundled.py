"""The samples of a bundle; rows are read from the file when a batch needs them, so data sets need no RAM."""

import os
from collections.abc import Sequence

import torch

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.torch_operators import dtype


class Samples:
    """Columns of data sets inside a bundle; `parts`: the beginnings of their names,
    "train", "train#1" ... or "eval".
    """

    def __init__(self, bundle: Bundle, parts: Sequence[str]) -> None:
        self._bundle = bundle
        self._fd = os.open(bundle.path, os.O_RDONLY | os.O_CLOEXEC)
        self._columns = [
            sorted((k for k in bundle.data if k.startswith(f"{part}/")), key=lambda k: int(k.rpartition("/")[2]))
            for part in parts
        ]
        self.counts = tuple(bundle.data[columns[0]].shape[0] if columns else 0 for columns in self._columns)
        """Rows of each part."""

    def batch(self, rows: Sequence[int], part: int = 0) -> list[torch.Tensor]:
        """Return one tensor per column of a part with these rows, in this order.

        Raises BundleError if a row is damaged.
        """
        return [self._gather(key, rows) for key in self._columns[part]]

    def _gather(self, key: str, rows: Sequence[int]) -> torch.Tensor:
        column = self._bundle.data[key]
        width = column.nbytes // column.shape[0]
        result = torch.empty((len(rows), *column.shape[1:]), dtype=dtype(column.dtype))
        flat = result.view(-1).view(torch.uint8).numpy()
        for i, row in enumerate(rows):
            flat[i * width : (i + 1) * width] = memoryview(self._bundle.row(self._fd, key, row))
        return result

    def close(self) -> None:
        os.close(self._fd)
