"""A request has the defaults of the command line."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from port_agent.cli.plan import command
from port_agent.planning.request import PlanRequest


def test_the_command_line_asks_for_what_a_request_asks_for_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    parser = argparse.ArgumentParser()
    command.add_commands(parser.add_subparsers())
    arguments = parser.parse_args(["plan", "train.py", "--ram", "1G"])
    expected = PlanRequest(script=Path("train.py"), out=Path("train.port"), ram_bytes=1 << 30)
    assert command._request(arguments) == expected
    assert all(field.kw_only for field in fields(PlanRequest))
