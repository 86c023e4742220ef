"""What an update over micro-batches moves to and from flash, in turn and layer by layer:
`python -m benchmarks.whole_update`.

GPT-2 (random weights, AdamW, dropout as it is) in 750 MiB, eight micro-batches of 2 x 128. Both bundles run one
update in a real worker, which compares every loss with plain PyTorch's, and the weights and optimizer state
after the update, to the bit.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import CASES, make_optimizer, workload
from port_agent.energy.media import FlashPrices, medium_of
from port_agent.energy.sources.power_models import power_with
from port_agent.prepare.making import bundle_maker, device_costs
from port_agent.prepare.making.bundle_file import BundleFile
from port_agent.prepare.measurement.dry_run import DryRunError
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.pools import Pools
from port_agent.prepare.reference import with_expected_results
from port_agent.prepare.whole_updates import with_whole_update
from port_agent.worker.protocol import StepDone, TrainingFailed
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from port_planner import make_bundle
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.bundle.manifest import WHOLE_UPDATE
from port_planner.ir.costs import MediumKind
from port_planner.job import TrainingJob
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts


@dataclass(frozen=True, slots=True)
class Row:
    """One update as a worker ran it; its numbers were plain PyTorch's."""

    how: str
    read_bytes: int
    written_bytes: int
    wall_s: float
    cpu_s: float
    peak_bytes: int


def job_of(case: str, count: int) -> TrainingJob:
    """Return the job: as many samples as two updates take."""
    made = workload(case)
    batches = [made.batch(i) for i in range(2 * count)]
    data = [torch.cat(columns) for columns in zip(*batches, strict=True)]
    optimizer = make_optimizer(CASES[case][0], made.model.parameters())
    return TrainingJob(made.model, made.loss_fn, optimizer, data, batches[0][0].shape[0], accumulate=count)


def run(path: Path, folder: Path, count: int, peak_bytes: int) -> list[StepDone]:
    """Run one update of a bundle and return its steps; raise DryRunError if a bit is not plain PyTorch's."""
    options = TorchOptions(bundle=path, state_dir=folder, steps=count, checkpoint_every=count, verify=count)
    worker = start_worker(torch_worker(options), limit_bytes=peak_bytes, threads=1)
    steps, failure = [], ""
    for event in worker.events():
        match event:
            case StepDone():
                steps.append(event)
            case TrainingFailed():
                failure = event.message
    if worker.process.returncode:
        raise DryRunError(failure or f"the worker ended with exit code {worker.process.returncode}")
    return steps


def rows_of(case: str, count: int, ram_bytes: int, folder: Path) -> list[Row]:
    """Return what an update takes with and without the graph of a whole update."""
    captured = make_bundle.prepare(job_of(case, count))
    quiet = lambda stage, share: print(f"{stage} {share:.0%}   ", end="\r", file=sys.stderr)  # noqa: E731
    power = power_with(1)
    measured = MeasurementWorker().measure(captured.graphs.values(), 1, power.compute_watts, quiet)
    device = device_costs.this_device(measured, folder, 1, power, quiet)
    device = device_costs.on_medium(device, medium_of(MediumKind.SD, FlashPrices()))
    captured = with_expected_results(captured, count)
    quick = make_bundle.default_planner(strategy="greedy", time_limit_s=20.0)
    whole, costs = with_whole_update(captured, measured, device, int(ram_bytes * 0.99), quick)
    if WHOLE_UPDATE not in whole.graphs:
        raise SystemExit("layer by layer costs no less here; choose a smaller --ram")

    def row(how: str, captured: CapturedJob, measured: MeasuredCosts) -> Row:
        path = folder / f"{how}.port"
        options = bundle_maker.MakeOptions(Pools(ram_bytes), (folder,), quick)
        made = bundle_maker.make(path, BundleFile.beside(path, captured, 1), measured, device, options, quiet)
        steps = run(path, folder / f"{how}.state", count, ram_bytes)
        return Row(
            how,
            sum(s.paged_in_bytes for s in steps),
            sum(s.paged_out_bytes for s in steps),
            sum(s.wall_s for s in steps),
            sum(s.cpu_s for s in steps),
            made.measured_peak_bytes,
        )

    return [row("one by one", captured, measured), row("layer by layer", whole, costs)]


def show(rows: Sequence[Row], title: str) -> None:
    """Print both, and how many of the bytes move layer by layer."""
    table = Table("micro-batches", "read", "written", "wall", "CPU", "peak", title=title)
    for row in rows:
        table.add_row(
            row.how,
            format_bytes(row.read_bytes),
            format_bytes(row.written_bytes),
            format_seconds(row.wall_s),
            format_seconds(row.cpu_s),
            format_bytes(row.peak_bytes),
        )
    console = Console(width=120)
    console.print(table)
    before, after = (row.read_bytes + row.written_bytes for row in rows)
    console.print(
        f"{after / before:.3f} of the bytes; losses, weights and optimizer state of both are plain PyTorch's to the bit"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.whole_update", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--case", choices=CASES, default="gpt2")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--ram", type=int, default=750, help="MiB")
    parser.add_argument("--page-dir", type=Path, help="where pages lie (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.page_dir) as folder:
        rows = rows_of(options.case, options.micro_batches, options.ram << 20, Path(folder))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows, f"one update of {options.case} over {options.micro_batches} micro-batches in {options.ram} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
