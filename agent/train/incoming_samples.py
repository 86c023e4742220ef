"""Samples that arrived after planning: `.npz` and `.safetensors` files in a directory, one array per column of the batch.

Arrays are taken in the order of their names ("0", "1", ... or arr_0, arr_1, ...); each must have the column's dtype and
row shape. They are copied once to plain column files beside the checkpoints, one array in memory at a time, so that
batches read single rows.
"""

import contextlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from planner.ir.bundle.safetensors_io import Member
from planner.ir.errors import ExitCode, PortError
from planner.ir.torch_operators import dtype

Array = npt.NDArray[np.generic]


class DataError(PortError):
    """Data that does not fit the job."""

    exit_code = ExitCode.IMPOSSIBLE


class Arrivals:
    """The samples of a directory, with the interface of `agent.train.bundle_samples.Samples`."""

    def __init__(self, directory: Path, columns: Sequence[Member], folder: Path) -> None:
        self._columns = [(c.dtype, c.shape[1:], c.nbytes // max(1, c.shape[0])) for c in columns]
        paths = [folder / f"arrived-{i}.raw" for i in range(len(columns))]
        self.count = self._copy(directory, paths)
        self._fds = [os.open(p, os.O_RDONLY | os.O_CLOEXEC) for p in paths]

    def _copy(self, directory: Path, paths: Sequence[Path]) -> int:
        files = sorted(p for p in directory.iterdir() if p.suffix in (".npz", ".safetensors"))
        if not files:
            raise DataError(f"{directory} has no .npz or .safetensors file; give one array per column of the batch")
        total = 0
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(open(p, "wb")) for p in paths]
            for file in files:
                rows = set()
                for i, array in enumerate(self._arrays(file)):
                    rows.add(array.shape[0])
                    streams[i].write(np.ascontiguousarray(array).tobytes())
                if len(rows) != 1:
                    raise DataError(f"{file}: its arrays have {sorted(rows)} rows; they must have the same number")
                total += rows.pop()
        return total

    def _arrays(self, file: Path) -> Iterator[Array]:
        try:
            if file.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    names = sorted(archive.files, key=_place)
                    yield from (self._checked(file, i, len(names), archive[n]) for i, n in enumerate(names))
            else:
                with safe_open(file, framework="numpy") as archive:
                    names = sorted(archive.keys(), key=_place)
                    yield from (self._checked(file, i, len(names), archive.get_tensor(n)) for i, n in enumerate(names))
        except (OSError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
            raise DataError(f"{file} cannot be read ({error}); copy it again") from error

    def _checked(self, file: Path, i: int, found: int, array: Array) -> Array:
        if found != len(self._columns):
            raise DataError(f"{file} has {found} arrays, a batch of this job has {len(self._columns)}")
        kind, shape, _ = self._columns[i]
        if str(array.dtype) != kind or array.shape[1:] != tuple(shape):
            raise DataError(
                f"{file}: array {i} is {array.dtype} with rows of {array.shape[1:]}, the job needs {kind} {tuple(shape)}"
            )
        return array

    def batch(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return one tensor per column with these rows, in this order."""
        result = []
        for fd, (kind, shape, width) in zip(self._fds, self._columns, strict=True):
            data = b"".join(os.pread(fd, width, row * width) for row in rows)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype(kind))
            result.append(tensor.reshape(len(rows), *shape))
        return result

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _place(name: str) -> tuple[int, str]:
    digits = name.removeprefix("arr_")
    return (int(digits), "") if digits.isdigit() else (1 << 30, name)
