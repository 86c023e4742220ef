"""Jobs judged by the commands that a user types, each in its own process.

A script makes the job. A loop that shares no code with the planner (`plain_job`) trains it, and so do `port-agent plan`
and `port-agent train`. Losses, the result's file and the checksum over weights and optimizer state are compared.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks.follow_zoo.compare import Outcome, Verdict

ROOT = Path(__file__).parents[2]
SCRIPT = """from benchmarks.follow_zoo.named_jobs import begun


def port_job():
    return begun({name!r})
"""
RAM = "2G"
LENGTHS = {"stranger_jobs": (44, 8), "jobs": (20, 8), "bundles": (12, 2)}
"""The number of batches to train and of epochs to plan for, by kind of job."""


@dataclass(frozen=True, slots=True)
class CommandCase:
    """A job by name, made by `script`; trained for `steps` batches of its `epochs`.

    Without `script`: one of the tables'.
    """

    name: str
    steps: int = 44
    epochs: int = 8
    script: str = ""

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Judge the job; `at` receives the current stage."""
        with tempfile.TemporaryDirectory(prefix="zoo-commands-") as folder:
            script = Path(folder) / "train.py"
            script.write_text(self.script or SCRIPT.format(name=self.name))
            return _judged(self, script, at)


def _judged(case: CommandCase, script: Path, at: Callable[[str], object]) -> Outcome:
    folder = script.parent
    at("plain")
    plain = _plainly(case, script, folder / "plain")
    if plain.returncode:
        return Outcome(case.name, Verdict.NOT_ELIGIBLE, f"plain PyTorch ends with {_last_line(plain)}")
    at("plan")
    planned = _port_agent(
        script, "plan", "train.py", "--ram", RAM, "--threads", "1", "--epochs", str(case.epochs),
        "--time-limit", "1", "-o", "job.port", "--json",
    )  # fmt: skip
    if planned.returncode:
        return _refusal(case, planned, "plan")
    at("train")
    trained = _port_agent(
        script, "train", "job.port", "--steps", str(case.steps), "--out", "out.safetensors", "--digest", "--json"
    )
    if trained.returncode:
        return _refusal(case, trained, "train")
    events = [json.loads(line) for line in trained.stdout.splitlines() if line.startswith("{")]
    other = _difference(torch.load(folder / "plain"), events, folder)
    if not other:
        report = json.loads(planned.stdout.strip().splitlines()[-1])
        written = int(report["written_bytes"])
        return Outcome(
            case.name, Verdict.EQUAL, read_bytes=int(report["read_bytes"]), written_bytes=written, settings=(RAM,)
        )
    at("plain")
    again = _plainly(case, script, folder / "again")
    if again.returncode or _differs(torch.load(folder / "plain"), torch.load(folder / "again")):
        return Outcome(case.name, Verdict.NOT_ELIGIBLE, "differs from itself")
    return Outcome(case.name, Verdict.DIFFERS, other, RAM)


def _refusal(case: CommandCase, ended: "subprocess.CompletedProcess[str]", command: str) -> Outcome:
    """Return a command's message; a command that ends in a traceback, or without a message, has failed."""
    said = ended.stderr.strip()
    refused = said.startswith("port-agent:") and "Traceback" not in said
    detail = " ".join(said.removeprefix("port-agent:").split()) if refused else _last_line(ended)
    return Outcome(case.name, Verdict.REFUSED if refused else Verdict.FAILED, detail, command)


def _difference(plain: dict[str, Any], events: list[dict[str, Any]], folder: Path) -> str:
    """Return the first difference between the results of plain PyTorch and of a bundle, or ""."""
    from safetensors.torch import load_file

    from port_planner.ir.bundle.bundle import read_manifest

    losses = [float(event["loss"]).hex() for event in events if event["event"] == "step"]
    if wrong := [i + 1 for i, pair in enumerate(zip(plain["losses"], losses, strict=False)) if len(set(pair)) > 1]:
        return f"{len(wrong)} of {len(losses)} losses, the first in step {wrong[0]}"
    if len(losses) != len(plain["losses"]):
        return f"{len(losses)} losses instead of {len(plain['losses'])}"
    tensors, result = plain["tensors"], load_file(folder / "out.safetensors")
    model = {name.partition("/")[2]: value for name, value in tensors.items() if not name.startswith("state/")}
    if wrong_names := [name for name, value in result.items() if _digest(value) != _digest(model.get(name))]:
        return f"{len(wrong_names)} of {len(result)} tensors of the result, such as {wrong_names[0]}"
    there = {_digest(value) for value in result.values()}
    if missing := [name for name in plain["names"] if name in model and _digest(model[name]) not in there]:
        return f"the result lacks {', '.join(missing[:3])}"
    keys = sorted(read_manifest(folder / "job.port").state)
    if tensors.keys() >= {*keys}:
        total = xxhash.xxh3_128()
        for key in keys:
            total.update(key.encode())
            total.update(_bits(tensors[key]))
        if total.hexdigest() != events[-1].get("digest"):
            return "the checksum over weights and optimizer state"
    return ""


def _differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    digests = ({name: _digest(value) for name, value in found["tensors"].items()} for found in (one, other))
    return one["losses"] != other["losses"] or len({tuple(sorted(found.items())) for found in digests}) > 1


def _digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return ""
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(_bits(tensor))}"


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _plainly(case: CommandCase, script: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    return _run(script, sys.executable, "-m", "benchmarks.follow_zoo.plain_job", script.name, str(case.steps), str(out))


def _port_agent(script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return _run(script, str(Path(sys.executable).with_name("port-agent")), *arguments)


def _run(script: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)


def _last_line(ended: "subprocess.CompletedProcess[str]") -> str:
    lines = ended.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {ended.returncode}"
