"""`finetune --explain` as a user reads it, and as a machine does; it trains nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from port_agent.cli import main
from port_agent.cli.finetune.explanation import explanation_table
from port_agent.finetuning.explain import Explanation
from port_agent.finetuning.inputs.options import FinetuneOptions
from tests.agent.finetuning.tiny_model import make_data, make_model

MIB = 1 << 20
FOUND = Explanation(
    model="/m", learns="the next token", how="as it is", kind="llama", parameters=1_100_000_000, loaded_as="bfloat16", files=("a.safetensors", "b.safetensors"),
    files_bytes=2200 * MIB, merged_bytes=0, trained_parameters=1_126_400, trained_layers=("q_proj", "v_proj"), grid=None, quantized_layers=0, quantized_bytes=0,
    is_quantized=False, records=12, broken=2, skipped=1, unwritten=0, sequences=100, held_out=5, tokens=20000, learned_tokens=15000, shortest=32,
    longest=256, batch=1, accumulate=4, by_layers=False, accumulation_why="there is no room", updates=25, done=False, ram_bytes=600 * MIB, process_bytes=340 * MIB, working_bytes=48 * MIB, trained_bytes=18 * MIB,
    saved_bytes=100 * MIB, logits_bytes=16 * MIB, head_rows=64, head_why="too much", frozen_bytes=2000 * MIB, resident_frozen_bytes=110 * MIB, read_bytes=15120 * MIB,
    written_bytes=0, checkpoint_s=300.0, checkpoint_bytes=13 * MIB, checkpoint="/out.state/checkpoint.pt", out="/out",
)  # fmt: skip
OPTIONS = FinetuneOptions("/m", ("/d",), "/out")


def shown(found: Explanation, options: FinetuneOptions = OPTIONS) -> str:
    console = Console(file=StringIO(), width=400)
    console.print(explanation_table(found, options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_says_what_is_trained_what_stays_and_why() -> None:
    out = shown(FOUND)
    assert "llama, 1,100.0 million weights as bfloat16" in out
    assert "LoRA of rank 8 on q_proj, v_proj: 1.13 million numbers in float32; all else is frozen" in out
    assert "2.1 GiB in 2 files, mapped and read in place, never copied or written" in out
    assert "loading merges 54.0 MiB of them" in shown(replace(FOUND, merged_bytes=54 * MIB))
    assert (
        "12 records, without 2 broken lines and 1 prompts that are too long" in out and "25 of 4 x 1 sequences" in out
    )
    assert "110.0 MiB: of 2.0 GiB that a step multiplies by, stay in memory" in out
    assert "600.0 MiB: all of a step's tensors fit; frozen weights that do not fit are read again" in out
    assert "reads up to 14.8 GiB again and writes 0 B or more" in out and "continues from its checkpoint" not in out
    assert "600.0 MiB: 20.0 MiB of a step's tensors do not fit" in shown(replace(FOUND, written_bytes=80 * MIB))
    assert "one at a time: there is no room" in out and "kept for the backward pass: of the longest batch" in out
    by_layers = shown(replace(FOUND, by_layers=True, written_bytes=20 * MIB))
    assert "layer by layer: there is no room" in by_layers and "the inputs of each layer for all batches" in by_layers
    assert "600.0 MiB: 20.0 MiB of a step's tensors do not fit" in by_layers
    assert "on 64 rows of the longest batch at a time: too much" in out and "rows at a time:" not in shown(
        replace(FOUND, head_rows=0)
    )
    assert "one by one" not in shown(replace(FOUND, accumulate=1))
    assert "600.0 MiB: everything fits" in shown(replace(FOUND, read_bytes=0))
    full = shown(replace(FOUND, frozen_bytes=0, done=True), replace(OPTIONS, lora_rank=None))
    assert "all: 1.13 million" in full and "trained weights are kept in memory and in the page file" in full
    assert "continues from its checkpoint" in full and "a model and the tokenizer: /out" in full
    grid = shown(replace(FOUND, grid="nf4", quantized_layers=154, quantized_bytes=550 * MIB))
    assert "154 linear layers as nf4, 550.0 MiB, in MODEL/.port-agent, which is written once" in grid


def explained(folder: Path, *more: str) -> str:
    """Return what the command prints, which leaves nothing behind."""
    make_model(folder / "model", hidden_size=128)
    make_data(folder / "data.jsonl")
    words = (
        "finetune",
        "model",
        "--data",
        "data.jsonl",
        "--out",
        "out",
        "--ram",
        "700M",
        "--page-dir",
        ".",
        "--explain",
    )
    before = sorted(path.name for path in folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "port_agent.cli", *words, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
    return done.stdout


@pytest.mark.long
def test_the_command_explains_and_leaves_nothing(tmp_path: Path) -> None:
    told = json.loads(explained(tmp_path, "--json"))
    assert told["event"] == "explained" and told["trained_parameters"] == 7168 and told["ram_bytes"] == 700 * MIB
    assert 200 * MIB < told["process_bytes"] < 700 * MIB


@pytest.mark.long  # the one above asks the same command for JSON, and the first one reads the table
def test_the_command_explains_in_a_table(tmp_path: Path) -> None:
    assert "LoRA of rank 8 on" in explained(tmp_path)


@pytest.mark.parametrize("other", ["--submit", "--opportunistic"])
def test_it_does_not_go_with_what_runs(other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["finetune", "model", "--data", "d", "--out", out, "--ram", "700M", "--explain", other]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and "--explain trains nothing; leave out --submit" in errors
