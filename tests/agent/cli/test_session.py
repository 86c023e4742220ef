"""`port-agent session` where no desktop answers; with one it is tried by `tests/agent/facts/test_sessions.py`."""

from pathlib import Path

import pytest

from port_agent import cli
from tests.agent.facts.machines import fake_program, on_path


@pytest.mark.process
def test_without_a_desktop_it_says_so_and_is_no_failed_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path(monkeypatch, tmp_path)
    fake_program(tmp_path, "busctl", "exit 1")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert cli.main(["session"]) == 0
    assert "on this session's bus answers; the agent uses its other signals" in capsys.readouterr().err
