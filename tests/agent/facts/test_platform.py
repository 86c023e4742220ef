"""Commands of the system: those that hang or fail are errors."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts.platform import run_command

pytestmark = pytest.mark.process


def test_a_command_that_hangs_or_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_agent.facts.platform.COMMAND_TIMEOUT_S", 0.05)
    with pytest.raises(OSError, match="did not answer within"):
        asyncio.run(run_command("sleep", "10"))
    monkeypatch.undo()
    with pytest.raises(OSError, match="exit status 1"):
        asyncio.run(run_command("false"))
    with pytest.raises(OSError):
        asyncio.run(run_command(str(tmp_path / "absent")))
