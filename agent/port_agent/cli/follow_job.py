"""Follow a worker in the foreground: progress bar, Ctrl-C, and a report at the end."""

import contextlib
import signal
import sys
from dataclasses import dataclass, field

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from port_agent.cli.terminal import terminal
from port_agent.supervisor.job.plan_choice import resident_max
from port_agent.system.memory_limit import hold_resident
from port_agent.worker.protocol import (
    EvaluationDone,
    Event,
    FailureCause,
    LeaveNow,
    StateRecovered,
    StepDone,
    StopAfterStep,
    TrainingFailed,
    TrainingFinished,
    WorkerReady,
    encode_message,
)
from port_agent.worker.start import Worker
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.bundle.manifest import Manifest
from port_planner.ir.device_kinds import CPU


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
    device_peak_bytes: int = 0
    evaluations: list[EvaluationDone] = field(default_factory=list)
    result: TrainingFinished | None = None
    failure: str = ""
    would_fail_again: bool = False
    """The same steps would give the same failure."""

    def take(self, event: Event) -> None:
        """Add one event."""
        match event:
            case WorkerReady():
                self.planned_peak_bytes = event.planned_peak_bytes or 0
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.start_peak_bytes or 0)
            case StepDone():
                self.first_loss = event.loss if self.first_loss is None else self.first_loss
                self.last_loss = event.loss
                self.steps += 1
                self.wall_s += event.wall_s
                self.cpu_s += event.cpu_s
                self.read_bytes += event.paged_in_bytes
                self.written_bytes += event.paged_out_bytes
                self.transfer_s += event.transfer_s
                self.hidden_s += event.hidden_s
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.peak_rss_bytes or 0)
                self.device_peak_bytes = max(self.device_peak_bytes, event.device_peak_bytes or 0)
            case EvaluationDone():
                self.evaluations.append(event)
            case TrainingFinished():
                self.result = event
                self.peak_rss_bytes = max(self.peak_rss_bytes, event.peak_rss_bytes or 0)
            case TrainingFailed():
                self.failure = event.message
                self.would_fail_again = event.cause in (FailureCause.DIVERGED, FailureCause.IMPOSSIBLE)


def follow(worker: Worker, manifest: Manifest, plan: int, *, as_json: bool) -> int:
    """Show a worker's progress until it ends; return the exit code of the command.

    Raises TrainingFailedError where the worker failed, was killed or left without a word.
    """
    summary = Summary()
    interrupts = 0

    def stop(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        worker.send(StopAfterStep() if interrupts == 1 else LeaveNow())

    before = signal.signal(signal.SIGINT, stop)
    try:
        _watch(worker, summary, resident_max(manifest.plans[plan].peak_bytes), as_json)
    finally:
        signal.signal(signal.SIGINT, before)
    code = worker.process.returncode
    if code == ExitCode.LEFT:
        sys.stderr.write(f"stopped after step {summary.steps}; the same command goes on from the last checkpoint\n")
        return ExitCode.INTERRUPTED if interrupts else ExitCode.LEFT
    if code:
        reason = summary.failure or (
            f"the worker was killed by signal {-code}" if code < 0 else f"the worker ended with exit code {code}"
        )
        if not summary.would_fail_again:
            reason = f"{reason.removesuffix('.')}. What was checkpointed is safe; the same command resumes"
        raise TrainingFailedError(reason, abs(code))
    if not as_json:
        print_report(summary, manifest, plan)
    return 0


def _watch(worker: Worker, summary: Summary, resident_bytes: int | None, as_json: bool) -> None:
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
        for event in worker.events():
            if as_json:
                print(encode_message(event).decode(), end="", flush=True)
            summary.take(event)
            match event:
                case StateRecovered():
                    bar.update(task, completed=event.step)
                    sys.stderr.write(f"{event.reason}; on from step {event.step}\n")
                case WorkerReady():
                    bar.update(task, total=event.total_steps, completed=event.step)
                case StepDone():
                    if resident_bytes is not None:
                        with contextlib.suppress(OSError):  # it has just ended
                            hold_resident(worker.process.pid, resident_bytes)
                    bar.update(task, completed=event.step, loss=_shown(event.loss))


def print_report(summary: Summary, manifest: Manifest, plan: int) -> None:
    """Print what the run did, beside what was planned."""
    table = Table(title=f"{manifest.name}: {summary.steps} steps", show_header=False)
    choice = manifest.plans[plan]
    table.add_row("RAM budget", format_bytes(choice.ram_bytes))
    table.add_row("planned peak", format_bytes(summary.planned_peak_bytes))
    table.add_row("measured peak", format_bytes(summary.peak_rss_bytes))
    if manifest.device_kind != CPU:
        budget = f" of {format_bytes(choice.device_ram_bytes)}" if choice.device_ram_bytes else ""
        planned = f", {format_bytes(choice.device_peak_bytes)} planned" if choice.device_peak_bytes else ""
        table.add_row(manifest.device_kind, f"{format_bytes(summary.device_peak_bytes)}{budget}{planned}")
    table.add_row("paged", f"{format_bytes(summary.written_bytes)} out, {format_bytes(summary.read_bytes)} in")
    if summary.transfer_s:
        share = 100 * summary.hidden_s / summary.transfer_s
        table.add_row("transfers", f"{format_seconds(summary.transfer_s)}, {share:.0f} % hidden behind compute")
    if summary.steps:
        table.add_row("step", f"{format_seconds(summary.wall_s / summary.steps)} on average")
        table.add_row("loss", f"{_shown(summary.first_loss)} -> {_shown(summary.last_loss)}")
    if summary.evaluations:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        table.add_row("evaluation loss", f"{_shown(first.loss)} -> {_shown(last.loss)}")
        if first.metric is not None and last.metric is not None:
            table.add_row("evaluation metric", f"{first.metric:.4f} -> {last.metric:.4f}")
    if summary.result is not None and summary.result.digest:
        table.add_row("checksum", summary.result.digest)
    if summary.result is not None and summary.result.out:
        table.add_row("weights", summary.result.out)
    terminal().print(table)


def _shown(loss: float | None) -> str:
    return "not a finite number" if loss is None else f"{loss:.4f}"
