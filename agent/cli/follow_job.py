"""Follow a worker in the foreground: progress bar, Ctrl-C, and a report at the end."""

import json
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agent.worker.start import Worker
from planner.ir.bundle.bundle import Manifest
from planner.ir.errors import PortError
from planner.ir.units import format_bytes, format_seconds

LEFT = 75


class TrainingFailedError(PortError):
    """The worker could not train."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Summary:
    """What the events of a run add up to."""

    first_loss: float | None = None
    last_loss: float | None = None
    steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    peak_rss_bytes: int = 0
    planned_peak_bytes: int = 0
    evaluations: list[tuple[int, float, float | None]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Add one event."""
        match event.get("event"):
            case "ready":
                self.planned_peak_bytes = event["planned_peak_bytes"]
            case "step":
                self.first_loss = event["loss"] if self.first_loss is None else self.first_loss
                self.last_loss = event["loss"]
                self.steps += 1
                self.wall_s += event["wall_s"]
                self.cpu_s += event["cpu_s"]
                self.read_bytes += event["paged_in_bytes"]
                self.written_bytes += event["paged_out_bytes"]
                self.transfer_s += event["transfer_s"]
                self.hidden_s += event["hidden_s"]
                self.peak_rss_bytes = max(self.peak_rss_bytes, event["peak_rss_bytes"])
            case "eval":
                self.evaluations.append((event["step"], event["loss"], event["metric"]))
            case "finished":
                self.result = event
                self.peak_rss_bytes = max(self.peak_rss_bytes, event["peak_rss_bytes"])
            case "failed":
                self.failure = event["message"]


def follow(worker: Worker, manifest: Manifest, plan: int, *, as_json: bool) -> int:
    """Show a worker's progress until it ends; return the exit code of the command.

    Raises TrainingFailedError where the worker failed, was killed or left without a word.
    """
    summary = Summary()
    interrupts = 0

    def stop(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        worker.command("stop" if interrupts == 1 else "leave")

    before = signal.signal(signal.SIGINT, stop)
    try:
        _watch(worker, summary, as_json)
    finally:
        signal.signal(signal.SIGINT, before)
    code = worker.process.returncode
    if code == LEFT:
        sys.stderr.write(f"stopped after step {summary.steps}; the same command goes on from the last checkpoint\n")
        return 130 if interrupts else LEFT
    if code:
        reason = summary.failure or (
            f"the worker was killed by signal {-code}" if code < 0 else f"the worker ended with exit code {code}"
        )
        raise TrainingFailedError(f"{reason}. What was checkpointed is safe; the same command resumes", abs(code))
    if not as_json:
        print_report(summary, manifest, plan)
    return 0


def _watch(worker: Worker, summary: Summary, as_json: bool) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )  # fmt: skip
    quiet = as_json or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("step", total=None, loss="-")
        for event in worker.events():
            if as_json:
                print(json.dumps(event), flush=True)
            summary.take(event)
            if event["event"] == "ready":
                bar.update(task, total=event["total_steps"], completed=event["step"])
            elif event["event"] == "step":
                bar.update(task, completed=event["step"], loss=f"{event['loss']:.4f}")


def print_report(summary: Summary, manifest: Manifest, plan: int) -> None:
    """Print what the run did, beside what was planned."""
    table = Table(title=f"{manifest.name}: {summary.steps} steps", show_header=False)
    table.add_row("RAM budget", format_bytes(manifest.plans[plan].ram_bytes))
    table.add_row("planned peak", format_bytes(summary.planned_peak_bytes))
    table.add_row("measured peak", format_bytes(summary.peak_rss_bytes))
    table.add_row("paged", f"{format_bytes(summary.written_bytes)} out, {format_bytes(summary.read_bytes)} in")
    if summary.transfer_s:
        share = 100 * summary.hidden_s / summary.transfer_s
        table.add_row("transfers", f"{format_seconds(summary.transfer_s)}, {share:.0f} % hidden behind compute")
    if summary.steps:
        table.add_row("step", f"{format_seconds(summary.wall_s / summary.steps)} on average")
        table.add_row("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}")
    if summary.evaluations:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        table.add_row("evaluation loss", f"{first[1]:.4f} -> {last[1]:.4f}")
        if first[2] is not None and last[2] is not None:
            table.add_row("evaluation metric", f"{first[2]:.4f} -> {last[2]:.4f}")
    if "digest" in summary.result:
        table.add_row("checksum", str(summary.result["digest"]))
    if summary.result.get("out"):
        table.add_row("weights", str(summary.result["out"]))
    Console().print(table)
