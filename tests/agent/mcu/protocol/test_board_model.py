"""The directory of a model: read as written."""

from pathlib import Path

import pytest

from port_agent.mcu.protocol.board_model import InputFormat, ModelDirectory, read_model, write_manifest
from tests.agent.mcu.small_model import CLASSES, INPUTS, write_model


@pytest.fixture
def floating(tmp_path: Path) -> ModelDirectory:
    """The small model as one that takes floats [2, 3, 4]."""
    folder = write_model(tmp_path / "floating")
    write_manifest(folder, InputFormat(2, 3, 4, 0.5, -3), ("a", "b", "c", "d"))
    return read_model(folder)


def test_model_directory_is_read(floating: ModelDirectory) -> None:
    assert (floating.name, floating.input_bytes, floating.class_count) == ("small", INPUTS, CLASSES)
    assert len(floating.sha256) == 32 and floating.classes == ("a", "b", "c", "d")
