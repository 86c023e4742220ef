"""Train less instead of paging: the choice holds against a capture of its own, and what is skipped is not there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.prepare import sparse
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.sparse import SparseJob, StepLimits, train_less
from port_planner import make_bundle
from port_planner.ir.graph import Role
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob, InfeasibleError
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.sparse.bytes import TrainedBytes, trained_parameters
from tests.planner.steps import costs_of

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from port_planner.job import TrainingJob

def loss_fn(model, x, y):
    out = model(x)
    return functional.cross_entropy(out, y), (out.argmax(1) == y).float().mean()

def port_job():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    block = lambda i, o: [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*block(2, 16), *(b for _ in range(DEPTH) for b in block(16, 16)), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    y = torch.randint(0, 4, (96,), generator=g)
    x = torch.randn(96, 2, SIZE, SIZE, generator=g) * 0.5
    x[:, 0, :, : SIZE // 2] += (y % 2).float()[:, None, None]
    x[:, 1, SIZE // 2 :] += (y // 2).float()[:, None, None]
    return TrainingJob(model, loss_fn, torch.optim.Adam(model.parameters(), lr=0.01), [x, y], 16)
"""


def job() -> TrainingJob:
    names: dict[str, Any] = {}
    exec(SCRIPT.replace("SIZE", "16").replace("DEPTH", "1"), names)
    made: TrainingJob = names["port_job"]()
    return made


@pytest.fixture
def without_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators cost nothing but their tensors; profiling them takes a process."""

    def measure(_: MeasurementWorker, graphs: Any, threads: int, compute_watts: float, progress: Any) -> MeasuredCosts:
        return MeasuredCosts(tuple(costs_of(graph).ops for graph in graphs), 0, 0)

    monkeypatch.setattr(MeasurementWorker, "measure", measure)


def train(
    made: TrainingJob,
    full: CapturedJob,
    ram_bytes: int,
    seen: list[float] | None = None,
    **limits: float,
) -> SparseJob:
    device = costs_of(next(iter(full.graphs.values()))).device
    measured = MeasurementWorker().measure(full.graphs.values(), 1, device.compute_watts, lambda stage, share: None)
    return train_less(
        full,
        measured,
        device,
        StepLimits(ram_bytes, **limits),
        prepare=partial(make_bundle.prepare, made),
        threads=1,
        steps=12,
        progress=lambda stage, share: seen.append(share) if seen is not None else None,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_profile")
def test_the_step_fits_without_paging_and_still_learns() -> None:
    made = job()
    full = make_bundle.prepare(made)
    costs = {name: costs_of(graph) for name, graph in full.graphs.items()}
    needed = TrainedBytes(full.graphs, costs)
    names = trained_parameters(full.graphs["step"])
    everything, head = needed(frozenset(names)), needed(frozenset({"4.weight", "4.bias"}))
    assert head < 0.8 * everything
    ram = (everything + head) // 2
    seen: list[float] = []
    found = train(made, full, ram, seen)
    assert found.trained and found.trained < frozenset(names)
    assert seen == sorted(seen) and 0 < seen[0] <= 0.2 and seen[-1] == 1.0
    # what the planner itself says of the captured step
    graph = found.captured.graphs["step"]
    assert lower(graph, costs_of(graph), Plan(), check_budget=False).peak_bytes <= found.needed_bytes <= ram
    updated = {
        graph.storages[s].name for op in graph.ops for s in op.writes if graph.storages[s].role is Role.PARAMETER
    }
    states = {s.name.partition("/")[0] for s in graph.storages if s.role is Role.STATE}
    assert updated == states == found.trained
    assert len(graph.ops) < len(full.graphs["step"].ops)
    assert {name for name, p in made.model.named_parameters() if p.requires_grad} == found.trained
    assert found.reached.loss < found.before.loss
    assert found.reached.metric is not None and found.full_bytes == everything
    assert found.predicted_loss < found.before.loss


@pytest.mark.slow
@pytest.mark.usefixtures("without_profile")
def test_what_cannot_fit_is_refused_with_the_number() -> None:
    made = job()
    full = make_bundle.prepare(made)
    with pytest.raises(InfeasibleError, match=r"the cheapest layer alone needs .* raise --ram to") as caught:
        train(made, full, 20_000)
    assert caught.value.needed_bytes is not None and caught.value.needed_bytes > 20_000


@pytest.mark.slow
@pytest.mark.usefixtures("without_profile")
@pytest.mark.parametrize(
    ("limit", "need", "refusal"),
    [
        ("seconds", TrainedBytes.step_seconds, r"per step, which the deadline allows"),
        ("joules", TrainedBytes.step_joules, r"per step, which --step-joules allows .* forward pass alone takes"),
    ],
)
def test_a_step_that_a_limit_cuts_trains_less(
    limit: str, need: Callable[[TrainedBytes, frozenset[str]], float], refusal: str
) -> None:
    made = job()
    full = make_bundle.prepare(made)
    needed = TrainedBytes(full.graphs, {name: costs_of(graph) for name, graph in full.graphs.items()})
    head = need(needed, frozenset({"4.weight", "4.bias"}))
    limits: dict[str, Any] = {limit: head}
    found = train(made, full, 1 << 30, **limits)
    everything = frozenset(trained_parameters(full.graphs["step"]))
    assert need(needed, found.trained) <= head < need(needed, everything)
    with pytest.raises(InfeasibleError, match=refusal):
        limits[limit] = head / 10
        train(made, full, 1 << 30, **limits)


def test_joules_per_step_need_a_sparse_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    assert main(["plan", str(tmp_path / "train.py"), "--ram", "1G", "--step-joules", "2"]) == 2
    assert "--sparse-update" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("without_profile")
def test_a_count_that_was_too_low_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    full = make_bundle.prepare(made)
    ram = 2 * TrainedBytes(full.graphs, {n: costs_of(g) for n, g in full.graphs.items()})(frozenset())

    class Optimist(TrainedBytes):
        def __call__(self, trained: frozenset[str]) -> int:
            counted = super().__call__(trained)
            return int(0.8 * counted)

    monkeypatch.setattr(sparse, "TrainedBytes", Optimist)
    found = train(made, full, ram)
    assert found.needed_bytes <= ram


@pytest.mark.long
def test_plan_sparse_update_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("SIZE", "96").replace("DEPTH", "5"))

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "port_agent.cli", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)

    plan = ("plan", "train.py", "--strategy", "greedy", "--sparse-update", "--probe-steps", "6", "-o", "job.port")
    done = run(*plan, "--ram", "2G", "--json")
    assert done.returncode == 0, done.stderr
    roomy = json.loads(done.stdout)
    sparse = roomy["sparse_update"]
    ram = int((sparse["full_bytes"] - roomy["base_bytes"]) * 0.75 + roomy["base_bytes"])
    done = run(*plan, "--ram", str(ram), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    tight = facts["sparse_update"]
    assert tight["needed_bytes"] <= ram < tight["full_bytes"] and tight["trained"]
    assert (facts["paged"], facts["recomputed"], facts["sliced_updates"]) == (0, 0, 0)
    assert facts["measured_peak_bytes"] <= ram
    done = run("train", "job.port", "--epochs", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "finished"
    shown = run(*plan, "--ram", "2G")
    assert "predicted" in shown.stdout and "measured" in shown.stdout and "6" in shown.stdout
    refused = run(*plan, "--ram", "150M")
    assert refused.returncode == 2 and "raise --ram to" in refused.stderr
