"""Snapshots and places of a board's job on disk: whole, torn, flipped."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from port_agent.mcu.board.board_errors import BoardJobError, SnapshotError
from port_agent.mcu.protocol.effects import Rule, TrainingOptions, TrainingState
from port_agent.mcu.snapshot import (
    MARK_NAME,
    SNAPSHOT_NAME,
    PlaceMark,
    Snapshot,
    TrainingPosition,
    export_parameters,
    keep_course,
    keep_weights_only,
    read_mark,
    read_snapshot,
    write_mark,
    write_snapshot,
)

SNAPSHOT = Snapshot(
    bytes(range(32)),
    TrainingPosition(2, 7, 40, 1.5, 3),
    TrainingOptions(0.1, Rule.NEAREST, False),
    TrainingState(9, 40),
    b"\0\x01abc",
)


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


def test_a_position_counts_in_one_course(tmp_path: Path) -> None:
    keep_course(tmp_path, "8 samples")
    keep_course(tmp_path, "9 samples")  # nothing began yet
    write_snapshot(tmp_path / SNAPSHOT_NAME, SNAPSHOT)
    keep_course(tmp_path, "9 samples")
    with pytest.raises(BoardJobError, match="has a training of 9 samples; now it is 8 samples"):
        keep_course(tmp_path, "8 samples")
    keep_weights_only(tmp_path)
    keep_course(tmp_path, "8 samples")
    kept = read_snapshot(tmp_path / SNAPSHOT_NAME)
    assert kept is not None and kept == replace(SNAPSHOT, position=TrainingPosition())


def test_result_as_safetensors(tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(export_parameters(SNAPSHOT))
    with safe_open(tmp_path / "out.safetensors", "numpy") as file:
        assert file.get_tensor("parameters").tobytes() == SNAPSHOT.parameters
        assert file.metadata()["model_sha256"] == SNAPSHOT.model_sha256.hex()
