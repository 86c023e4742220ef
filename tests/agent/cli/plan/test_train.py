"""`train` as a user runs it: to the end, and interrupted."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.cli.plan.small_script import command, run_forked

pytestmark = pytest.mark.process


def test_train_writes_weights(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["event"] == "finished" and undisturbed["step"] == 9
    assert len(undisturbed["weights"]) > 4 * 2048 * 10


def test_ctrl_c_and_the_same_command_again(
    planned: tuple[Path, dict[str, Any]], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "w.safetensors"
    words = [
        "train",
        "job.port",
        "--epochs",
        "3",
        "--out",
        str(out),
        "--state-dir",
        str(tmp_path / "s"),
        "--json",
        "--digest",
    ]
    process = subprocess.Popen(
        command(*words), cwd=planned[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] == 2:
            process.send_signal(signal.SIGINT)
            break
    rest = [json.loads(line) for line in process.stdout]
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "continues" in errors and "Traceback" not in errors
    done = [e["step"] for e in rest if e["event"] == "checkpoint"]
    assert not out.exists() and done and done[-1] < 9
    again = run_forked(planned[0], *words)
    assert again.returncode == 0, again.stderr
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert events[0]["step"] == done[-1], "it goes on from the last checkpoint"
    assert events[-1]["digest"] == undisturbed["digest"]
    assert out.read_bytes() == undisturbed["weights"]
