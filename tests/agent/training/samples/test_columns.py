"""Columns of samples that arrived: in plain files, without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from port_agent.training.samples.columns import ArrivedColumns
from port_planner.ir.bundle.safetensors_io import Member

COLUMNS = [Member(0, 4 * 6, "float32", (2, 3)), Member(0, 16, "int64", (2,))]


def columns(root: Path, *files: tuple[np.ndarray, np.ndarray]) -> ArrivedColumns:
    directory, folder = root / "in", root / "columns"
    directory.mkdir(parents=True), folder.mkdir()
    for number, arrays in enumerate(files):
        np.savez(directory / f"{number}.npz", *arrays)
    return ArrivedColumns(directory, [COLUMNS], folder)


def test_their_digest_is_of_the_rows_and_not_of_the_files(tmp_path: Path) -> None:
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.arange(5)
    whole, chunks = columns(tmp_path / "a", (x, y)), columns(tmp_path / "b", (x[:2], y[:2]), (x[2:], y[2:]))
    assert whole.counts == chunks.counts == (5,) and whole.digest() == chunks.digest()
    assert columns(tmp_path / "c", (x, y[::-1])).digest() != whole.digest()


@pytest.mark.process
def test_no_torch_is_loaded() -> None:
    program = "import sys, port_agent.training.samples.columns; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
