"""A small script, planned and trained as a user does it: by the command line, in a directory."""

import os
import subprocess
import sys
from pathlib import Path

from tests.torch_forks import forks

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
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = [torch.randn(20, 3, 16, 16), torch.randint(0, 10, (20,))]
    return TrainingJob(model, loss_fn, optimizer, data, 8, eval_data=[c[:6] for c in data])
"""


def command(*words: str, safe_path: bool = False) -> list[str]:
    return [sys.executable, *(["-P"] if safe_path else []), "-m", "port_agent.cli", *words]


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, env=environment)


def run_forked(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a fork of a process that has loaded torch, and what it starts in forks, too."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with forks(nested=True):
        return subprocess.run(command(*words, safe_path=True), cwd=folder, capture_output=True, text=True, env=own)
