"""Compare the same steps with operators whole and in tiles: floor, time, energy and written bytes
at shares of their memory.

    python -m benchmarks.variants [resnet18 gpt2 ...] [--small] [--shares 30 50 70]
        [--strategy greedy] [--medium sd] [--json]

Operators are measured on this machine (and their costs kept); plans are made for it and lowered, not run. "Whole" is
the recorded step, "in tiles" what `port-agent plan` would make of it at that budget, on the medium that the page
directory is on or on `--medium`: what is written wears it off, and that has its price in joules. Overhead is counted
from the recorded step with everything kept. A share of 0 % is the recorded step's floor, 100 % what keeping everything
takes. Tiles are compared by byte before they are used.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.models import CASES, DEMO, case_of, make_optimizer, workload
from benchmarks.ours import COMPARING_BYTES
from benchmarks.tables import table_console
from port_agent.energy.media import FlashPrices, medium_of, medium_under
from port_agent.energy.sources.power_models import power_with
from port_agent.prepare.making import device_costs
from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling.choice import choose_tiling
from port_agent.prepare.tiling.split_gradients import with_split_gradients
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, CutTarget, TiledJob
from port_planner import make_bundle
from port_planner.base.units import format_bytes, format_joules, format_seconds
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import CostTable, DeviceCosts, MediumKind
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.search.floor import floor_of

DEFAULT_CASE = ("sgd", None)
MODELS = ("resnet18", "resnet50", "vgg16bn", "mobilenetv2", "vit", "bert", "gpt2", "unet2d", DEMO)

PLANNING_S = 20.0
"""For each plan."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one share: the same figures with operators whole and as `plan` cuts them (None: no plan)."""

    model: str
    percent: int
    tiles: str
    floor_bytes: int
    seconds: float | None
    overhead_joules: float | None
    """Overhead of energy and wear, in joules."""
    energy_joules: float | None
    """Energy of the whole step, in joules, without wear."""
    written_bytes: int | None


def compare_variants(
    name: str,
    percents: list[int],
    folder: Path,
    *,
    small: bool,
    strategy: str,
    medium: MediumKind | None = None,
    reordered: bool = False,
) -> list[Row]:
    """Return two rows for each share: whole, then in tiles."""
    optimizer, batch_size = case_of(name) if name in (*CASES, DEMO) else DEFAULT_CASE
    made = workload(name, small=small, batch_size=None if small else batch_size)
    batch = made.batch(0)
    job = TrainingJob(
        made.model, made.loss_fn, make_optimizer(optimizer, made.model.parameters()), list(batch), batch[0].shape[0]
    )
    captured, watts = make_bundle.prepare(job), power_with(1)
    quiet: Progress = lambda *_: None  # noqa: E731
    measured = MeasurementWorker().measure(captured.graphs.values(), 1, watts.compute_watts, quiet)
    prices = FlashPrices()
    paged_to = medium_under(folder, prices) if medium is None else medium_of(medium, prices)
    device = device_costs.on_medium(device_costs.this_device(measured, folder, 1, watts, quiet), paged_to)
    whole = TiledJob(captured, measured, ())
    room = ComparisonLimits(COMPARING_BYTES, folder, 1)
    halved = with_split_gradients(captured, measured, room, watts.compute_watts, quiet)
    graph = next(iter(captured.graphs.values()))
    costs = CostTable(device, measured.ops[0])
    kept = lower(graph, costs, Plan(), check_budget=False)
    least, most = floor_of(graph, costs).nbytes, kept.peak_bytes
    planner = functools.cache(make_bundle.default_planner(strategy=strategy, time_limit_s=PLANNING_S))
    rows = []
    for percent in percents:
        ram_bytes = least + (most - least) * percent // 100
        cut = choose_tiling(
            whole, halved, CutTarget(device, ram_bytes, room, quiet), planner, NO_LIMITS, reordered=reordered
        )
        what = f"{len(cut.tiled_chains)} chains" if cut.tiled_chains else "none" if cut is whole else "halves"
        for label, sliced in (("whole", whole), (what, cut)):
            rows.append(_row(name, percent, label, sliced, device, ram_bytes, planner, kept.cost_joules))
    return rows


def _row(
    name: str,
    percent: int,
    label: str,
    sliced: TiledJob,
    device: DeviceCosts,
    ram_bytes: int,
    planner: make_bundle.PlanFunction,
    kept_joules: float,
) -> Row:
    graph = next(iter(sliced.captured.graphs.values()))
    costs = CostTable(device, sliced.measured.ops[0])
    plan = planner(graph, costs, ram_bytes).plan
    floor = floor_of(graph, costs).nbytes
    if plan is None:
        return Row(name, percent, label, floor, None, None, None, None)
    program = lower(graph, costs, plan)
    overhead = program.cost_joules - kept_joules
    return Row(name, percent, label, floor, program.seconds, overhead, program.joules, program.written_bytes)


def variants_table(rows: list[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title="operators whole and in tiles (planned with costs measured here, one thread)")
    for column in ("model", "memory", "in tiles", "floor", "step", "energy", "overhead with wear", "written per step"):
        table.add_column(column)
    for row in rows:
        seconds, joules, written = row.seconds, row.overhead_joules, row.written_bytes
        table.add_row(
            row.model,
            f"{row.percent} %",
            row.tiles,
            format_bytes(row.floor_bytes),
            _told(seconds, format_seconds),
            _told(row.energy_joules, format_joules),
            _told(joules, format_joules),
            "-" if written is None else format_bytes(written),
        )
    return table


def _told(number: float | None, form: Callable[[float], str]) -> str:
    return "no plan" if number is None else form(number)


def main(arguments: list[str] | None = None) -> int:
    """Compare the models named and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=int, default=[30, 50, 70], metavar="PERCENT")
    parser.add_argument("--small", action="store_true", help="narrow models of the same kinds")
    parser.add_argument("--strategy", default="greedy")
    parser.add_argument(
        "--medium",
        type=lambda name: MediumKind[name.upper()],
        help="what pages are written to: sd, emmc, usb, ssd, disk",
    )
    parser.add_argument("--reordered", action="store_true", help="as `plan --allow reordered`: sums in tiles, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            rows += compare_variants(
                name,
                options.shares,
                Path(folder),
                small=options.small,
                strategy=options.strategy,
                medium=options.medium,
                reordered=options.reordered,
            )
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        table_console().print(variants_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
