"""A budget that does not suffice is refused before the first update, in figures, and is not exceeded."""

import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.finetuning import budget_check
from port_agent.finetuning.accumulation.head_loss import LearnedLoss
from port_agent.finetuning.accumulation.head_rows import HeadRows
from port_agent.finetuning.budget_check import BudgetCheck
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from port_agent.finetuning.training import finetune
from port_agent.packing import Quantization
from port_planner.base.errors import ExitCode
from tests.agent.finetuning.tiny_model import make_data, make_model

MIB = 1 << 20

PASSES_ITS_BUDGET = """
import sys
from pathlib import Path
from port_agent import budget
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.steering import Steering
from port_agent.finetuning.text.tokenizing import TokenizerHere
from port_agent.finetuning.training import finetune
from port_planner.base.process_memory import reset_peak
folder = Path(sys.argv[1])
options = FinetuneOptions(str(folder / "model"), (str(folder / "data.jsonl"),), str(folder / "out"), updates=2, held_out=0.0)
def take():
    b"." * (512 << 20)
class InTheUpdate(Steering):
    def updating(self):
        take()
        return super().updating()
class AtTheEnd(TokenizerHere):
    def save(self, folder):
        take()
        super().save(folder)
def note(text):
    if text.startswith("resumes"):
        print(text)
def attempt(**given):
    try:
        print(finetune(options, lambda update: print("update", update.done), note, **given).updates, "done")
    except FinetuneError as error:
        print(error)
    print("state", (folder / "out.state" / "checkpoint.pt").exists(), "out", (folder / "out" / "adapter_config.json").exists())
    reset_peak()
with budget(ram="700M", page_dir=folder).resizing():
    attempt(steering=InTheUpdate())
    attempt(tokenizer=AtTheEnd(options))
    attempt()
"""
"""Something in the process takes more than the budget while an update is made, and while the result is written."""


@pytest.mark.slow
def test_hardly_more_than_the_budget_is_said_once_and_much_more_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with budget(ram="2G", page_dir=tmp_path).resizing():
        found = BudgetCheck(options_of(tmp_path))
        assert found.check_peak() is None
        monkeypatch.setattr(budget_check, "peak_resident_bytes", lambda: (2 << 30) + (1 << 20))
        assert found.check_peak() == "this process took 2.0 GiB, 1.0 MiB more than 2.0 GiB, and continues"
        assert found.check_peak() is None
        monkeypatch.setattr(budget_check, "peak_resident_bytes", lambda: (2 << 30) + (32 << 20))
        with pytest.raises(FinetuneError, match=r"32\.0 MiB more than 2\.0 GiB; give --ram"):
            found.check_peak()


def options_of(folder: Path, **changed: int | None) -> FinetuneOptions:
    return FinetuneOptions(str(folder / "model"), (str(folder / "data.jsonl"),), str(folder / "out"), **changed)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("multiplies", [True, False])
