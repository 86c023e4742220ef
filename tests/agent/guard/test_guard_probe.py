"""The trial of guarded memory tells whether it works on this machine."""

from pathlib import Path

import pytest

from port_agent.guard import probe_guard
from port_agent.guard.guard_probe import _judged
from port_agent.malloc import PreloadMode, preload_mode

pytestmark = pytest.mark.process


@pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the library cannot be preloaded")
def test_it_works_here_and_not_without_a_page_file(tmp_path: Path) -> None:
    found = probe_guard(tmp_path)
    assert found.trouble == "" and found.page_bytes >= 4096 and found.moves_pages
    missing = probe_guard(tmp_path / "missing")
    assert "guarded memory cannot begin: No such file or directory" in missing.trouble


def test_where_the_library_is_missing_that_is_the_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_agent.guard.guard_probe.preload_mode", lambda: PreloadMode.THRESHOLD)
    monkeypatch.setattr("port_agent.guard.guard_probe.preload_trouble", lambda: "it was not built")
    assert probe_guard(tmp_path).trouble == "it was not built"


def test_figures_are_judged() -> None:
    assert _judged({"wrong": 0, "read_faults": 9, "moved_bytes": 1}, "") == ("", True)
    assert _judged({"wrong": 0, "read_faults": 9, "moved_bytes": 0}, "") == ("", False)
    assert "3 words came back with different values" in _judged({"wrong": 3, "read_faults": 9, "moved_bytes": 1}, "")[0]
    assert _judged({"wrong": -1, "read_faults": 0, "moved_bytes": 0}, "no room")[0] == "no room"
