"""What is kept in the user's cache comes back as it was or not at all."""

import os
from pathlib import Path

import pytest

from port_planner.base.cache import cache_folder, read_cached, read_sealed, sealed, write_cached

CONTENT = {"seconds": [0.5, 1e-9], "more": []}


def test_what_was_sealed_comes_back_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_sealed(path, dict[str, list[float]]) is None
    whole = sealed(CONTENT)
    path.write_bytes(whole)
    assert read_sealed(path, dict[str, list[float]]) == CONTENT
    assert read_sealed(path, list[int]) is None
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_sealed(path, dict[str, list[float]]) is None
        path.write_bytes(whole[:place])
        assert read_sealed(path, dict[str, list[float]]) is None


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("plans") == Path("/home/ada/.cache/port-agent/plans")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("plans") == Path("/cache/port-agent/plans")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert cache_folder("plans") is None


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "older", "oldest")):
        write_cached(tmp_path, name, CONTENT, max_files=3)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    write_cached(tmp_path, "last", CONTENT, max_files=2)
    assert {path.name for path in tmp_path.iterdir()} == {"newest", "last"}


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", None):
        write_cached(folder, "name", CONTENT, max_files=2)
        assert read_cached(folder, "name", dict[str, list[float]]) is None