def test_what_the_loss_takes_at_once_is_what_it_takes(
    multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": multiplies})
    make_model(tmp_path / "model")
    model = load_model(options_of(tmp_path), Task(TaskKind.CAUSAL_LM), lambda note: None)
    weight = model.get_output_embeddings().weight
    vocabulary = weight.shape[0]
    for asked, rows in ((None, 64), (16, 16)):
        logits, block = rows * vocabulary * 2, rows * vocabulary * 4
        summed = 0 if multiplies else rows * vocabulary * 4
        assert LearnedLoss(model, asked).bytes_at_once(64) == logits + max(3 * block, summed, weight.nbytes)
        assert LearnedLoss(model).bytes_at_once(64, at_once=rows) == LearnedLoss(model, asked).bytes_at_once(64)


@pytest.mark.slow
def test_where_all_rows_of_the_head_are_too_much_it_runs_on_as_many_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model")
    model = load_model(options_of(tmp_path), Task(TaskKind.CAUSAL_LM), lambda note: None)
    trained = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.arange(96)[None] % 40
    labels = tokens.clone()
    whole = LearnedLoss(model)
    expected = whole(tokens, labels)
    bytes_at_once = LearnedLoss.bytes_at_once
    monkeypatch.setattr(
        LearnedLoss,
        "bytes_at_once",
        lambda self, rows, at_once=None: (1 << 40) if (at_once or rows) > 32 else bytes_at_once(self, rows, at_once),
    )
    with budget(ram="2G", page_dir=tmp_path).resizing():
        loss = LearnedLoss(model)
        noted = BudgetCheck(options_of(tmp_path)).check(loss, trained, tokens, 96)
        assert noted is not None and noted.startswith("the head runs on 32 rows at a time: all 96 take 1.0 TiB at once")
        assert loss.rows_at_once(96) == 32 and torch.equal(loss(tokens, labels), expected)
        with pytest.raises(FinetuneError, match=r"2\.0 GiB is too little.*logits of 48 tokens"):
            BudgetCheck(options_of(tmp_path)).check(LearnedLoss(model, head_rows=48), trained, tokens, 96)


@pytest.mark.slow
def test_numbers_of_rows_that_come_later_are_compared_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model")
    model = load_model(options_of(tmp_path), Task(TaskKind.CAUSAL_LM), lambda note: None)
    tokens = torch.arange(96)[None] % 40
    monkeypatch.setattr(
        LearnedLoss, "bytes_at_once", lambda self, rows, at_once=None: (1 << 40) if (at_once or rows) > 16 else 0
    )
    monkeypatch.setattr(HeadRows, "_has_bits_of_whole", lambda self, blocks: blocks[-1][1] != 64)
    with budget(ram="2G", page_dir=tmp_path).resizing():
        assert BudgetCheck(options_of(tmp_path)).check(LearnedLoss(model), [], tokens, 96, lambda: {96, 32})
        with pytest.raises(FinetuneError, match=r"product of 64 rows has different bits in blocks of 16 rows"):
            BudgetCheck(options_of(tmp_path)).check(LearnedLoss(model), [], tokens, 96, lambda: {96, 64, 32})


@pytest.mark.long
def test_a_budget_that_is_too_small_is_refused_before_the_first_update(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    command = [
        sys.executable, "-m", "port_agent.cli", "finetune", str(model), "--data", str(data), "--out", str(tmp_path / "out"),
        "--ram", "260M", "--page-dir", str(tmp_path), "--json", "--seq-len", "32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.IMPOSSIBLE and not done.stdout and not (tmp_path / "out").exists()
    assert re.search(r"260\.0 MiB is too little: this process takes .* give --ram \d+M, or a shorter", done.stderr)


@pytest.mark.slow
def test_a_budget_that_can_never_suffice_is_refused_before_a_grid_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_model(tmp_path / "model", hidden_size=128), make_data(tmp_path / "data.jsonl")
    asked = replace(options_of(tmp_path, sequence_tokens=32), base=Quantization.NF4)
    monkeypatch.setattr(LearnedLoss, "bytes_at_once", lambda self, rows, at_once=None: (at_once or 0) << 40)
    noted = r"2\.0 GiB is too little: .* the logits of 16 tokens with their loss 16\.0 TiB"
    with budget(ram="2G", page_dir=tmp_path).resizing(), pytest.raises(FinetuneError, match=noted):
        finetune(asked, lambda update: None, lambda note: None)
    assert not (folder / ".port-agent").exists()


@pytest.mark.process
def test_what_passes_the_budget_is_an_error_wherever_it_does_and_nothing_is_lost(tmp_path: Path) -> None:
    make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    command = [sys.executable, "-c", PASSES_ITS_BUDGET, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    noted = done.stdout.splitlines()
    assert re.match(
        r"this process took .* more than 700\.0 MiB; give --ram .*1 of 2 updates, from which the same", noted[0]
    )
    assert noted[1] == "state True out False"
    assert noted[2] == "resumes after 1 of 2 updates" and noted[3] == "update 2"
    assert re.match(rf"this process took .*2 of 2 updates.*{tmp_path}/out is complete nevertheless$", noted[4])
    assert noted[5] == "state True out True"
    assert noted[6:] == ["resumes after 2 of 2 updates", "2 done", "state False out True"]
