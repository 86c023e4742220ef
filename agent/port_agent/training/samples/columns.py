"""Samples that arrived after planning, as columns: files in a directory, copied row by row. Does not import torch.

`.npz` and `.safetensors` files, one array per column of the batch. Arrays are taken in the order of their names ("0",
"1", ... or arr_0, arr_1, ...); each must have the column's dtype and row shape. They are copied once to plain column
files, a mebibyte in memory at a time however large the files are, so that batches read single rows.
"""

import contextlib
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from port_agent.system.directory_handle import read_sample_file
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.checksums import block_sums, columns_digest
from port_planner.ir.bundle.manifest import train_part
from port_planner.ir.bundle.safetensors_io import Member, index, read_header

_CHUNK_BYTES = 1 << 20
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    zlib.error,
    struct.error,
    zipfile.BadZipFile,
)
"""Exceptions that the readers of both formats raise for a file that is damaged, encrypted or of another kind."""


class DataError(PortError):
    """The data does not fit the job."""

    exit_code = ExitCode.IMPOSSIBLE


class ArrivedColumns:
    """The columns of a directory's samples, in plain files of `folder`.

    `parts`: the columns of each shape that the bundle has steps for; a file's samples belong to the part with their
    shape.
    """

    def __init__(self, directory: Path, parts: Sequence[Sequence[Member]], folder: Path) -> None:
        self.sections = [[(c.dtype, c.shape[1:], c.nbytes // max(1, c.shape[0])) for c in columns] for columns in parts]
        """Type, shape and bytes of a row, for each column of each part."""
        self.paths = [[folder / _column_file(p, i) for i in range(len(columns))] for p, columns in enumerate(parts)]
        self.counts = self._copy(directory, self.paths)
        """Rows of each part."""

    def digest(self) -> str:
        """Return the `Bundle.data_digest` of the same rows; raises OSError."""
        sums = {}
        for part, (of_part, paths) in enumerate(zip(self.sections, self.paths, strict=True)):
            for i, ((_, _, width), path) in enumerate(zip(of_part, paths, strict=True)):
                with path.open("rb") as stream:
                    chunks = iter(partial(stream.read, _CHUNK_BYTES), b"")
                    sums[f"{train_part(part)}/{i}"] = block_sums(width, chunks)
        return columns_digest(sums)

    def _copy(self, directory: Path, paths: Sequence[Sequence[Path]]) -> tuple[int, ...]:
        files = sorted(p for p in directory.iterdir() if p.suffix in (".npz", ".safetensors"))
        if not files:
            raise DataError(f"{directory} has no .npz or .safetensors file; give one array per column of the batch")
        totals = [0] * len(paths)
        with contextlib.ExitStack() as stack:
            targets = [[stack.enter_context(open(p, "wb", buffering=0)) for p in of_section] for of_section in paths]
            for file in files:
                rows = set()
                try:
                    part = self._section_of(file) if len(self.sections) > 1 else 0
                    for i, array in enumerate(_arrays(file)):
                        self._check(file, i, array, part)
                        rows.add(array.shape[0])
                        _copy_rows(file, array, targets[part][i])
                except _DAMAGE as error:
                    raise DataError(f"{file} cannot be read ({error}); copy it again") from error
                if len(rows) != 1:
                    raise DataError(f"{file}: its arrays have {sorted(rows)} rows; they must have the same number")
                totals[part] += rows.pop()
        return tuple(totals)

    def _section_of(self, file: Path) -> int:
        """Return the part whose rows have the shapes of a file's rows; raise DataError if none or several have."""
        found = [(array.dtype, tuple(array.shape[1:])) for array in _arrays(file)]
        known = [[(kind, tuple(shape)) for kind, shape, _ in columns] for columns in self.sections]
        if found not in known:
            raise DataError(
                f"{file} has rows of {_shown(found)}, but the bundle has steps for {'; '.join(map(_shown, known))}: "
                "pad to one of these, or plan the job again with batches of that shape"
            )
        if known.count(found) > 1:
            raise DataError(
                f"{file} has rows of {_shown(found)}, for which the bundle has {known.count(found)} steps that "
                "differ in something that is not in the rows (such as a task); plan the job again with these "
                "samples in its batches"
            )
        return known.index(found)

    def _check(self, file: Path, i: int, array: "_StoredArray", part: int) -> None:
        columns = self.sections[part]
        if array.together != len(columns):
            raise DataError(
                f"{file} has {array.together} arrays, but a batch of this job has {len(columns)}; give one array per "
                "column"
            )
        kind, shape, _ = columns[i]
        if not array.shape:
            raise DataError(f"{file}: array {i} is a single {array.dtype}; give an array with a row per sample")
        if array.dtype != kind or array.shape[1:] != tuple(shape):
            raise DataError(
                f"{file}: array {i} is {array.dtype} with rows of {array.shape[1:]}, but the job needs {kind} "
                f"{tuple(shape)}"
            )


def _column_file(part: int, column: int) -> str:
    return f"arrived-{part}-{column}.raw" if part else f"arrived-{column}.raw"


def _shown(columns: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{kind} {[*shape]}" for kind, shape in columns)


@dataclass(frozen=True, slots=True)
class _StoredArray:
    """An array in a file: its type and shape, the position of its bytes, and the number of arrays in the file.

    `by_columns`: whether it is in Fortran order, as arrays from pandas are.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stream: IO[bytes]
    together: int
    by_columns: bool = False


def _arrays(file: Path) -> Iterator[_StoredArray]:
    return _numpy_arrays(file) if file.suffix == ".npz" else _safetensors_arrays(file)


def _numpy_arrays(file: Path) -> Iterator[_StoredArray]:
    with read_sample_file(file) as data, zipfile.ZipFile(data) as archive:
        names = sorted(archive.namelist(), key=lambda name: _place(name.removesuffix(".npy")))
        for name in names:
            with archive.open(name) as stream:
                version = npy.read_magic(stream)
                if version not in _HEADERS:
                    raise ValueError(f"{name} is of the npy version {version}")
                shape, by_columns, kind = _HEADERS[version](stream)
                if kind.hasobject:
                    raise ValueError(f"{name} holds Python objects, which are not unpacked")
                nbytes = math.prod(shape) * kind.itemsize
                yield _StoredArray(str(kind), shape, nbytes, stream, len(names), by_columns and len(shape) > 1)


def _safetensors_arrays(file: Path) -> Iterator[_StoredArray]:
    with read_sample_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        members = index(read_header(stream, size), size, 0)
        for name in sorted(members, key=_place):
            member = members[name]
            stream.seek(member.offset)
            yield _StoredArray(member.dtype, member.shape, member.nbytes, stream, len(members))


def _copy_rows(file: Path, array: _StoredArray, target: IO[bytes]) -> None:
    """Copy an array row by row. Raises DataError if it ends early, PortError if the disk is full."""
    if not array.by_columns:
        _copy_bytes(file, array, target)
        return
    with tempfile.TemporaryFile(dir=Path(target.name).parent, buffering=0) as columns:
        _copy_bytes(file, array, columns)
        rows, inner = array.shape[0], array.shape[1:]
        item, count = array.nbytes // max(1, math.prod(array.shape)), math.prod(inner)
        step = max(1, _CHUNK_BYTES // max(1, item * count))
        for first in range(0, rows, step):
            size = min(step, rows - first) * item
            chunks = [os.pread(columns.fileno(), size, (c * rows + first) * item) for c in range(count)]
            block = np.frombuffer(b"".join(chunks), np.dtype((np.void, item))).reshape(*reversed(inner), -1)
            _write(target, np.ascontiguousarray(block.transpose()).tobytes())


def _copy_bytes(file: Path, array: _StoredArray, target: IO[bytes]) -> None:
    left = array.nbytes
    while left:
        chunk = array.stream.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise DataError(f"{file} ends in the middle of an array; copy it again")
        left -= len(chunk)
        _write(target, chunk)


def _write(target: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[target.write(rest) :]
    except OSError as error:
        raise PortError(f"samples could not be written to {target.name}: {error.strerror}; free space there") from error


def _place(name: str) -> tuple[int, str]:
    digits = name.removeprefix("arr_")
    return (int(digits), "") if digits.isdigit() else (1 << 30, name)
