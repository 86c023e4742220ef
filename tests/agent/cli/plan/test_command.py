"""`plan` as a user runs it: what it writes, and what it refuses in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.system.checksum import bytes_checksum
from tests.agent.cli.plan.small_script import SCRIPT, run, run_forked
from tests.agent.paired_agents import history, paired_agents
from tests.their_modules import KINDS, NAMES, fill_with_modules, seen_by_plain_python, their_script, what_it_sees


@pytest.mark.process
def test_plan_writes_its_model_where_asked(planned: tuple[Path, dict[str, Any]]) -> None:
    text = (planned[0] / "model.lp").read_text()
    assert text.startswith("\\ The planning model of a step") and "eq7_total_stall" in text


@pytest.mark.process
def test_pruning_is_planned_with_the_job_and_wrong_shares_are_refused(planned: tuple[Path, dict[str, Any]]) -> None:
    assert planned[1]["pruning"] is None
    wrong = run_forked(planned[0], "plan", "train.py", "--ram", "700M", "-o", "no.port", "--prune", "1.5")
    assert (
        wrong.returncode != 0
        and "the share must be above 0 and at most 0.99" in wrong.stderr
        and "Traceback" not in wrong.stderr
    )


@pytest.mark.process
def test_a_budget_below_the_possible(planned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_forked(tmp_path, "plan", "train.py", "--ram", "20M", "-o", "job.port", "--strategy", "greedy")
    assert done.returncode == 2
    assert "raise" in done.stderr and "iB" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("__")] == ["train.py"], "nothing is left behind"


RECURRENT = """
import torch
from torch import nn
from port_planner.job import TrainingJob

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(96, 160, 2, batch_first=True), nn.Linear(160, 10)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])

def port_job():
    torch.manual_seed(0)
    model = Model()
    data = [torch.randn(40, 48, 96), torch.randint(0, 10, (40,))]
    return TrainingJob(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), data, 16, clip_grad_norm=1.0)
"""

WIDE = SCRIPT.replace("8, 3, padding=1), nn.BatchNorm2d(8)", "96, 3, padding=1), nn.BatchNorm2d(96)").replace(
    "2048", "24576"
)


TIED = """
import torch
from torch import nn
from torch.nn import functional
from port_planner.job import TrainingJob

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(6000, 96), nn.LayerNorm(96), nn.Linear(96, 6000, bias=False)
        self.mixed, self.layer = nn.Linear(96, 288), nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
        self.head.weight = self.words.weight

    def forward(self, x):
        words = self.words(x)
        words = words + functional.scaled_dot_product_attention(*self.mixed(words).chunk(3, -1), is_causal=True)
        return self.head(self.norm(words + self.layer(words)))

