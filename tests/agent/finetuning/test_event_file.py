"""TensorBoard's files: the bytes that its own reader took for these numbers."""

import time
from pathlib import Path

import pytest

from port_agent.finetuning.event_file import EventFile

VERSION = "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a"
LOSS = "1b000000000000001a0d9e1309000000000000f03f10ac022a0d0a0b0a046c6f73731500001040c33c4fc0"


def test_records_are_those_that_tensorboard_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    file = EventFile(tmp_path / "runs")
    file.add("loss", 2.25, 300)
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    assert path.read_bytes().hex() == VERSION + LOSS
    EventFile(tmp_path / "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 2
