"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from agent.system.atomic_file import publish, write_atomically


def test_the_new_content_replaces_the_old_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for content in (b"old", b"x" * 200_000, b""):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_refuses_leaves_the_old_content(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_finished_file_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(b"new")
    (tmp_path / "result").write_bytes(b"old")
    publish(tmp_path / "made", tmp_path / "result")
    assert (tmp_path / "result").read_bytes() == b"new" and not (tmp_path / "made").exists()
