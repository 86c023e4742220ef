"""A budget that does not suffice is refused before the first update, in figures, and is not exceeded."""

import re
import subprocess
import sys
from pathlib import Path

from agent.finetune.head_loss import LearnedLoss
from agent.finetune.model import load_model
from agent.finetune.options import FinetuneOptions
from agent.finetune.task import Task, TaskKind
from planner.ir.errors import ExitCode
from tests.agent.finetune.tiny_model import make_data, make_model

MIB = 1 << 20


def options_of(folder: Path, **changed: int | None) -> FinetuneOptions:
    return FinetuneOptions(str(folder / "model"), str(folder / "data.jsonl"), str(folder / "out"), **changed)  # type: ignore[arg-type]


def test_what_the_loss_takes_at_once_is_what_it_takes(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    model = load_model(options_of(tmp_path), Task(TaskKind.CAUSAL_LM), lambda note: None)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    assert LearnedLoss(model).bytes_at_once(64) == 64 * vocabulary * 2 + 3 * 64 * vocabulary * 4
    assert LearnedLoss(model, 16).bytes_at_once(64) == 16 * vocabulary * 2 + 3 * 16 * vocabulary * 4


def test_a_budget_that_is_too_small_is_refused_before_the_first_update(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    command = [
        sys.executable, "-m", "agent.cli", "finetune", str(model), "--data", str(data), "--out", str(tmp_path / "out"),
        "--ram", "290M", "--page-dir", str(tmp_path), "--json", "--seq-len", "32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.IMPOSSIBLE and not done.stdout and not (tmp_path / "out").exists()
    assert re.search(r"290\.0 MiB is too little: this process takes .* give --ram \d+M, or a shorter", done.stderr)
