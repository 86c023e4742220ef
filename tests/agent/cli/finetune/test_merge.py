"""`port-agent merge` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.packing import Quantization
from tests.agent.finetuning.left_alone import trained_alone
from tests.agent.finetuning.tiny_model import make_data, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an adapter that the recipe made over a grid."""
    made = tmp_path_factory.mktemp("merge")
    model, data = make_model(made / "model", hidden_size=128), make_data(made / "data.jsonl")
    grid = Quantization.NF4
    trained_alone(
        FinetuneOptions(str(model), (str(data),), str(made / "adapter"), base=grid, sequence_tokens=32, updates=1)
    )
    return made


@pytest.mark.slow
def test_it_says_what_it_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("merge", "adapter", "--out", "merged")
    monkeypatch.chdir(folder)
    assert main(words) == 0
    output, errors = capsys.readouterr()
    assert output == (
        "merged: 618.7 KiB, 4 layers of model with their adapters; for llama.cpp: python convert_hf_to_gguf.py merged\n"
    )
    assert errors == (
        "port-agent: the adapter was trained on nf4-quantized weights: 14 layers are written as quantized and "
        "decoded, in the data type of model\n"
    )
    assert main(words) == 2
    said = "port-agent: merged exists already; give a new directory, or remove it\n"
    assert capsys.readouterr() == ("", said)


LOADED = """
import sys
from port_agent.cli import main
code = main(sys.argv[1:])
sys.exit(f"{code} {'torch' in sys.modules} {'torch._dynamo.convert_frame' in sys.modules}")
"""


def loaded(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that says last how it ended, and whether torch and torch's compiler were loaded then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", LOADED, *words], cwd=folder, capture_output=True, text=True, env=environment
    )


@pytest.mark.process
def test_a_directory_that_is_there_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    done = loaded(tmp_path, "merge", ".", "--out", ".")
    assert "exists already" in done.stderr and done.stderr.splitlines()[-1] == "2 False False"


@pytest.mark.process
def test_for_machines_it_is_a_line_of_json_and_no_compiler_is_loaded(folder: Path) -> None:
    done = loaded(folder, "merge", "adapter", "--out", "merged-json", "--json", "--model", "model")
    assert done.stderr.splitlines()[-1] == "0 True False", done.stderr
    told = json.loads(done.stdout)
    assert told.pop("nbytes") > 600_000
    assert told == {"event": "finished", "out": "merged-json", "base": "model", "merged": 4, "grid": "nf4"}
