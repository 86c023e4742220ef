"""A script runs alone from the same start as its bundle, and where it cannot, the bundle says why."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from port_agent.prepare.referee import plain_run
from port_agent.prepare.referee.plain_run import Script, run_alone
from port_planner.base.errors import CaptureError
from port_planner.job_sources import load_job
from port_planner.make_bundle import CapturedJob, prepare
from port_planner.plain_steps import plain_losses
from port_planner.script_loading import imports_kept
from tests.agent.jobs_small import make_job
from tests.planner.own_optimizers import OwnAdamW

SCRIPT = """
import random
import numpy
import torch
from torch import nn
from port_planner.job import TrainingJob
import beside_the_script

def port_job():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    nn.init.constant_(model[2].bias, {start})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    data = [torch.randn(22, 6), torch.randint(0, 4, (22,))]
    return TrainingJob(model, nn.CrossEntropyLoss(), optimizer, data, 4, scheduler=scheduler)
"""

LATE_SCRIPT = SCRIPT.replace("nn.CrossEntropyLoss()", "loss").replace(
    "def port_job():",
    """
import io
lines = io.StringIO()

def loss(model, x, y):
    lines.write(".")
    found = nn.functional.cross_entropy(model(x), y)
    {check}
    return found * (0.5 if lines.tell() > 30 else 1.0)

def port_job():""",
)


def captured_of(folder: Path, text: str) -> tuple[CapturedJob, Script]:
    (folder / "train.py").write_text(text)
    (folder / "beside_the_script.py").touch()
    with imports_kept():
        captured = prepare(load_job(folder / "train.py"), updates=12)
    return captured, Script(folder / "train.py", folder, 1 << 30, torch.get_num_threads(), 0)


@pytest.mark.process
@pytest.mark.slow
def test_a_script_runs_alone_from_the_same_start_though_it_seeds_nothing(tmp_path: Path) -> None:
    captured, script = captured_of(tmp_path, SCRIPT.format(start="random.random() + numpy.random.rand()"))
    found = run_alone(captured, script)
    assert (found.unchecked, found.rows) == ("", (10,))
    assert found.updates > 6, "the schedule's first change is within"
    columns = [column[:10] for column in captured.data]
    assert [float.fromhex(loss) for loss in found.results.losses] == list(
        plain_losses(captured.job, columns, found.updates)
    )
    assert {key.partition("/")[0] for key in found.results.checksums} == {"parameter", "state"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("check", ["", "if not torch.isfinite(found): raise ArithmeticError"])
def test_what_a_script_does_otherwise_after_the_updates_that_are_compared_is_refused_by_line(
    check: str, tmp_path: Path
) -> None:
    """What it reads in Python, and a bundle compares in each step, is known without contents."""
    captured, script = captured_of(tmp_path, LATE_SCRIPT.format(start="1", check=check))
    assert run_alone(captured, replace(script, updates=28)).unchanged > 0
    refused = r"update \d+: train\.py:\d+: aten\.mul\.Tensor is called with 0\.5 instead of 1\.0, where a bundle would"
    with pytest.raises(CaptureError, match=refused):
        run_alone(captured, replace(script, updates=40))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            SCRIPT.format(start="__import__('time').time() % 1"),
            "initializes parameter/2.bias differently each time .*; seed",
        ),
        (SCRIPT.format(start="open('once').read() or 1"), "the script alone ended with exit code .*once"),
    ],
)
def test_what_cannot_be_run_alone_says_why(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once").touch()
    captured, script = captured_of(tmp_path, text)
    (tmp_path / "once").unlink()
    assert re.search(reason, run_alone(captured, script).unchecked)


@pytest.mark.slow
def test_other_numbers_that_were_asked_for_are_no_scripts() -> None:
    captured = replace(prepare(make_job()), reordered=("aten::index_add",))
    assert "different order" in run_alone(captured, Script(Path(), Path(), 0, 1, 0)).unchecked


@pytest.mark.slow
def test_no_more_updates_are_compared_than_a_bundle_has_numbers_for() -> None:
    job = make_job()
    counting = replace(job, optimizer=OwnAdamW(job.model.parameters()), scheduler=None)
    assert [plain_run._known_updates(prepare(counting, updates=updates)) for updates in (7, 99)] == [7, 24]
