"""`port-agent mcu ... --json` inside the test's process."""

import json
from typing import Any

import pytest

from port_agent.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    """Return what a command that succeeds prints, a value for each line."""
    assert main(["mcu", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
