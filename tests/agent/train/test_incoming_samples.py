"""Samples that arrive after planning: read back row by row, and refused by name where they do not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from agent.train.incoming_samples import Arrivals, DataError
from planner.ir.bundle.safetensors_io import Member

COLUMNS = [Member(0, 4 * 6, "float32", (2, 3)), Member(0, 16, "int64", (2,))]


def test_rows_of_all_files_in_order(tmp_path: Path) -> None:
    inbox, folder = tmp_path / "in", tmp_path / "state"
    inbox.mkdir(), folder.mkdir()
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.arange(5)
    np.savez(inbox / "a.npz", x[:2], y[:2])
    save_file({"0": x[2:], "1": y[2:]}, inbox / "b.safetensors")
    (inbox / "notes.txt").write_text("ignored")
    arrivals = Arrivals(inbox, COLUMNS, folder)
    assert arrivals.count == 5
    rows, labels = arrivals.batch([4, 0, 2])
    assert torch.equal(rows, torch.from_numpy(x[[4, 0, 2]]))
    assert torch.equal(labels, torch.tensor([4, 0, 2]))
    arrivals.close()


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ((np.zeros((2, 3), np.float32),), "1 arrays"),
        ((np.zeros((2, 3), np.float64), np.zeros(2, np.int64)), "float64"),
        ((np.zeros((2, 4), np.float32), np.zeros(2, np.int64)), r"\(4,\)"),
        ((np.zeros((2, 3), np.float32), np.zeros(3, np.int64)), r"\[2, 3\] rows"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, arrays: tuple[np.ndarray, ...], what: str) -> None:
    np.savez(tmp_path / "a.npz", *arrays)
    with pytest.raises(DataError, match=what):
        Arrivals(tmp_path, COLUMNS, tmp_path)


def test_an_empty_or_damaged_inbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no"):
        Arrivals(tmp_path, COLUMNS, tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match="cannot be read"):
        Arrivals(tmp_path, COLUMNS, tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.array([object()]), np.zeros(1, np.int64))
    with pytest.raises(DataError, match="cannot be read"):
        Arrivals(tmp_path, COLUMNS, tmp_path)
