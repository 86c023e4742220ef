"""`port-agent finetune` as a user types it: the bits of the recipe without a budget, and refusals in one line."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.packing import Quantization
from tests.agent.finetuning.left_alone import WEIGHTS, trained_alone
from tests.agent.finetuning.tiny_model import make_data, make_model
from tests.agent.firmware_name import named_machine
from tests.simulated_card import installed, library, missing
from tests.their_modules import NOT_IMPORTED, fill_with_modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("finetune")
    make_model(made / "model", hidden_size=128)
    make_data(made / "data.jsonl")
    shutil.copytree(made / "model", made / "own_code")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (made / "own_code" / "config.json").write_text(json.dumps(config))
    return made


def finetune(folder: Path, *words: str, machine: str = "nameless") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **named_machine(folder / "site", machine)}
    command = [sys.executable, "-P", "-m", "port_agent.cli", "finetune", *words, "--page-dir", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def untimed(lines: list[str]) -> list[dict[str, Any]]:
    """Return what lines of JSON say without what depends on the clock, and without where it went."""
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "out")} for line in lines]


@pytest.mark.process
@pytest.mark.parametrize(
    "base",
    [
        Quantization.NF4,
        pytest.param(None, marks=pytest.mark.long),  # `finetuning/job/test_worker.py` compares these bits each time
        pytest.param(Quantization.INT8, marks=pytest.mark.long),
    ],
)
def test_in_a_budget_it_has_the_bits_of_the_recipe_without(
    base: Quantization | None, folder: Path, tmp_path: Path
) -> None:
    """Also in a directory of modules that are called as ours."""
    model, data, out = (str(path) for path in (folder / "model", folder / "data.jsonl", tmp_path / "plain"))
    fill_with_modules(tmp_path, NOT_IMPORTED)
    alone = trained_alone(FinetuneOptions(model, (data,), out, base=base, sequence_tokens=32, updates=3))
    words = ["--ram", "800M", "--seq-len", "32", "--updates", "3", "--json", "--out", str(tmp_path / "mine")]
    words += ["--base", "bf16" if base is None else base.value, "--lora", "r=8"]
    mine = finetune(tmp_path, model, "--data", data, *words, machine="device tree")
    assert mine.returncode == 0, mine.stderr
    assert untimed(mine.stdout.splitlines()) == untimed(alone)
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    ours = [line for line in mine.stderr.splitlines() if line.startswith("port-agent: ")]
    assert "2 broken entries are left out" in ours[0] and "of 800.0 MiB" in ours[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none", "--data", "data.jsonl"), "none/config.json: No such file or directory; give a model directory"),
        (("model", "--data", "none.jsonl"), "none.jsonl: No such file or directory; give a file of texts or records"),
        (
            ("model", "--data", "data.jsonl", "--full", "--targets", "q_proj"),
            "--targets is for adapters, and --full has none",
        ),
        (
            ("model", "--data", "data.jsonl", "--autocast", "--base", "nf4"),
            "--autocast casts weights, and quantized weights are decoded to the model's own type",
        ),
        (
            ("model", "--data", "data.jsonl", "--full", "--base", "nf4"),
            "--full trains all weights, and --base freezes them",
        ),
        (("model", "--data", "data.jsonl", "--full", "--federated"), "--federated exchanges adapters"),
        (("model", "--data", "data.jsonl", "--federated"), "--federated is for a job of the agent; add --submit"),
        (
            ("model", "--data", "data.jsonl", "--base", "int4"),
            "invalid choice: 'int4' (choose from 'bf16', 'nf4', 'int8')",
        ),
        (("model", "--data", "data.jsonl", "--lora", "r=big"), "'big' is not a valid whole number from 1 to 1024"),
        (("own_code", "--data", "data.jsonl"), "is a 'mine', which transformers"),
        (
            ("model", "--data", "data.jsonl", "--held-out", "1"),
            "1 is not a valid share; give a number from 0 to below 1",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    words: tuple[str, ...],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it is found before the process becomes the one that trains."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("os.execve", lambda *become: pytest.fail(f"it trains: {become}"))
    with contextlib.suppress(SystemExit):  # of the parser
        assert main(["finetune", *words, "--out", "wrong", "--ram", "800M", "--page-dir", str(folder)]) == 2
    check_refusal(capsys.readouterr(), message, folder / "wrong")


@pytest.mark.long
def test_what_only_the_model_tells_is_one_line_and_exit_code_2_too(folder: Path) -> None:
    words = ("model", "--data", "data.jsonl", "--targets", "w_q", "--out", "wrong", "--ram", "800M")
    done = finetune(folder, *words)
    assert done.returncode == 2
    check_refusal((done.stdout, done.stderr), "the model has no layer w_q; it has down_proj", folder / "wrong")


def check_refusal(said: tuple[str, str], message: str, out: Path) -> None:
    """See that a refusal is one line on standard error, and that nothing was written."""
    output, errors = said
    (line,) = (line for line in errors.splitlines() if message in line)
    assert line.startswith("port-agent") and "Traceback" not in errors and output == ""
    assert not out.exists() or not any(out.iterdir())


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_on_a_device_within_its_memory_it_has_the_bits_of_the_device_alone(folder: Path, tmp_path: Path) -> None:
    library()
    environment = installed(tmp_path / "card")
    words = ("--data", str(folder / "data.jsonl"), "--ram", "1500M", "--device", "card", "--seq-len", "32", "--full")
    runs: dict[str, subprocess.CompletedProcess[str]] = {}
    for name, bound in {"plain": (), "bounded": ("--gpu-ram", "6M"), "tight": ("--gpu-ram", "3100K")}.items():
        out = ("--out", str(tmp_path / name), "--page-dir", str(tmp_path), "--json", "--updates", "2")
        command = (sys.executable, "-m", "port_agent.cli", "finetune", str(folder / "model"), *words, *out, *bound)
        runs[name] = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    plain, bounded, tight = runs.values()
    assert plain.returncode == bounded.returncode == 0, bounded.stderr
    assert untimed(bounded.stdout.splitlines()) == untimed(plain.stdout.splitlines())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "bounded")]
    assert weights[0] == weights[1] and "card:0: peak" in bounded.stderr and " of 6.0 MiB" in bounded.stderr
    assert tight.returncode == 2 and not (tmp_path / "tight").exists(), tight.stderr
    assert "--gpu-ram" in tight.stderr and "Traceback" not in tight.stderr
