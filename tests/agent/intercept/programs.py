"""Run programs plain and through `port-agent exec`, and compare what can be seen of them."""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.forked import run_forked

SCRIPTS = Path(__file__).parent / "scripts"
EVERYTHING_LEAVES = ("--tensors", "4K")
OURS = "port-agent: "

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(16, 300)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""
"""A program that trains three steps and prints the bits of its losses."""


@dataclass(frozen=True)
class RunEnd:
    """How a program ended. `said` is its standard error without our lines, `ours` are those."""

    code: int
    output: str
    said: str
    ours: list[str]


def plain(*words: str, folder: Path, **options: Any) -> RunEnd:
    """Run `python WORDS`."""
    return _run([sys.executable, *words], folder, **options)


def computed(*words: str, folder: Path) -> RunEnd:
    """Run `python WORDS` for what it computes: in a fork, as a process loads torch for
    longer than such programs take.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_forked("tests.agent.intercept.program", "main", *words, folder=folder, environment=environment)
    return RunEnd(done.returncode, done.stdout, done.stderr, [])


def followed(*words: str, folder: Path, bound: tuple[str, ...] = EVERYTHING_LEAVES, **options: Any) -> RunEnd:
    """Run `port-agent exec -- WORDS`."""
    return _run([*exec_words(bound, folder), *words], folder, **options)


def exec_words(bound: tuple[str, ...], folder: Path) -> list[str]:
    """Return the words before the program's own; pages are kept in `folder`, which is on a disk in tests, too."""
    return [sys.executable, "-P", "-m", "port_agent.cli", "exec", "--page-dir", str(folder), *bound, "--"]


@cache
def process_mib() -> int:
    """Return what a followed process takes at its peak without tensors: a CUDA build of torch takes 300 MiB more."""
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), "import torch; torch.ones(8, 8) @ torch.ones(8, 8)")
        (line,) = followed("train.py", folder=Path(folder), bound=("--tensors", "1G")).ours
    return int(float(re.search(r"peak ([\d.]+) MiB", line)[1]))  # type: ignore[index]


def beside_process(mib: int) -> tuple[str, str]:
    """Return the option of a budget that leaves `mib` MiB beside the process itself."""
    return "--ram", f"{process_mib() + mib}M"


def _run(
    command: list[str],
    folder: Path,
    *,
    given: str = "",
    environment: dict[str, str] | None = None,
    timeout_s: float = 600,
) -> RunEnd:
    done = subprocess.run(
        command,
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    lines = done.stderr.splitlines()
    theirs = [line for line in lines if not line.startswith(OURS)]
    ours = [line for line in lines if line.startswith(OURS)]
    return RunEnd(done.returncode, done.stdout, "\n".join(theirs), ours)


def report_of(path: Path) -> dict[str, Any]:
    """Return what `--report` wrote."""
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    """Return a program in a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
