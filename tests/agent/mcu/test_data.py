"""Samples of a board's job: quantised as its model wants them, refused where they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.data import BoardSamples, keep_shard, load_rows, load_samples, split_held_out, take_shard
from port_agent.mcu.protocol.board_model import InputFormat, ModelDirectory, read_model, write_manifest
from port_agent.worker.shard import Shard
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
    assert floating.quantize(np.full((1, 2, 3, 4), 1e9, np.float32)).max() == 127
    rows = np.arange(48, dtype=np.int8).reshape(2, 24)
    assert (floating.codes(rows) == rows).all()
    with pytest.raises(BoardJobError, match=r"codes of shape \[25\] and type int8; .* takes int8 rows \[N, 24\]"):
        floating.codes(np.zeros((1, 25), np.int8))


def test_floats_without_a_scale_are_refused(model: Path) -> None:
    with pytest.raises(BoardJobError, match=r"no model\.json"):
        read_model(model).quantize(np.zeros((1, 24), np.float32))


def test_data_of_a_directory_in_the_order_of_names(floating: ModelDirectory, tmp_path: Path) -> None:
    rows = np.arange(96, dtype=np.int8).reshape(4, 24)
    save_file({"codes": rows[2:], "labels": np.array([2, 3])}, tmp_path / "2.safetensors")
    np.savez(tmp_path / "1.npz", codes=rows[:2], y=np.array([0, 1], np.uint8))
    (tmp_path / "notes.txt").write_text("ignored")
    samples = load_samples(tmp_path, floating)
    assert (samples.rows == rows).all() and samples.labels.tolist() == [0, 1, 2, 3]


def test_every_nth_sample_is_held_out_but_never_a_whole_class() -> None:
    samples = BoardSamples(np.arange(6, dtype=np.int8)[:, None], np.array([0, 1, 1, 0, 1, 0]))
    training, held = split_held_out(samples, 3)
    assert training.rows.ravel().tolist() == [0, 1, 3, 4] and held.labels.tolist() == [1, 0]
    assert len(split_held_out(samples, 0)[1]) == 0
    in_turns = BoardSamples(np.zeros((50, 1), np.int8), np.arange(50) % 10)
    with pytest.raises(BoardJobError, match=r"all of class 4, 9; shuffle the samples, or give .* --test"):
        split_held_out(in_turns, 5)


CODED: dict[str, Any] = {
    "codes": np.zeros((2, 24), np.int8), "y": np.array([0, 1]), "scale": np.float32(0.5), "zero": np.array(-3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"codes": np.zeros((2, 24), np.int8)}, "none of y"),
        ({"codes": np.zeros((2, 24), np.int8), "y": np.zeros(3, int)}, "2 samples and 3 labels"),
        ({"codes": np.zeros((2, 24), np.int8), "y": np.array([0, 4])}, "labels 0..4"),
        ({"codes": np.zeros((2, 23), np.int8), "y": np.array([0, 1])}, r"codes of shape \[23\] and type int8"),
        ({"codes": np.zeros((2, 24), np.uint8), "y": np.array([0, 1])}, r"codes of shape \[24\] and type uint8"),
        ({"x": np.zeros((2, 24), np.int8), "y": np.array([0, 1])}, "int8 may be real values or codes"),
        ({"x": np.zeros((2, 2, 3, 4), np.int8), "y": np.array([0, 1])}, "int8 may be real values or codes"),
        ({**CODED, "scale": np.float32(0.25)}, r"codes of scale 0\.25 and zero -3, but small has 0\.5 and -3"),
        ({**CODED, "zero": np.array(4)}, r"codes of scale 0\.5 and zero 4"),
        ({"x": np.zeros((2, 3, 4, 2)), "y": np.array([0, 1])}, r"samples of shape \[3, 4, 2\], axis by axis"),
        ({"x": np.zeros((2, 24)), "y": np.array([0, 1])}, r"samples of shape \[24\]"),
        ({"x": np.full((2, 2, 3, 4), np.nan), "y": np.array([0, 1])}, "48 of 48 values are NaN or infinite"),
        ({"x": np.zeros((2, 2, 3, 4), complex), "y": np.array([0, 1])}, "samples of type complex128"),
        (
            {"x": np.full((2, 2, 3, 4), 200, np.uint8), "y": np.array([0, 1])},
            "100% of the values lie outside -62.5 to 65",
        ),
        ({"x": np.zeros(()), "y": np.array([0, 1])}, "no array of samples"),
        ({"x": np.zeros((2, 2, 3, 4)), "y": np.array([0, 1.9])}, "the label 1.9 at sample 1"),
        ({"x": np.zeros((2, 2, 3, 4)), "y": np.array([0, np.nan])}, "the label nan at sample 1"),
        ({"x": np.zeros((2, 2, 3, 4)), "y": np.zeros((2, 4))}, r"labels of shape \[2, 4\] .* learns classes"),
        ({"x": np.zeros((2, 2, 3, 4)), "y": np.array(["a", "b"])}, "labels of shape .* type <U1"),
    ],
)
def test_data_that_does_not_fit(
    arrays: dict[str, np.ndarray], message: str, floating: ModelDirectory, tmp_path: Path
) -> None:
    np.savez(tmp_path / "d.npz", allow_pickle=False, **arrays)
    with pytest.raises(BoardJobError, match=message):
        load_samples(tmp_path / "d.npz", floating)


def test_codes_of_this_calibration_are_taken(floating: ModelDirectory, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", allow_pickle=False, **CODED)
    assert (load_samples(tmp_path / "d.npz", floating).rows == CODED["codes"]).all()


def test_clipped_values_are_counted(floating: ModelDirectory, tmp_path: Path) -> None:
    reals = np.zeros((3, 2, 3, 4))
    reals[0, 0, 0] = 1_000
    np.savez(tmp_path / "d.npz", x=reals, y=np.array([[0], [1], [2.0]]))
    samples = load_samples(tmp_path, floating)
    assert samples.clipped == 4 and samples.labels.tolist() == [0, 1, 2]
    rows, clipped = load_rows(tmp_path, floating)
    assert (rows == samples.rows).all() and clipped == 4


def test_values_of_smaller_units_are_refused_like_those_of_larger_ones(
    floating: ModelDirectory, tmp_path: Path
) -> None:
    """Within the calibrated range -62.5 to 65, steps of 0.5: in other units all samples
    would become nearly one code.
    """
    reals = np.random.default_rng(0).uniform(-60, 60, (8, 2, 3, 4))
    for factor in (1.0, 0.1):
        np.savez(tmp_path / "d.npz", x=factor * reals, y=np.arange(8) % 4)
        assert len(load_samples(tmp_path, floating)) == 8
    np.savez(tmp_path / "d.npz", x=0.001 * reals, y=np.arange(8) % 4)
    with pytest.raises(
        BoardJobError, match=r"but the model was calibrated for -62\.5 to 65, which leaves them 0 steps"
    ):
        load_samples(tmp_path, floating)
    assert len(load_rows(tmp_path, floating)[0]) == 8  # one quiet sample may well be classified
    np.savez(tmp_path / "e.npz", x=reals, y=np.arange(8) % 4)
    assert len(load_samples(tmp_path, floating)) == 16  # quiet samples among others


def test_files_that_are_no_samples_are_refused(floating: ModelDirectory, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((2, 2, 3, 4)))
    with pytest.raises(BoardJobError, match="it is one array without a name"):
        load_samples(tmp_path / "one.npy", floating)
    save_torch({"x": torch.zeros(2, 2, 3, 4).bfloat16(), "y": torch.zeros(2)}, tmp_path / "d.safetensors")
    with pytest.raises(BoardJobError, match="an array of type 'BF16'; write it in float32"):
        load_samples(tmp_path / "d.safetensors", floating)
    np.savez(tmp_path / "d.npz", x=np.zeros((0, 2, 3, 4)))
    with pytest.raises(BoardJobError, match="has no samples"):
        load_rows(tmp_path / "d.npz", floating)


def test_a_stream_and_features_may_lack_axes(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for form, shapes in (
        (InputFormat(6, 1, 4, 0.5, 0), [(6, 4), (6, 1, 4)]),
        (InputFormat(24, 1, 1, 0.5, 0), [(24,), (24, 1), (24, 1, 1)]),
        (InputFormat(1, 4, 6, 0.5, 0), [(4, 6), (1, 4, 6)]),
    ):
        write_manifest(folder, form, ())
        for shape in shapes:
            assert read_model(folder).quantize(np.ones((2, *shape), np.int64)).shape == (2, 24)


def test_pickled_data_is_never_loaded(floating: ModelDirectory, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([0]))
    with pytest.raises(BoardJobError, match="cannot read"):
        load_samples(tmp_path / "d.npz", floating)


@pytest.mark.parametrize(("samples", "boards"), [(3, 3), (10, 3), (480, 7), (5, 1)])
def test_shards_hold_each_sample_exactly_once(samples: int, boards: int) -> None:
    whole = BoardSamples(np.zeros((samples, 1), np.int8), np.arange(samples))
    parts = [take_shard(whole, Shard(number, boards)).labels.tolist() for number in range(1, boards + 1)]
    assert sorted(label for part in parts for label in part) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_board_has_its_share_of_each_class() -> None:
    in_turns = BoardSamples(np.arange(40, dtype=np.int8)[:, None], np.arange(40) % 4)
    parts = [take_shard(in_turns, Shard(number, 4)) for number in (1, 2, 3, 4)]
    assert {tuple(np.bincount(part.labels).tolist()) for part in parts} == {(3, 2, 3, 2), (2, 3, 2, 3)}
    assert all((np.diff(part.rows.ravel()) > 0).all() for part in parts)


def test_fewer_samples_than_boards_are_refused() -> None:
    with pytest.raises(BoardJobError, match="2 samples to train on for 3 boards"):
        take_shard(BoardSamples(np.zeros((2, 1), np.int8), np.arange(2)), Shard(1, 3))


def test_a_part_that_changed_since_its_board_began_is_refused(tmp_path: Path) -> None:
    whole = BoardSamples(np.zeros((9, 1), np.int8), np.arange(9))
    part = take_shard(whole, Shard(2, 3))
    keep_shard(tmp_path, Shard(2, 3), part)
    keep_shard(tmp_path, Shard(2, 3), part)
    more = BoardSamples(np.zeros((11, 1), np.int8), np.arange(11))
    with pytest.raises(BoardJobError, match=r"began with part 2/3 .* 3 in total.* now it is part 2/3 .* 4 in total"):
        keep_shard(tmp_path, Shard(2, 3), take_shard(more, Shard(2, 3)))
    with pytest.raises(BoardJobError, match="now it is part 3/3"):
        keep_shard(tmp_path, Shard(3, 3), take_shard(whole, Shard(3, 3)))
    other = BoardSamples(whole.rows, whole.labels[::-1])
    with pytest.raises(BoardJobError, match="Restore the data"):
        keep_shard(tmp_path, Shard(2, 3), take_shard(other, Shard(2, 3)))
