"""`plan --place`: operators divided between the CPU and the simulated device, in processes of their
own, as a user would have it.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from port_agent.cli import main
from port_planner.base.cache import read_cached, write_cached
from port_planner.profiling import kept_costs
from tests.simulated_device import NAME, OWN_BITS, installed

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from port_planner.job import TrainingJob

def loss_fn(model, x, y):
    return functional.cross_entropy(model(x), y)

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(4096, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = [torch.randn(20, 3, 16, 16), torch.randint(0, 10, (20,))]
    return TrainingJob(model, loss_fn, optimizer, data, 8, eval_data=[c[:6] for c in data])
"""
MIB = 1 << 20
PLACED = ("plan", "train.py", "--ram", "900M", "--gpu-ram", "12M", "--place", NAME, "--strategy", "greedy")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--place", "cpu"], "between the CPU and one other device"),
        (["--place", "cuda", "--device", "mps"], "between the CPU and one other device"),
        (["--place", "cpu:1,cpu:2", "--board", "pi5"], "--board and --place cpu: cannot be combined"),
    ],
)
def test_what_does_not_go_with_it_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["plan", str(script), "--ram", "900M", *words]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_a_step_is_divided_trained_twice_alike_and_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    cache = tmp_path / "cache"
    own = {"OMP_NUM_THREADS": "1", OWN_BITS: "1", "XDG_CACHE_HOME": str(cache)}
    environment = {**installed(tmp_path / "site"), **own}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "port_agent.cli", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    alone = run(*PLACED, "-o", "never.port")
    assert alone.returncode == 2 and "that saves time was found" in alone.stderr, (
        "what the CPU computes for it, it computes faster itself"
    )
    _divide_the_costs(cache / "port-agent" / "operators")
    done = run(*PLACED, "--json", "-o", "placed.port")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert all(count > 0 for count in facts["placed"]["operators"].values()) and facts["placed"]["transfers"] > 0
    assert facts["compared_steps"] == 2 and facts["measured_device_bytes"] <= 12 * MIB
    assert facts["measured_device_bytes"] == pytest.approx(facts["device_peak_bytes"], rel=0.03)
    assert facts["measured_peak_bytes"] == pytest.approx(facts["planned_peak_bytes"], rel=0.03)
    training = ("train", "placed.port", "--epochs", "2", "--digest", "--json", "--verify", "2", "--state-dir")
    first, second = (json.loads(run(*training, state).stdout.splitlines()[-1]) for state in ("first", "second"))
    assert first["digest"] == second["digest"]
    shown = " ".join(run("show", "placed.port").stdout.replace("│", " ").split())
    assert "operators on sim" in shown and "plain PyTorch gives them on neither" in shown
    assert "steps with those of its operators run one at a time on sim" in shown
    sums = json.loads(run("profile", "--ops", "placed.port", "--json").stdout)
    assert {one["device"] for one in sums} == {"cpu", NAME} and "transfer" in {one["name"] for one in sums}
    assert any(one["elsewhere_seconds"] for one in sums)


def _divide_the_costs(folder: Path) -> None:
    """Let operators that were measured on the device, last and after the longest pause, take next to
    no time or a second each.

    All take longer than any transfer on the CPU.
    """
    for path in folder.iterdir():
        kept = read_cached(folder, path.name, dict[str, kept_costs.KeptCost]) or {}
        moments = sorted(cost.measured_at for cost in kept.values())
        _, begin = max((b - a, b) for a, b in itertools.pairwise(moments))
        seconds = {
            key: 0.01 if cost.measured_at < begin else 1e-7 if key[0] in "02468ace" else 1.0
            for key, cost in kept.items()
        }
        changed = {key: msgspec.structs.replace(cost, seconds=seconds[key]) for key, cost in kept.items()}
        write_cached(folder, path.name, changed, max_files=kept_costs.MAX_FILES)


@pytest.mark.long
def test_what_is_trained_is_chosen_and_then_divided(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "cache" / "port-agent" / "operators"
    environment = {
        **installed(tmp_path / "site"),
        "OMP_NUM_THREADS": "1",
        OWN_BITS: "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "port_agent.cli", *words, "--sparse-update", "--probe-steps", "2", "--json"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    def kept() -> dict[Path, dict[str, kept_costs.KeptCost]]:
        return {p: read_cached(folder, p.name, dict[str, kept_costs.KeptCost]) or {} for p in folder.iterdir()}

    alone = run("plan", "train.py", "--ram", "900M", "--strategy", "greedy", "-o", "alone.port")
    assert alone.returncode == 0, alone.stderr
    on_cpu = {key for costs in kept().values() for key in costs}
    run(*PLACED, "-o", "never.port")
    for path, costs in kept().items():
        seconds = {key: 0.01 if key in on_cpu else 1e-7 if key[0] in "02468ace" else 1.0 for key in costs}
        changed = {key: msgspec.structs.replace(cost, seconds=seconds[key]) for key, cost in costs.items()}
        write_cached(folder, path.name, changed, max_files=kept_costs.MAX_FILES)
    done = run(*PLACED, "-o", "placed.port")
    assert done.returncode == 0, done.stderr
    facts, facts_alone = (json.loads(one.stdout) for one in (done, alone))
    assert facts["sparse_update"]["trained"] == facts_alone["sparse_update"]["trained"]
    assert all(count > 0 for count in facts["placed"]["operators"].values()) and facts["compared_steps"] == 2


@pytest.mark.long
def test_operators_are_divided_among_threads_trained_twice_alike_and_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    cache = tmp_path / "cache"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "port_agent.cli", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    words = (
        "plan",
        "train.py",
        "--ram",
        "900M",
        "--place",
        "cpu:1,cpu:2",
        "--strategy",
        "greedy",
        "--json",
        "-o",
        "t.port",
    )
    run(*words)
    _divide_the_threads(cache / "port-agent" / "operators")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    placed = json.loads(done.stdout)["placed"]
    assert (
        placed["teams"] and set(placed["operators"]) == {"1 thread", "2 threads"} and all(placed["operators"].values())
    )
    training = ("train", "t.port", "--epochs", "2", "--digest", "--json", "--verify", "2", "--state-dir")
    first, second = (json.loads(run(*training, state).stdout.splitlines()[-1]) for state in ("first", "second"))
    assert first["digest"] == second["digest"]
    shown = " ".join(run("show", "t.port").stdout.replace("│", " ").split())
    assert "of each operator with its threads" in shown and "No operator runs in tiles" in shown


def _divide_the_threads(folder: Path) -> None:
    """Let operators take a tenth of a second with one number of threads and a hundredth with the
    other, half of them each way.
    """
    for number, path in enumerate(sorted(folder.iterdir())):
        kept = read_cached(folder, path.name, dict[str, kept_costs.KeptCost]) or {}
        seconds = {key: 0.1 if (key[0] in "02468ace") == bool(number) else 0.01 for key in kept}
        changed = {key: msgspec.structs.replace(cost, seconds=seconds[key]) for key, cost in kept.items()}
        write_cached(folder, path.name, changed, max_files=kept_costs.MAX_FILES)
