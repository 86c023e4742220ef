"""A job that outgrows its plan, in the real torch worker: its next run takes a smaller plan."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import JobKind, JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.plan_choice import PlanFigures
from port_agent.supervisor.job.runner import Runner
from port_agent.supervisor.job.worker_kinds import BundleFacts, WorkerKind, torch_environment
from port_agent.system.clock import SystemClock
from port_agent.system.locks import LockFile
from port_agent.worker.worker_options import TORCH_WORKER
from port_planner.job import TrainingJob
from tests.agent.jobs_small import write_job
from tests.agent.live_daemon import go
from tests.agent.supervisor.job.running_job import PATIENCE_S, ROOMY

pytestmark = pytest.mark.process

MIB = 1 << 20
WIDE = 16_000_000
"""Numbers a row: four rows in float32 are 256 MB, and the step needs them more than once."""


def wide_loss(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).mean(1, keepdim=True).expand(-1, WIDE).exp().mean()


def write_hungry_bundle(path: Path) -> None:
    """Write a job whose step takes more than the plans that `outgrown` tells of."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    write_job(path, TrainingJob(model, wide_loss, optimizer, [torch.randn(4, 8)], 4, seed=1), seeds=(0,))


def outgrown(bundle: Path) -> BundleFacts:
    """Return plans that are smaller than what the step really takes."""
    return BundleFacts((PlanFigures(0, 64 * MIB, 1.0, 1.0), PlanFigures(1, 32 * MIB, 2.0, 2.0)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs RLIMIT_DATA that counts private memory")
@go
async def test_the_next_run_takes_a_smaller_plan(tmp_path: Path) -> None:
    store, health, changed = JobStore(tmp_path), HealthBoard(), asyncio.Event()
    kinds = {JobKind.TRAIN: WorkerKind(TORCH_WORKER, outgrown, torch_environment)}
    lock = tmp_path / "worker.lock"
    runner = Runner(
        store, Inboxes(tmp_path / "inbox"), health, SystemClock(), kinds, lambda: LockFile(lock), changed.set
    )
    spec = JobSpec("hungry", "job.port", steps=3)
    number = store.add(spec, 0.0, lambda folder: write_hungry_bundle(folder / "job.port")).id
    assert runner.start(store.get(number), ROOMY)
    async with asyncio.timeout(PATIENCE_S):
        while runner.job is not None:
            changed.clear()
            await changed.wait()
    job = store.get(number)
    assert (job.state, job.plan, job.memory_ceiling_bytes) == (JobState.QUEUED, 1, 64 * MIB), job
    assert "ran out of memory" in job.reason and "next with a smaller plan" in job.reason
    assert health.holds("out-of-memory", str(number))
