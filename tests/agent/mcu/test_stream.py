"""A stream of lines becomes files of an inbox."""

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import BoardJobError, DisconnectedError
from port_agent.mcu.data import load_samples
from port_agent.mcu.protocol.board_model import InputFormat, ModelDirectory, read_model, write_manifest
from port_agent.mcu.stream import RecordingTotals, open_stream, read_line, record
from port_planner.base.targets import targets_in
from tests.agent.mcu.small_model import write_model


@pytest.fixture
def floating(tmp_path: Path) -> ModelDirectory:
    """The small model as one that takes floats [2, 3, 4]."""
    folder = write_model(tmp_path / "floating")
    write_manifest(folder, InputFormat(2, 3, 4, 0.5, -3), ("a", "b", "c", "d"))
    return read_model(folder)


def lines(count: int) -> list[bytes]:
    return [json.dumps({"x": filled(2.0 * i), "y": i % 4}).encode() + b"\n" for i in range(count)]


def filled(value: float) -> object:
    return np.full((2, 3, 4), value).tolist()


def test_stream_becomes_files_of_an_inbox(floating: ModelDirectory, tmp_path: Path) -> None:
    reports: list[int] = []

    def report(seen: RecordingTotals) -> None:
        reports.append(seen.samples)

    bad = [b"not json\n", b'{"x": [1], "y": 0}\n', json.dumps({"x": filled(0), "y": 4}).encode(), b"[]\n"]
    stream = [*lines(3), *bad, *lines(7)]
    seen = record(stream, tmp_path / "inbox", floating, 4, report, clock=lambda: 1.0)
    assert (seen.samples, seen.files, seen.bad_lines) == (10, 3, 4) and reports == [3, 4, 8, 10]
    samples = load_samples(tmp_path / "inbox", floating)
    assert samples.labels.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert samples.rows[1].tolist() == [1] * 24
    write_manifest(floating.path, InputFormat(2, 3, 4, 0.25, 5), ())  # compiled again with other ranges
    assert load_samples(tmp_path / "inbox", read_model(floating.path)).rows[1].tolist() == [13] * 24


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


def test_lines_with_targets_are_recorded_as_such(floating: ModelDirectory, tmp_path: Path) -> None:
    model = replace(floating, target_count=2)
    good = [json.dumps({"x": filled(5.0), "y": [i, -0.25]}).encode() for i in range(3)]
    bad = [json.dumps({"x": filled(0.5), "y": y}).encode() for y in ([1.0], 1, [1, 2, 3], [1, 1e39])]
    seen = record([*good, *bad], tmp_path / "inbox", model, 4, lambda _: None)
    assert (seen.samples, seen.bad_lines) == (3, 4)
    samples = load_samples(tmp_path / "inbox", model)
    assert samples.targets == 2 and samples.rows.shape == (3, 24 + 8) and samples.labels.tolist() == [0, 0, 0]
    assert targets_in(samples.rows, 2).tolist() == [[0, -0.25], [1, -0.25], [2, -0.25]]
    fraction = json.dumps({"x": filled(0.5), "y": 1.5}).encode()
    assert record([fraction], tmp_path / "none", floating, 4, lambda _: None).bad_lines == 1


def test_numbers_of_several_axes_are_taken_in_their_shape_only(floating: ModelDirectory, tmp_path: Path) -> None:
    """What a sensor prints step by step has as many numbers as what it prints channel by channel."""
    sample = np.arange(24.0).reshape(2, 3, 4)
    shapes = [sample, sample.transpose(1, 2, 0), sample.ravel(), sample.reshape(2, 12), [[[1.0], [1.0, 2.0]], 3.0]]
    printed = [
        json.dumps({"x": np.asarray(x).tolist() if isinstance(x, np.ndarray) else x, "y": 0}).encode() for x in shapes
    ]
    seen = record(printed, tmp_path / "inbox", floating, 4, lambda _: None)
    assert (seen.samples, seen.bad_lines) == (1, 4)
    for line, problem in zip(
        printed[1:], (r"\[3, 4, 2\]", r"\[24\]", r"\[2, 12\]", "one sample in each line"), strict=True
    ):
        with pytest.raises(BoardJobError, match=problem):
            read_line(line, floating)
    write_manifest(floating.path, InputFormat(24, 1, 1, 0.5, -3), ())
    features, _ = read_line(printed[2], read_model(floating.path))
    assert features.tolist() == sample.reshape(24, 1, 1).tolist()  # in one form, whatever axes of 1 a line leaves out
