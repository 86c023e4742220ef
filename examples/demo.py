"""`make demo`: plan and train a transformer in less than half of plain PyTorch's memory, then prove it is the same.

Three programs run one after the other: `port-agent plan`, `port-agent train`, and plain PyTorch on the same batches. The
report compares memory, losses and a checksum over all weights and optimizer state.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from planner.ir.units import format_bytes, format_seconds

SCRIPT = Path(__file__).parent / "shakespeare" / "train.py"
RAM, STEPS, VERIFY = "380M", 30, 2


def main() -> int:
    """Run the demo; the exit code is 0 only if the numbers are equal and the budget held."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="port-demo-") as folder:
        bundle = Path(folder) / "shakespeare.port"
        console.print(f"[bold]1. Plan[/] {SCRIPT.parent.name}/train.py for {RAM} (capture, profile, plan, trial)")
        port_agent(
            "plan", str(SCRIPT), "--ram", RAM, "-o", str(bundle), "--page-dir", folder, "--epochs", "2",
            "--verify", str(VERIFY), "--time-limit", "8",
        )  # fmt: skip
        port_agent("show", str(bundle))
        console.print(f"[bold]2. Train[/] {STEPS} steps within {RAM}")
        ours = train(bundle, Path(folder))
        console.print("[bold]3. Plain PyTorch[/], the same steps without a budget, for comparison")
        plain = plain_pytorch(bundle)
    return report(console, ours, plain)


def port_agent(*arguments: str) -> None:
    """Run one command, its output on this terminal."""
    subprocess.run([sys.executable, "-m", "agent.cli", *arguments], check=True)


def train(bundle: Path, folder: Path) -> dict[str, Any]:
    """Train the bundle with a progress bar; return what its events add up to."""
    command = [
        sys.executable, "-m", "agent.cli", "train", str(bundle), "--steps", str(STEPS), "--verify", str(VERIFY),
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


def plain_pytorch(bundle: Path) -> dict[str, Any]:
    """Train with plain PyTorch in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plain", str(SCRIPT), str(bundle), str(STEPS)]
    return _lines(command, "plain PyTorch")[-1]


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


def report(console: Console, ours: dict[str, Any], plain: dict[str, Any]) -> int:
    """Print the comparison."""
    equal = ours["digest"] == plain["digest"] and ours["losses"] == plain["losses"]
    share = ours["peak"] / plain["peak_rss_bytes"]
    hidden = 100 * ours["hidden_s"] / ours["transfer_s"] if ours["transfer_s"] else 100.0
    table = Table(title="Same step, same numbers", show_header=True)
    for column in ("", "port-agent", "plain PyTorch"):
        table.add_column(column)
    table.add_row("RAM budget", RAM.replace("M", " MiB"), "none")
    table.add_row("planned peak", format_bytes(ours["planned_peak"]), "")
    table.add_row("measured peak", f"{format_bytes(ours['peak'])} ({share:.0%})", format_bytes(plain["peak_rss_bytes"]))
    table.add_row(
        "paged", f"{format_bytes(ours['paged'])}, {hidden:.0f} % of {format_seconds(ours['transfer_s'])} hidden", "-"
    )
    table.add_row("CPU time", format_seconds(ours["cpu_s"]), format_seconds(plain["cpu_s"]))
    table.add_row("loss", *(f"{r['losses'][0]:.4f} -> {r['losses'][-1]:.4f}" for r in (ours, plain)))
    if ours["evals"]:
        table.add_row("held-out loss", f"{ours['evals'][0][0]:.4f} -> {ours['evals'][-1][0]:.4f}", "")
    table.add_row("checksum of weights and optimizer", ours["digest"][:16], plain["digest"][:16])
    console.print(table)
    console.print("[bold green]equal to the bit[/]" if equal else "[bold red]DIFFERENT NUMBERS[/]")
    return 0 if equal and ours["peak"] <= int(RAM[:-1]) << 20 else 1


if __name__ == "__main__":
    sys.exit(main())
