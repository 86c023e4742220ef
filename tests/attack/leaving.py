"""A large model is stopped in the middle of a step: what is lost, and how long its memory stays in use."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from port_agent.worker.protocol import CheckpointWritten, LeaveNow, StepDone, WorkerReady
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from port_planner.job import TrainingJob
from tests.agent.jobs_small import write_job

WIDTH, LAYERS, BATCH, ROWS = 3536, 8, 8, 64
"""8 x 3536^2 = 100 million weights."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """`done` steps had ended when the worker was told to leave in the middle of the next,
    `resumed` were there afterwards.
    """

    parameters: int
    done: int
    resumed: int
    step_s: float
    leave_s: float
    committed_bytes: int


def large_job() -> TrainingJob:
    """Return a stack of wide layers with AdamW: three times its weights are state that a commit writes."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers)
    data = [torch.randn(ROWS, WIDTH), torch.randint(0, WIDTH, (ROWS,))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return TrainingJob(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, BATCH, seed=1)


def unplug(folder: Path, *, after_steps: int, within_s: float) -> Leaving:
    """Train without checkpoints, stop half-way through a later step, and return where a second run begins."""
    folder.mkdir(parents=True, exist_ok=True)
    job = large_job()
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    write_job(folder / "large.port", job, seeds=(0,))
    del job
    told = TorchOptions(bundle=folder / "large.port", state_dir=folder / "state", epochs=9, checkpoint_every=10**6)
    worker = start_worker(torch_worker(told), limit_bytes=1 << 32)
    done, step_s, began, committed_bytes = 0, 0.0, 0.0, 0
    for event in worker.events():
        if isinstance(event, StepDone):
            done, step_s = event.step, event.wall_s
            if done == after_steps:
                time.sleep(
                    step_s / 4
                )  # into the forward pass, which tells nobody: that is when the machine is unplugged
                began = time.perf_counter()
                worker.send(LeaveNow(within_s=within_s))
        elif isinstance(event, CheckpointWritten):
            committed_bytes = event.bytes
    leave_s = time.perf_counter() - began
    again = start_worker(torch_worker(told), limit_bytes=1 << 32)
    resumed = -1
    for event in again.events():
        if isinstance(event, WorkerReady):
            resumed = event.step
            again.send(LeaveNow())
    return Leaving(parameters, done, resumed, step_s, leave_s, committed_bytes)
