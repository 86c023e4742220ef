"""Pairing by the command line between two running agents."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.control.client import ControlClient
from tests.agent.live_daemon import CONFIG, ROOT, daemon
from tests.waiting import PATIENCE_S, until


def free_ports() -> tuple[int, int]:
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@contextmanager
def agent(root: Path, name: str) -> Iterator[tuple[ControlClient, int]]:
    """Run an agent; gives its client and where it shows codes."""
    port, pairing_port = free_ports()
    root.mkdir()
    peers = f'[peers]\nname = "{name}"\nport = {port}\npairing_port = {pairing_port}\n'
    with daemon(root, CONFIG + peers) as client:
        until((root / "run/control.sock").exists)
        yield client, pairing_port


def paired(client: ControlClient) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get("/v1/peers")["paired"]
    return rows


@contextmanager
def showing(runtime_dir: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "port_agent.cli", "pair", *words, "--runtime-dir", str(runtime_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.process
def test_two_agents_pair_see_each_other_and_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent(tmp_path / "a", "attic") as (attic, pairing_port), agent(tmp_path / "b", "cellar") as (cellar, _):
        place = ["--runtime-dir", str(tmp_path / "b/run")]
        with showing(tmp_path / "a/run") as process:
            assert process.stdout is not None
            code = re.search(r"\d{3}-\d{3}-\d{3}", process.stdout.readline())
            assert code is not None
            assert main(["pair", "111-111-111", *place]) == 2
            assert "mistyped" in capsys.readouterr().err
            assert main(["pair", code[0], "--at", f"127.0.0.1:{pairing_port}", *place]) == 0
            assert capsys.readouterr().out == "Paired with attic at 127.0.0.1. See it with: port-agent peer list\n"
            assert "Paired with cellar" in process.stdout.read() and process.wait(PATIENCE_S) == 0
        until(lambda: all(paired(client)[0]["is_connected"] for client in (attic, cellar)))
        until(lambda: paired(cellar)[0]["board"])
        assert main(["peers", *place]) == 0
        shown = capsys.readouterr().out
        assert "attic" in shown and "idle" in shown and "paired with attic at 127.0.0.1" in shown
        assert main(["unpair", "nobody", *place]) == 2
        assert "no paired device is called 'nobody'; the paired devices are attic" in capsys.readouterr().err
        assert main(["unpair", "attic", "--json", *place]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "attic" and paired(cellar) == []
        until(lambda: not paired(attic)[0]["is_connected"])


@pytest.mark.process
def test_a_code_that_nobody_types(tmp_path: Path) -> None:
    with agent(tmp_path / "a", "attic"), showing(tmp_path / "a/run", "--for", "1s", "--json") as process:
        assert process.stdout is not None
        code, outcome = process.stdout
        assert len(json.loads(code)["code"]) == 11
        assert json.loads(outcome)["state"] == "failed" and process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--at", "10.0.0.2"], "--at goes with a code"),
        (["482-193-059", "--for", "5min"], "--for is for the device that shows the code"),
        (["--for", "2h"], "at most an hour"),
        (["482-193"], "not a valid pairing code"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pair", *words, "--runtime-dir", "/nowhere"]) == 2
    assert reason in capsys.readouterr().err
