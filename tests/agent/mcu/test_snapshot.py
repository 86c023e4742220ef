"""Models, data files, streams, snapshots and rounds on disk."""

import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from agent.mcu.data import load_samples, split_held_out
from agent.mcu.errors import BoardJobError, DisconnectedError, SnapshotError
from agent.mcu.model import InputFormat, ModelDirectory, read_model, write_manifest
from agent.mcu.protocol.messages import Rule, TrainingOptions, TrainingState
from agent.mcu.snapshot import (
    MARK_NAME,
    PlaceMark,
    Position,
    Snapshot,
    export_parameters,
    read_mark,
    read_snapshot,
    write_mark,
    write_snapshot,
)
from agent.mcu.stream import Recorded, open_stream, record
from agent.mcu.trainer import sample_order
from tests.agent.mcu.small_model import CLASSES, INPUTS, write_model

SNAPSHOT = Snapshot(
    bytes(range(32)),
    Position(2, 7, 40, 1.5, 3),
    TrainingOptions(0.1, Rule.NEAREST, False),
    TrainingState(9, 40),
    b"\0\x01abc",
)


@pytest.fixture
def floating(tmp_path: Path) -> ModelDirectory:
    """The small model as one that takes floats [2, 3, 4]."""
    folder = write_model(tmp_path / "floating")
    write_manifest(folder, InputFormat(2, 3, 4, 0.5, -3), ("a", "b", "c", "d"))
    return read_model(folder)


def test_model_directory_is_read(floating: ModelDirectory) -> None:
    assert (floating.name, floating.input_bytes, floating.class_count) == ("small", INPUTS, CLASSES)
    assert len(floating.sha256) == 32 and floating.classes == ("a", "b", "c", "d")


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


def test_order_of_an_epoch_never_changes() -> None:
    assert sample_order(8, seed=1, epoch=0) == [0, 3, 7, 1, 2, 4, 5, 6]
    assert sorted(sample_order(100, 1, 1)) == list(range(100)) != sample_order(100, 1, 1)


def test_snapshot_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert read_snapshot(path) is None
    size = write_snapshot(path, SNAPSHOT)
    content = path.read_bytes()
    assert size == len(content) and read_snapshot(path) == SNAPSHOT
    for at in range(0, size, 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(SnapshotError, match="delete it"):
            read_snapshot(path)


def test_place_mark_round_trip(tmp_path: Path) -> None:
    mark = PlaceMark(77, SNAPSHOT.position, SNAPSHOT.state, 123)
    assert read_mark(tmp_path / MARK_NAME) is None
    write_mark(tmp_path / MARK_NAME, mark)
    assert read_mark(tmp_path / MARK_NAME) == mark
    (tmp_path / MARK_NAME).write_text("{")
    assert read_mark(tmp_path / MARK_NAME) is None


def test_result_as_safetensors(tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(export_parameters(SNAPSHOT))
    with safe_open(tmp_path / "out.safetensors", "numpy") as file:
        assert file.get_tensor("parameters").tobytes() == SNAPSHOT.parameters
        assert file.metadata()["model_sha256"] == SNAPSHOT.model_sha256.hex()


def lines(count: int) -> list[bytes]:
    return [json.dumps({"x": [0.5 * i] * 24, "y": i % 4}).encode() + b"\n" for i in range(count)]


def test_stream_becomes_files_of_an_inbox(floating: ModelDirectory, tmp_path: Path) -> None:
    reports: list[int] = []

    def report(seen: Recorded) -> None:
        reports.append(seen.samples)

    bad = [b"not json\n", b'{"x": [1], "y": 0}\n', json.dumps({"x": [0] * 24, "y": 4}).encode(), b"[]\n"]
    stream = [*lines(3), *bad, *lines(7)]
    seen = record(stream, tmp_path / "inbox", floating, 4, report, clock=lambda: 1.0)
    assert (seen.samples, seen.files, seen.bad_lines) == (10, 3, 4) and reports == [4, 8, 10]
    samples = load_samples(tmp_path / "inbox", floating)
    assert samples.labels.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert samples.rows[1].tolist() == [-2] * 24


def test_stream_over_tcp(floating: ModelDirectory, tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        connection.sendall(b"".join(lines(5)))
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with open_stream(f"tcp:127.0.0.1:{server.getsockname()[1]}") as stream:
        assert record(stream, tmp_path / "inbox", floating, 2, lambda seen: None).samples == 5
    thread.join()
    server.close()
    with pytest.raises(DisconnectedError):
        open_stream("tcp:nowhere")
