"""Samples that arrive after planning: read back row by row, and refused by name where they do not fit."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from port_agent.training.samples.columns import DataError
from port_agent.training.samples.incoming import Arrivals
from port_planner.base.errors import PortError
from port_planner.ir.bundle.safetensors_io import Member

COLUMNS = [Member(0, 4 * 6, "float32", (2, 3)), Member(0, 16, "int64", (2,))]


def test_rows_of_all_files_in_order(tmp_path: Path) -> None:
    inbox, folder = tmp_path / "in", tmp_path / "state"
    inbox.mkdir(), folder.mkdir()
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.arange(5)
    np.savez(inbox / "a.npz", x[:2], y[:2])
    save_file({"0": x[2:], "1": y[2:]}, inbox / "b.safetensors")
    (inbox / "notes.txt").write_text("ignored")
    arrivals = Arrivals(inbox, [COLUMNS], folder)
    assert arrivals.counts[0] == 5
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
        ((np.zeros((1, 3), np.float32), np.int64(7)), "array 1 is a single int64; give an array with a row per sample"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, arrays: tuple[np.ndarray, ...], what: str) -> None:
    np.savez(tmp_path / "a.npz", *arrays)
    with pytest.raises(DataError, match=what):
        Arrivals(tmp_path, [COLUMNS], tmp_path)


def test_bfloat16_arrives_as_safetensors(tmp_path: Path) -> None:
    sent = torch.randn(3, 2, 2).to(torch.bfloat16)
    save_torch_file({"0": sent}, tmp_path / "a.safetensors")
    arrivals = Arrivals(tmp_path, [[Member(0, 8, "bfloat16", (1, 2, 2))]], tmp_path)
    (rows,) = arrivals.batch([2, 0])
    assert torch.equal(rows, sent[[2, 0]])
    arrivals.close()


def test_an_empty_or_damaged_inbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no"):
        Arrivals(tmp_path, [COLUMNS], tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match="cannot be read"):
        Arrivals(tmp_path, [COLUMNS], tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.array([object()]), np.zeros(1, np.int64))
    with pytest.raises(DataError, match="cannot be read"):
        Arrivals(tmp_path, [COLUMNS], tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_arrays_are_copied_a_mebibyte_at_a_time(tmp_path: Path, save: Callable[..., None]) -> None:
    """Read whole, 96 MiB would show in the process's peak."""
    inbox, folder = tmp_path / "in", tmp_path / "state"
    inbox.mkdir(), folder.mkdir()
    columns = [Member(0, 4 << 20, "float32", (1, 1 << 20)), Member(0, 8, "int64", (1,))]
    save(inbox / "a.npz", np.ones((24, 1 << 20), np.float32), np.arange(24))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from port_agent.training.samples.incoming import Arrivals\n"
        "from port_planner.ir.bundle.safetensors_io import Member\n"
        "from port_planner.base.process_memory import peak_resident_bytes, reset_peak, resident_bytes\n"
        "reset_peak(); before = resident_bytes()\n"
        f"arrivals = Arrivals(Path({str(inbox)!r}), [{columns!r}], Path({str(folder)!r}))\n"
        "print(arrivals.counts[0], peak_resident_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    count, more_bytes = map(int, done.stdout.split())
    assert count == 24 and more_bytes < 16 << 20, more_bytes


@pytest.mark.parametrize("inner", [(3,), (2, 5), (4, 1, 3)])
def test_arrays_that_lie_by_columns_come_by_rows(tmp_path: Path, inner: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((300_000 // int(np.prod(inner)), *inner)).astype(np.float32)
    np.savez(tmp_path / "a.npz", np.asfortranarray(x))
    arrivals = Arrivals(tmp_path, [[Member(0, x.nbytes, "float32", x.shape)]], tmp_path)
    assert torch.equal(arrivals.batch(range(len(x)))[0], torch.from_numpy(x))
    arrivals.close()


def test_an_array_that_ends_early_is_refused(tmp_path: Path) -> None:
    x, y = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    np.savez(tmp_path / "a.npz", x, y)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data[:-4])
    with pytest.raises(DataError, match="ends in the middle"):
        Arrivals(tmp_path, [COLUMNS], tmp_path)


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_flipped_bit_or_a_cut_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    x, y = np.ones((2, 3), np.float32), np.zeros(2, np.int64)
    np.savez(tmp_path / name, x, y) if name.endswith("npz") else save_file({"0": x, "1": y}, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    refused = 0
    for i in range(0, len(data), 3):
        for content in (data[:i], data[:i] + bytes([data[i] ^ 16]) + data[i + 1 :]):
            (tmp_path / name).write_bytes(content)
            try:
                Arrivals(tmp_path, [COLUMNS], tmp_path).close()
            except DataError:
                refused += 1
    assert refused > len(data) / 4


def test_a_full_disk_is_no_fault_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in/a.npz", np.zeros((2, 3), np.float32), np.zeros(2, np.int64))
    (tmp_path / "arrived-0.raw").symlink_to("/dev/full")
    with pytest.raises(PortError, match="No space left on device; free space") as caught:
        Arrivals(tmp_path / "in", [[Member(0, 1 << 22, "float32", (2, 3)), COLUMNS[1]]], tmp_path)
    assert not isinstance(caught.value, DataError)
