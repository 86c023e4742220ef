"""`make demo`: one training script in a quarter of plain PyTorch's memory, twice, and proof that it is the same.

examples/shakespeare/train.py, as it is: with plain Python, then through `port-agent exec`; then planned as a bundle and
trained by the worker that devices run. The report compares memory, losses, checkpoints byte for byte, and a checksum
over all weights and optimizer state.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.plain import digest
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.job_sources import load_job

SCRIPT = Path(__file__).parent / "shakespeare" / "train.py"
RAM, STEPS, VERIFY = "380M", 12, 2
BUDGET_MARGIN = 1.05
"""What a followed process may take above its budget before the demo fails: one operator's output."""


@dataclass(frozen=True)
class ScriptRun:
    """One run of the script."""

    losses: list[float]
    checkpoint: bytes
    peak_bytes: int
    cpu_s: float
    wall_s: float


def main() -> int:
    """Run the demo; the exit code is 0 only if the numbers are equal and the budgets held."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="port-demo-", dir=disk()) as name:
        folder = Path(name)
        bundle, out = folder / "shakespeare.port", folder / "checkpoint.pt"
        words = [str(SCRIPT), "--steps", str(STEPS), "--out", str(out)]
        console.print(f"[bold]1. Plain PyTorch[/]: python {SCRIPT.parent.name}/train.py")
        plain = run_script([sys.executable, *words], out)
        plain_checkpoint = out.rename(folder / "plain.pt")
        console.print(
            f"[bold]2. The same script, unchanged[/]: port-agent exec --ram {RAM} -- {SCRIPT.parent.name}/train.py"
        )
        command = [sys.executable, "-m", "port_agent.cli", "exec", "--ram", RAM, "--page-dir", name, "--", *words]
        followed = run_script(command, out)
        console.print(f"[bold]3. A bundle[/] for devices: plan for {RAM} (capture, profile, plan, trial), then train")
        port_agent(
            "plan", str(SCRIPT), "--ram", RAM, "-o", str(bundle), "--page-dir", name, "--epochs", "2",
            "--verify", str(VERIFY), "--medium", "sd", "--threads", "1",  # as the script itself: bits are those of one number
        )  # fmt: skip
        port_agent("show", str(bundle))
        ours = train(bundle, folder)
        return report(console, plain, followed, ours, plain_digest(bundle, plain_checkpoint))


def disk() -> str | None:
    """Return a folder on a disk for pages where the temporary one may be in RAM."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else None


def run_script(command: list[str], out: Path) -> ScriptRun:
    """Run the script with a progress bar and return what it did."""
    losses = []
    begin = time.perf_counter()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process,
        Progress(console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("training", total=STEPS)
        for line in process.stdout or ():
            losses.append(float(line.split()[-1]))
            bar.advance(task)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return ScriptRun(losses, out.read_bytes(), peak, usage.ru_utime + usage.ru_stime, time.perf_counter() - begin)


def plain_digest(bundle: Path, checkpoint: Path) -> str:
    """Return the checksum that a bundle's training ends with, over the script's own checkpoint."""
    job, saved = load_job(SCRIPT), torch.load(checkpoint)
    job.model.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    return digest(job, list(read_manifest(bundle).layouts))


def port_agent(*arguments: str) -> None:
    """Run one command, its output on this terminal."""
    subprocess.run([sys.executable, "-m", "port_agent.cli", *arguments], check=True)


def train(bundle: Path, folder: Path) -> dict[str, Any]:
    """Train the bundle with a progress bar; return what its events add up to."""
    command = [
        sys.executable, "-m", "port_agent.cli", "train", str(bundle), "--steps", str(STEPS), "--verify", str(VERIFY),
        "--state-dir", str(folder / "state"), "--out", str(folder / "weights.safetensors"), "--digest", "--json",
    ]  # fmt: skip
    result: dict[str, Any] = {
        "losses": [],
        "paged": 0,
        "transfer_s": 0.0,
        "hidden_s": 0.0,
        "peak": 0,
        "cpu_s": 0.0,
        "evals": [],
    }
    for event in _lines(command, "training"):
        match event.get("event"):
            case "ready":
                result["planned_peak"] = event["planned_peak_bytes"]
            case "step":
                result["losses"].append(event["loss"])
                result["paged"] += event["paged_in_bytes"] + event["paged_out_bytes"]
                result["transfer_s"] += event["transfer_s"]
                result["hidden_s"] += event["hidden_s"]
                result["cpu_s"] += event["cpu_s"]
                result["peak"] = max(result["peak"], event["peak_rss_bytes"])
            case "eval":
                result["evals"].append((event["loss"], event["metric"]))
            case "finished":
                result["digest"] = event["digest"]
                result["peak"] = max(result["peak"], event["peak_rss_bytes"])
    return result


def _lines(command: list[str], title: str) -> list[dict[str, Any]]:
    """Run a program that prints JSON lines; show its steps as a bar."""
    found = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process,
        Progress(console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task(title, total=STEPS)
        for line in process.stdout or ():
            found.append(json.loads(line))
            if "step" in found[-1] and "loss" in found[-1]:
                bar.update(task, completed=found[-1]["step"])
    if process.returncode:
        raise SystemExit(process.returncode)
    return found


def report(console: Console, plain: ScriptRun, followed: ScriptRun, ours: dict[str, Any], expected_digest: str) -> int:
    """Print the comparison."""
    equal = {
        "losses": plain.losses == followed.losses == ours["losses"],
        "checkpoint, byte for byte": plain.checkpoint == followed.checkpoint,
        "weights and optimizer": ours["digest"] == expected_digest,
    }
    budget = int(RAM[:-1]) << 20
    table = Table(title="Same script, same numbers", show_header=True)
    for column in ("", "plain PyTorch", "port-agent exec", "bundle"):
        table.add_column(column)
    table.add_row("RAM budget", "none", *2 * (RAM.replace("M", " MiB"),))
    peaks = (plain.peak_bytes, followed.peak_bytes, ours["peak"])
    table.add_row("measured peak", *(f"{format_bytes(peak)} ({peak / plain.peak_bytes:.0%})" for peak in peaks))
    table.add_row("CPU time", *(format_seconds(s) for s in (plain.cpu_s, followed.cpu_s, ours["cpu_s"])))
    losses = (plain.losses, followed.losses, ours["losses"])
    table.add_row("loss", *(f"{of[0]:.4f} -> {of[-1]:.4f}" for of in losses))
    table.add_row("paged", "-", "see its last line above", format_bytes(ours["paged"]))
    table.add_row("checksum of weights and optimizer", expected_digest[:16], "", ours["digest"][:16])
    console.print(table)
    for what, same in equal.items():
        console.print(f"{what}: [bold green]equal to the bit[/]" if same else f"{what}: [bold red]DIFFERENT[/]")
    held = ours["peak"] <= budget and followed.peak_bytes <= budget * BUDGET_MARGIN
    return 0 if all(equal.values()) and held else 1


if __name__ == "__main__":
    sys.exit(main())
