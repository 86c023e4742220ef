"""Checkpoints that are written and gone on from within a budget, beside plain PyTorch's."""

from pathlib import Path

import pytest

from benchmarks.resume import PARTS, checksums, measure
from benchmarks.resume_loop import SMALL


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["torch.save", *(pytest.param(way, marks=pytest.mark.long) for way in ("transformers", "lightning"))]
)
def test_each_process_has_a_row_and_the_files_of_plain_pytorch(way: str, tmp_path: Path) -> None:
    rows = measure(way, ("--tensors", "1M"), tmp_path, size=(SMALL,))
    assert [row.part for row in rows] == list(PARTS)
    assert all(row.equal and row.read_mib > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_bit_of_a_weight_that_differs_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "step" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(bytes(64))
    (tmp_path / "state.json").write_text("{}")
    before = checksums(tmp_path)
    path.write_bytes(bytes(63) + b"\1")
    assert before.keys() == {"step/model.safetensors"} and checksums(tmp_path) != before
