"""`port-agent merge` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.finetune.tiny_model import make_data, make_model


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "agent.cli", *words], cwd=folder, capture_output=True, text=True, env=environment
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an adapter that `finetune` made over a grid."""
    made = tmp_path_factory.mktemp("merge")
    make_model(made / "model", hidden_size=128)
    make_data(made / "data.jsonl")
    words = ("model", "--data", "data.jsonl", "--out", "adapter", "--ram", "800M", "--seq-len", "32", "--base", "nf4")
    done = run(made, "finetune", *words, "--updates", "3", "--page-dir", ".")
    assert done.returncode == 0, done.stderr
    return made


def test_it_says_what_it_wrote(folder: Path) -> None:
    done = run(folder, "merge", "adapter", "--out", "merged")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "merged: 618.7 KiB, 4 layers of model with their adapters; for llama.cpp: python convert_hf_to_gguf.py merged\n"
    )
    assert done.stderr == (
        "port-agent: the adapter was trained over weights on the nf4 grid: 14 layers are written as the grid has them, in the data "
        "type of model\n"
    )
    again = run(folder, "merge", "adapter", "--out", "merged")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "port-agent: merged is there already; give a directory that is not, or remove it\n"


LOADED = """
import sys
from agent.cli import main
code = main(sys.argv[1:])
sys.exit(f"{code} {'torch' in sys.modules} {'torch._dynamo.convert_frame' in sys.modules}")
"""


def loaded(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that says last how it ended, and whether torch and torch's compiler were loaded then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", LOADED, *words], cwd=folder, capture_output=True, text=True, env=environment
    )


def test_a_directory_that_is_there_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    done = loaded(tmp_path, "merge", ".", "--out", ".")
    assert "is there already" in done.stderr and done.stderr.splitlines()[-1] == "2 False False"


def test_for_machines_it_is_a_line_of_json_and_no_compiler_is_loaded(folder: Path) -> None:
    done = loaded(folder, "merge", "adapter", "--out", "merged-json", "--json", "--model", "model")
    assert done.stderr.splitlines()[-1] == "0 True False", done.stderr
    told = json.loads(done.stdout)
    assert told.pop("nbytes") > 600_000
    assert told == {"event": "finished", "out": "merged-json", "base": "model", "merged": 4, "grid": "nf4"}