def loss_fn(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2

def port_job():
    torch.manual_seed(0)
    model = Model()
    data = [torch.randint(0, 6000, (32, 128)) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainingJob(model, loss_fn, optimizer, data, 8, eval_data=[c[:8] for c in data], accumulate=2, clip_grad_norm=1.0)
"""

OWN_OPTIMIZER = RECURRENT.replace("torch.optim.AdamW(", "Own(").replace(
    "class Model",
    """class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.sub_(mean.mul_(0.9).add_(p.grad).sign(), alpha=self.param_groups[0]["lr"])

class Model""",
)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ram"),
    [(SCRIPT, "20M"), (RECURRENT, "170M"), (WIDE, "185M"), (TIED, "20M"), (OWN_OPTIMIZER, "20M")],
)
def test_the_budget_that_a_refusal_names_is_taken(script: str, ram: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    words = ("plan", "train.py", "-o", "job.port", "--strategy", "greedy", "--ram")
    refused = run(tmp_path, *words, ram)
    named = re.search(r"raise --ram to (\d+M), within which a trial of it kept", refused.stderr)
    assert refused.returncode == 2 and named is not None, refused.stderr
    taken = run(tmp_path, *words, named[1])
    assert taken.returncode == 0, f"{named[0]}, and there: {taken.stderr}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("x = 1", "port_job", marks=pytest.mark.long),
        ("def port_job():\n    return 5", "returned int"),
        ("def port_job(:", "SyntaxError|invalid syntax"),
        pytest.param("import nothing_of_this_name", "nothing_of_this_name", marks=pytest.mark.long),
    ],
)
def test_scripts_that_describe_no_job(content: str, message: str, tmp_path: Path) -> None:
    """One of each kind of error each time; `tests/planner/test_job_sources.py` has them all, without a process each."""
    (tmp_path / "train.py").write_text(content)
    done = run_forked(tmp_path, "plan", "train.py", "--ram", "700M")
    assert done.returncode != 0 and re.search(message, done.stderr)
    assert not list(tmp_path.glob("*.port"))


@pytest.mark.parametrize("words", [("plan", "none.py", "--ram", "1G"), ("show", "none.port"), ("train", "none.port")])
def test_files_that_do_not_exist(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "No such file or directory; name an existing file" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("words", [("plan", "train.py", "--ram", "700M", "-o", "no.port"), ("train", "job.port")])
def test_more_cores_than_there_are(
    words: tuple[str, ...],
    planned: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(planned[0])
    assert main([*words, "--cpus", "9999"]) == 2
    assert "--cpus 9999: this process has " in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_finds_the_modules_that_plain_python_finds(name: str, kind: str, tmp_path: Path) -> None:
    script = their_script(tmp_path, name, kind)
    expected = seen_by_plain_python(script)
    done = run_forked(script.parent, "plan", script.name, "--ram", "700M")
    assert f"port_job() in {script.name} returned int" in done.stderr
    assert what_it_sees(tmp_path) == expected


@pytest.mark.process
def test_a_plan_is_made_beside_modules_that_are_called_as_ours(tmp_path: Path) -> None:
    fill_with_modules(tmp_path, "MINE = True\n")
    (tmp_path / "planner.py").write_text(
        f"import http, rich, msgspec, agent\nhttp.MINE, rich.MINE, msgspec.MINE\n{SCRIPT}"
    )
    words = ("plan", "planner.py", "--ram", "700M", "--time-limit", "2s")
    command = [str(Path(sys.executable).with_name("port-agent")), *words]  # a process of its own, which begins again
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "planner.port").is_file()


def peered(folder: Path, runtime_dir: Path, *words: str) -> dict[str, Any]:
    """Plan with the agent in `runtime_dir`, costs kept in a cache of this folder's own; returns what `plan` says."""
    asked = ("--ram", "700M", "--time-limit", "4s", "--verify", "0", "--runtime-dir", str(runtime_dir), "--json")
    done = run_forked(folder, "plan", "train.py", *asked, *words, XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.process
def test_planning_with_paired_devices(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
    with paired_agents(tmp_path, "share = true\nsolve = true", "share = true") as (attic, cellar):
        runs = attic.path.parent, cellar.path.parent
        refused = peered(tmp_path / "one", runs[0], "--solve-on", "cellar")["peers"]
        assert any(line.startswith("solved here: cellar: it solves for no other device") for line in refused)
        told = peered(tmp_path / "two", runs[1], "--solve-on", "any")["peers"]
        assert any("solved on attic" in line or "a plan of attic for the same step" in line for line in told), told
        assert any("operators from attic, a sample of them measured here too" in line for line in told), told


@pytest.mark.long  # `prepare/test_peer_plans.py` has all kinds of wrong answers, `control/test_peer_exchange.py` who is told
def test_a_wrong_plan_of_a_paired_device(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
    with paired_agents(tmp_path, "share = true\nsolve = true", "share = true") as (attic, cellar):
        peered(tmp_path / "one", attic.path.parent)
        for file in (tmp_path / "attic/state/shared/plan").iterdir():
            content = b"\x80\x04K\x01."
            file.write_bytes(bytes_checksum(content).encode() + b"\n" + content)
        told = peered(tmp_path / "two", cellar.path.parent)["peers"]
        assert any(line.startswith("attic gave a wrong answer and is temporarily blocked: no plan") for line in told), (
            told
        )
        assert "attic: blocked for 5 minutes: not a plan (5 bytes)" in history(cellar)
