"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from port_agent.system.atomic_file import atomic_directory, atomic_stream, write_atomically


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


def test_a_planted_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / ".state.new").symlink_to("victim")
    write_atomically(tmp_path / "state", b"new")
    assert (tmp_path / "victim").read_bytes() == b"kept"
    assert (tmp_path / "state").read_bytes() == b"new" and not (tmp_path / "state").is_symlink()


def test_a_stream_becomes_the_file_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with atomic_stream(path, 1 << 20) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and [entry.name for entry in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_stream_on_a_disk_that_refuses_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"), atomic_stream(tmp_path / "result", 100) as stream:
        stream.write(b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "made") as building:
        (building / "one").write_text("1")
        assert not (tmp_path / "made").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (tmp_path / "made" / "one").read_text() == "1"
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "other") as building:
        (building / "one").write_text("1")
        raise KeyboardInterrupt
    with pytest.raises(OSError), atomic_directory(tmp_path / "made") as building:
        (building / "two").write_text("2")
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (tmp_path / "made" / "one").read_text() == "1"
    (tmp_path / ".third.new").mkdir()
    (tmp_path / ".third.new" / "left by a cut").write_text("")
    with atomic_directory(tmp_path / "third"):
        pass
    assert list((tmp_path / "third").iterdir()) == []


def test_a_directory_takes_the_place_of_another_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(RuntimeError, match="cut"), atomic_directory(path, replaced=True):
        raise RuntimeError("cut")
    assert [entry.name for entry in path.iterdir()] == ["old"]
    with atomic_directory(path, replaced=True) as building:
        (building / "deep").mkdir()
        (building / "deep" / "new").touch()
    assert [entry.name for entry in path.rglob("*")] == ["deep", "new"] and list(tmp_path.iterdir()) == [path]
    path = tmp_path / "file"
    path.touch()
    with atomic_directory(path, replaced=True):
        pass
    assert path.is_dir()
