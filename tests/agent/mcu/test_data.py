"""Samples of a board's job: quantised as its model wants them, refused where they do not fit."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agent.mcu.data import load_samples, split_held_out
from agent.mcu.errors import BoardJobError
from agent.mcu.model import InputFormat, ModelDirectory, read_model, write_manifest
from tests.agent.mcu.small_model import write_model


@pytest.fixture
def floating(tmp_path: Path) -> ModelDirectory:
    """The small model as one that takes floats [2, 3, 4]."""
    folder = write_model(tmp_path / "floating")
    write_manifest(folder, InputFormat(2, 3, 4, 0.5, -3), ("a", "b", "c", "d"))
    return read_model(folder)


def test_floats_are_quantised_half_up_and_channels_last(floating: ModelDirectory) -> None:
    reals = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4) * np.float32(0.25)
    expected = np.floor(reals / 0.5 + 0.5).astype(int) - 3
    assert (floating.quantize(reals)[0] == expected[0].transpose(1, 2, 0).reshape(-1)).all()
    assert floating.quantize(np.full((1, 24), 1e9, np.float32)).max() == 127
    rows = np.arange(48, dtype=np.int8).reshape(2, 24)
    assert (floating.quantize(rows) == rows).all()
    with pytest.raises(BoardJobError, match="floats"):
        floating.quantize(np.zeros((1, 25), np.int8))


def test_floats_without_a_scale_are_refused(model: Path) -> None:
    with pytest.raises(BoardJobError, match=r"no model\.json"):
        read_model(model).quantize(np.zeros((1, 24), np.float32))


def test_data_of_a_directory_in_the_order_of_names(floating: ModelDirectory, tmp_path: Path) -> None:
    rows = np.arange(96, dtype=np.int8).reshape(4, 24)
    save_file({"samples": rows[2:], "labels": np.array([2, 3])}, tmp_path / "2.safetensors")
    np.savez(tmp_path / "1.npz", x=rows[:2], y=np.array([0, 1], np.uint8))
    (tmp_path / "notes.txt").write_text("ignored")
    samples = load_samples(tmp_path, floating)
    assert (samples.rows == rows).all() and samples.labels.tolist() == [0, 1, 2, 3]
    training, held = split_held_out(samples, 2)
    assert training.labels.tolist() == [0, 2] and held.labels.tolist() == [1, 3]
    assert len(split_held_out(samples, 0)[1]) == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 24), np.int8)}, "none of y"),
        ({"x": np.zeros((2, 24), np.int8), "y": np.zeros(3, int)}, "2 samples and 3 labels"),
        ({"x": np.zeros((2, 24), np.int8), "y": np.array([0, 4])}, "labels 0..4"),
        ({"x": np.zeros((2, 23), np.int8), "y": np.array([0, 1])}, "23 values"),
    ],
)
def test_data_that_does_not_fit(
    arrays: dict[str, np.ndarray], message: str, floating: ModelDirectory, tmp_path: Path
) -> None:
    np.savez(tmp_path / "d.npz", allow_pickle=False, **arrays)
    with pytest.raises(BoardJobError, match=message):
        load_samples(tmp_path / "d.npz", floating)


def test_pickled_data_is_never_loaded(floating: ModelDirectory, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([0]))
    with pytest.raises(BoardJobError, match="cannot read"):
        load_samples(tmp_path / "d.npz", floating)
