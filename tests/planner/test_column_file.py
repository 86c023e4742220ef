"""Columns in files give the rows back that were appended, whatever their numbers, and say
when the disk takes no more.
"""

import subprocess
import sys
import textwrap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from port_planner.column_file import ColumnFile, as_column
from port_planner.job import JobError
from port_planner.make_bundle import tensor_chunks

KINDS = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("row", [(), (3,), (2, 5), (0,)])
def test_rows_come_back_as_they_were(dtype: torch.dtype, row: tuple[int, ...], tmp_path: Path) -> None:
    whole = torch.randint(0, 2, (7, *row)).to(dtype)
    column = ColumnFile(dtype, row, tmp_path)
    column.append(whole[:4].clone())
    column.append(whole[4:].transpose(0, -1).contiguous().transpose(0, -1))
    assert column.shape == whole.shape and len(column) == 7 and column.dtype == dtype and as_column(column) is column
    chosen = torch.tensor([6, 0, 3])
    for rows in (slice(None), slice(2, 5), slice(6, 99), slice(3, 3), chosen):
        assert torch.equal(column[rows], whole[rows])
    chunks = tensor_chunks(column)
    assert (chunks.dtype, chunks.shape) == (str(dtype).removeprefix("torch."), tuple(whole.shape))
    assert b"".join(chunks.chunks()) == b"".join(tensor_chunks(whole).chunks())


def test_what_is_given_is_a_copy(tmp_path: Path) -> None:
    column = ColumnFile(torch.float32, (2,), tmp_path)
    column.append(torch.ones(3, 2))
    column[:].zero_()
    assert torch.equal(column[1:], torch.ones(2, 2))


@pytest.mark.process
def test_a_full_disk_is_told_with_its_rows(tmp_path: Path) -> None:
    program = f"""
        import resource, signal, torch
        from pathlib import Path
        from port_planner.column_file import ColumnFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        column = ColumnFile(torch.float32, (1024,), Path({str(tmp_path)!r}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        for _ in range(30):
            column.append(torch.zeros(2, 1024))
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert "JobError: the rows of the data could not be kept on the disk" in ended.stderr
    assert "after 24 of them: File too large; free space, or choose another --page-dir" in ended.stderr


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="after 0 of them: No such file"):
        ColumnFile(torch.float32, (), tmp_path / "none")


def test_a_file_that_lost_rows_is_told(tmp_path: Path) -> None:
    column = ColumnFile(torch.float32, (), tmp_path)
    column.append(torch.ones(3))
    column._file.truncate(4)
    with pytest.raises(JobError, match="was truncated"):
        column[:]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_file_is_read_where_it_lies(mode: Literal["r", "r+"], tmp_path: Path) -> None:
    whole = torch.randn(7, 2, 3)
    (tmp_path / "rows").write_bytes(b"head" + whole.numpy().tobytes())
    mapped = np.memmap(tmp_path / "rows", np.float32, mode, offset=4, shape=(7, 2, 3))
    column = as_column(mapped)
    assert isinstance(column, ColumnFile) and column.shape == whole.shape and column.dtype == torch.float32
    assert torch.equal(column[:], whole) and torch.equal(column[torch.tensor([5, 1])], whole[[5, 1]])
    part = as_column(np.memmap(tmp_path / "rows", np.float32, "r+", offset=4, shape=(7, 2, 3))[2:])
    assert isinstance(part, torch.Tensor) and torch.equal(part, whole[2:]), "where a part begins is not told"


def test_what_was_written_into_a_private_map_counts(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(24))
    mapped = np.memmap(tmp_path / "rows", np.float32, "c", shape=(6,))
    mapped[2] = 1
    assert torch.equal(torch.as_tensor(as_column(mapped)[2:3]), torch.ones(1))


class ReadByRows(Sequence[Any]):
    """As a column of a `datasets.Dataset`: each row is made when it is asked for."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]


@pytest.mark.parametrize("rows", [(torch.ones(2), torch.zeros(2)), ([1.0, 1.0], [0.0, 0.0])])
def test_a_column_that_is_read_by_rows_goes_to_a_file(rows: tuple[Any, ...], tmp_path: Path) -> None:
    column = as_column(ReadByRows(*rows), tmp_path)
    assert isinstance(column, ColumnFile) and torch.equal(column[:], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_an_array_of_pythons_is_read_at_once() -> None:
    column = as_column(array("i", [1, 2]))
    assert isinstance(column, torch.Tensor) and column.tolist() == [1, 2]


def test_rows_of_two_shapes_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"row 1 of a column is torch.int64 \[3\], and torch.int64 \[2\] in row 0.*pad them"
    ):
        as_column(ReadByRows([1, 2], [1, 2, 3]), tmp_path)
    assert as_column(ReadByRows(), tmp_path).shape == (0,)
