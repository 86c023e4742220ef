"""Follow a worker in the foreground: progress bar, Ctrl-C, and a report at the end."""

import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from port_agent.cli.terminal import terminal
from port_agent.foreground.run import ForegroundRun, TrainReport
from port_agent.worker.protocol import StateRecovered, StepDone, WorkerReady, encode_message
from port_planner.base.errors import ExitCode
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.device_kinds import CPU


def follow(run: ForegroundRun, manifest: Manifest, plan: int, *, as_json: bool) -> int:
    """Show a worker's progress until it ends; return the exit code of the command. Raises TrainingFailedError."""
    with run, run.stopped_by_ctrl_c():
        _watch(run, as_json)
    if run.left:
        sys.stderr.write(
            f"stopped after step {run.report.steps}; the same command continues from the last checkpoint\n"
        )
        return ExitCode.INTERRUPTED if run.stop_requested else ExitCode.LEFT
    if not as_json:
        print_report(run.report, manifest, plan)
    return 0


def _watch(run: ForegroundRun, as_json: bool) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    quiet = as_json or not sys.stderr.isatty()
    with Progress(*columns, console=terminal(stderr=True), disable=quiet) as bar:
        task = bar.add_task("step", total=None, loss="-")
        for event in run.events():
            if as_json:
                print(encode_message(event).decode(), end="", flush=True)
            match event:
                case StateRecovered():
                    bar.update(task, completed=event.step)
                    sys.stderr.write(f"{event.reason}; continues from step {event.step}\n")
                case WorkerReady():
                    bar.update(task, total=event.total_steps, completed=event.step)
                case StepDone():
                    bar.update(task, completed=event.step, loss=_shown(event.loss))


def print_report(report: TrainReport, manifest: Manifest, plan: int) -> None:
    """Print the totals of the run, beside what was planned."""
    table = Table(title=f"{manifest.name}: {report.steps} steps", show_header=False)
    choice = manifest.plans[plan]
    table.add_row("RAM budget", format_bytes(choice.ram_bytes))
    table.add_row("planned peak", format_bytes(report.planned_peak_bytes))
    table.add_row("measured peak", format_bytes(report.peak_rss_bytes))
    if manifest.device_kind != CPU:
        budget = f" of {format_bytes(choice.device_ram_bytes)}" if choice.device_ram_bytes else ""
        planned = f", {format_bytes(choice.device_peak_bytes)} planned" if choice.device_peak_bytes else ""
        table.add_row(manifest.device_kind, f"{format_bytes(report.device_peak_bytes)}{budget}{planned}")
    table.add_row("paged", f"{format_bytes(report.written_bytes)} out, {format_bytes(report.read_bytes)} in")
    if report.transfer_s:
        share = 100 * report.hidden_s / report.transfer_s
        table.add_row("transfers", f"{format_seconds(report.transfer_s)}, {share:.0f} % hidden behind compute")
    if report.steps:
        table.add_row("step", f"{format_seconds(report.wall_s / report.steps)} on average")
        table.add_row("loss", f"{_shown(report.first_loss)} -> {_shown(report.last_loss)}")
    if report.evaluations:
        first, last = report.evaluations[0], report.evaluations[-1]
        table.add_row("evaluation loss", f"{_shown(first.loss)} -> {_shown(last.loss)}")
        if first.metric is not None and last.metric is not None:
            table.add_row("evaluation metric", f"{first.metric:.4f} -> {last.metric:.4f}")
    if report.result is not None and report.result.digest:
        table.add_row("checksum", report.result.digest)
    if report.result is not None and report.result.out:
        table.add_row("weights", report.result.out)
    terminal().print(table)


def _shown(loss: float | None) -> str:
    return "not a finite number" if loss is None else f"{loss:.4f}"
