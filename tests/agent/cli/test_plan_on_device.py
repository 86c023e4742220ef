"""plan, show and train of a step that computes on a device: processes of their own, on the simulated one."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import JobKind, JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.policy.decide import ResourceLimits
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.run_state import RunConditions
from port_agent.supervisor.job.runner import Runner
from port_agent.supervisor.job.worker_kinds import WorkerKind, read_training_bundle, torch_environment
from port_agent.system.clock import SystemClock
from port_agent.system.locks import LockFile
from port_agent.worker.worker_options import TORCH_WORKER
from tests.forked import run_forked
from tests.simulated_device import CONTEXT_BYTES, COPY_S, ROUNDING, SHARED_S, UNIFIED, installed

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional
from port_planner.job import TrainingJob

def loss_fn(model, x, y):
    return functional.cross_entropy(model(x), y)

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16384, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = [torch.randn(20, 3, 16, 16), torch.randint(0, 10, (20,))]
    return TrainingJob(model, loss_fn, optimizer, data, 8, eval_data=[c[:6] for c in data])
"""
MIB = 1 << 20
PATIENCE_S = 120.0
TIGHT = 5 * MIB + MIB // 2
"""Of the device's memory: keeping everything takes 7 MiB, context included, the fullest operator 4.5."""


class Agent:
    """The command line in a folder, where processes know the simulated device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**installed(folder / "site"), "OMP_NUM_THREADS": "1"}
        (folder / "train.py").write_text(SCRIPT)

    def run(self, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "port_agent.cli", *words],
            cwd=self.folder,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
        )

    def run_forked(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Do the same in a fork of a process that has loaded what `plan` needs."""
        module = "tests.agent.cli.forked_command"
        return run_forked(module, "main_with_device", *words, folder=self.folder, environment=self.environment)

    def plan(self, *words: str, **more: str) -> dict[str, Any]:
        done = self.run("plan", "train.py", "--strategy", "greedy", "--json", *words, **more)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def digest(self, bundle: str, state: str) -> str:
        done = self.run("train", bundle, "--epochs", "2", "--digest", "--json", "--verify", "2", "--state-dir", state)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout.splitlines()[-1])["digest"])


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    return Agent(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def planned(agent: Agent) -> dict[str, Any]:
    """Plan `sim.port`, and return what is said of it."""
    words = ("--ram", "900M", "--gpu-ram", str(TIGHT), "--recording-gpu-ram", "7M", "--device", "sim")
    return agent.plan(*words, "-o", "sim.port")


@pytest.mark.process
def test_a_step_on_a_device_is_planned_for_both_pools_and_gives_the_numbers_of_plain_pytorch(
    agent: Agent, planned: dict[str, Any]
) -> None:
    facts = planned
    assert (facts["device"], facts["budget_bytes"], facts["device_budget_bytes"]) == ("sim", 900 * MIB, TIGHT)
    assert facts["device_base_bytes"] == CONTEXT_BYTES
    assert facts["measured_device_bytes"] == pytest.approx(facts["device_peak_bytes"], rel=1e-3)
    assert facts["measured_device_bytes"] <= TIGHT and facts["measured_peak_bytes"] <= 900 * MIB
    assert facts["host_page_bytes"] + facts["recompute_seconds"] > 0
    assert facts["compared_steps"] == 2 and facts["compared_tensors"] > 0
    shown = " ".join(agent.run_forked("show", "sim.port").stdout.replace("│", " ").split())
    assert "computes on sim, which has memory of its own" in shown and "5.5 MiB on the device" in shown
    assert "3.0 MiB of it context and libraries" in shown and "device memory over the step's seconds" in shown
    plain = agent.run_forked("plan", "train.py", "--strategy", "greedy", "--ram", "900M", "-o", "cpu.port")
    assert plain.returncode == 0, plain.stderr
    told = agent.run(
        "train", "sim.port", "--epochs", "2", "--digest", "--verify", "2", "--state-dir", "sim.state"
    ).stdout
    assert "5.5 MiB, 5." in told or "of 5.5 MiB" in told
    assert agent.digest("cpu.port", "cpu.state") in told


@pytest.mark.process
def test_a_device_that_turns_out_full_is_a_clean_failure_and_the_smaller_plan(
    agent: Agent, planned: dict[str, Any], tmp_path: Path
) -> None:
    assert planned["device"] == "sim"
    bundle = agent.folder / "sim.port"
    full = {**agent.environment, ROUNDING: str(MIB // 16)}
    kind = WorkerKind(
        TORCH_WORKER, read_training_bundle, lambda facts, plan: {**torch_environment(facts, plan), **full}
    )

    async def run() -> None:
        store, health, changed = JobStore(tmp_path), HealthBoard(), asyncio.Event()
        runner = Runner(
            store,
            Inboxes(tmp_path / "inbox"),
            health,
            SystemClock(),
            {JobKind.TRAIN: kind},
            lambda: LockFile(tmp_path / "worker.lock"),
            changed.set,
        )
        spec = JobSpec("full", "job.port", steps=3)
        number = store.add(spec, 0.0, lambda folder: (shutil.copyfile(bundle, folder / "job.port"), None)[1]).id
        around = RunConditions(ResourceLimits(memory_bytes=2 << 30), 4 << 30, devices=frozenset())
        assert runner.start(store.get(number), around)
        async with asyncio.timeout(PATIENCE_S):
            while runner.job is not None:
                changed.clear()
                await changed.wait()
        job = store.get(number)
        assert (job.state, job.plan) == (JobState.QUEUED, 1), job
        assert "ran out of memory: sim:" in job.reason and "next with a smaller plan" in job.reason
        assert job.memory_ceiling_bytes == 900 * MIB + TIGHT and health.holds("out-of-memory", str(number))

    asyncio.run(run())


@pytest.mark.long
def test_one_budget_is_for_all_where_memory_is_shared(agent: Agent) -> None:
    unified = {UNIFIED: "1"}
    facts = agent.plan("--ram", "900M", "--device", "sim", "-o", "unified.port", **unified)
    assert (facts["device"], facts["device_budget_bytes"], facts["host_page_bytes"]) == ("sim", 0, 0)
    assert CONTEXT_BYTES < facts["measured_peak_bytes"] <= 900 * MIB
    asked = ["plan", "train.py", "--ram", "900M", "--device", "sim", "--gpu-ram", "9M"]
    refused = agent.run(*asked, **unified)
    assert refused.returncode != 0 and "shares the host's memory; --ram covers all of it" in refused.stderr


@pytest.mark.long
def test_what_is_trained_is_chosen_on_the_device(agent: Agent) -> None:
    words = ("--ram", "900M", "--sparse-update", "--probe-steps", "2")
    there = agent.plan(*words, "--gpu-ram", "9M", "--device", "sim", "-o", "less.port")["sparse_update"]
    here = agent.plan(*words, "-o", "less_cpu.port")["sparse_update"]
    assert there["trained"] == here["trained"] and there["measured"] == here["measured"]
    assert there["needed_bytes"] < 9 * MIB < here["needed_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("copies_slow", [True, False])
def test_pages_take_the_way_that_was_measured_to_be_faster(agent: Agent, copies_slow: bool) -> None:
    slow = {COPY_S: "0.02"} if copies_slow else {COPY_S: "0.001", SHARED_S: "0.02"}
    name = f"ways{int(copies_slow)}"
    more = {UNIFIED: "1", **slow}
    facts = agent.plan("--ram", "900M", "--device", "sim", "-o", f"{name}.port", **more)
    assert facts["shares_pages"] is copies_slow
    shown = " ".join(agent.run("show", f"{name}.port", **more).stdout.replace("│", " ").split())
    assert ("pages are used in place" in shown) is copies_slow


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "sim"], "sim, which has memory of its own; give"),
        pytest.param(["--device", "tpu"], "this agent computes on cpu, cuda, mps, sim", marks=pytest.mark.long),
        (["--device", "sim", "--gpu-ram", "4M", "--recording-gpu-ram", "7M"], "raise --gpu-ram to at least 4634K"),
        (
            ["--device", "sim", "--gpu-ram", str(TIGHT)],
            "2.5 MiB besides 3.0 MiB of context and libraries: let planning alone",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(agent: Agent, words: list[str], said: str) -> None:
    done = agent.run_forked("plan", "train.py", "--ram", "900M", "-o", "never.port", *words)
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (agent.folder / "never.port").exists()


def test_the_gpu_of_a_board_that_is_not_at_hand_is_refused(agent: Agent, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(agent.folder / "train.py")
    assert main(["plan", script, "--ram", "900M", "--device", "cuda", "--board", "pi4"]) == 2
    assert "--board: nothing is known about the GPU of a board" in capsys.readouterr().err
