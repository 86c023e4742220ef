"""Samples that arrived after planning, batch by batch."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from port_agent.training.samples.columns import ArrivedColumns
from port_planner.ir.bundle.safetensors_io import Member
from port_planner.ir.torch_operators import dtype


class Arrivals:
    """The samples of a directory, with the interface of `port_agent.training.samples.bundled.Samples`."""

    def __init__(self, directory: Path, parts: Sequence[Sequence[Member]], folder: Path) -> None:
        """Copy them to files in `folder` as `ArrivedColumns` does.

        Raises DataError, and PortError if the disk is full.
        """
        self._columns = ArrivedColumns(directory, parts, folder)
        self.counts = self._columns.counts
        """Rows of each part."""
        self._fds = [[os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in of_part] for of_part in self._columns.paths]

    def batch(self, rows: Sequence[int], part: int = 0) -> list[torch.Tensor]:
        """Return one tensor per column of a part with these rows, in this order."""
        result = []
        for fd, (kind, shape, width) in zip(self._fds[part], self._columns.sections[part], strict=True):
            data = b"".join(os.pread(fd, width, row * width) for row in rows)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype(kind))
            result.append(tensor.reshape(len(rows), *shape))
        return result

    def close(self) -> None:
        for fd in (fd for of_section in self._fds for fd in of_section):
            os.close(fd)
