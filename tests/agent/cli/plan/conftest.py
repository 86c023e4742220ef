"""A bundle of the small script, made once, and its training, undisturbed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.cli.plan.small_script import SCRIPT, run_forked


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text(SCRIPT)
    done = run_forked(folder, "plan", "train.py", "--ram", "700M", "-o", "job.port", "--verify", "2", "--strategy", "greedy", "--medium", "sd", "--deadline", "3d", "--charging", "22:00-07:00", "--writes-per-step", "20M", "--epochs", "2", "--json", "--write-model", "model.lp")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="session")
def undisturbed(planned: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state, out = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("out") / "w.safetensors"
    done = run_forked(planned[0], "train", "job.port", "--epochs", "3", "--out", str(out), "--state-dir", str(state), "--verify", "2", "--json", "--digest")  # fmt: skip
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**last, "weights": out.read_bytes()}
