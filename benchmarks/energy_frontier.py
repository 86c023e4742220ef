"""Plans real models for several boards and budgets, with every strategy: one table of energy overhead.

    python -m benchmarks.energy_frontier [--models resnet18,vgg16bn]
        [--boards pi4b,pi5,jetson-orin] [--budgets 30,50,70]
        [--strategies milp,greedy,...] [--time-limit 20] [--baseline-limit 20] [--json]
    python -m benchmarks.energy_frontier --measure resnet18,vit [--budgets 50]

A budget is a share of what the step takes when everything is kept (tensors only; the worker's base is added to both).
Costs are estimated for the board from the operators' work, and the table says so. "-": the strategy has no plan. "milp"
is offered the plans of all the others and answers with the best verified one: `alone` says what it found by itself.
`fine bound`: lower bound on the problem without coarsening; coarsening cost at most the distance from it.

--measure trains on this machine instead, profiled here, and compares the step time with the planned one. Compute is
compared by CPU seconds, which other processes disturb less than the wall clock.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.models import workload
from port_planner.capture.step import capture_step
from port_planner.ir.boards import estimated_costs, load_board
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.search.plan_step import PlanLimits, PlanResult, better_of, fine_bound, plan_step
from port_planner.search.solve import STRATEGIES

OURS = "milp"
SD = (45e6, 25e6)
"""Bytes per second read and written, a Raspberry Pi's SD card: what --measure throttles the page thread to."""


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU seconds per plan."""

    ours_s: float
    baseline_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one board at one budget under one strategy; joules and seconds are None if there is no plan."""

    model: str
    board: str
    budget_percent: int
    strategy: str
    outcome: str
    overhead_joules: float | None
    base_joules: float
    seconds: float | None
    base_seconds: float
    bound_joules: float | None
    gap: float | None
    cpu_seconds: float
    alone_joules: float | None = None
    """What our own search found before it was offered the others' plans."""
    fine_bound_joules: float | None = None


def capture(name: str) -> StepGraph:
    """Return the training step of a model of benchmarks.models, with SGD and momentum."""
    import torch

    made = workload(name)
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return capture_step(made.model, made.loss_fn, optimizer, made.batch(0)).graphs["step"]


def rows_of(
    name: str, graph: StepGraph, costs: CostTable, board: str, percent: int, strategies: Sequence[str], limits: Limits
) -> Iterator[Row]:
    """Yield a row per strategy, ours last."""
    whole = lower(graph, costs, Plan())
    base = costs.device.base_bytes
    ram = base + round((whole.peak_bytes - base) * percent / 100)
    rivals: list[Plan] = []

    def row(strategy: str, result: PlanResult) -> Row:
        plan = result.plan
        return Row(
            name,
            board,
            percent,
            strategy,
            result.outcome.name.lower(),
            plan.overhead_joules if plan else None,
            whole.joules,
            plan.seconds if plan else None,
            whole.seconds,
            result.bound_joules,
            result.gap,
            result.seconds,
        )

    for strategy in strategies:
        if strategy != OURS:
            result = plan_step(graph, costs, ram_bytes=ram, strategy=strategy, time_limit_s=limits.baseline_s)
            rivals += [result.plan] if result.plan is not None else []
            yield row(strategy, result)
    if OURS in strategies:
        alone = plan_step(graph, costs, ram_bytes=ram, time_limit_s=limits.ours_s)
        result = better_of(graph, costs, PlanLimits(ram), found=alone, rivals=rivals)
        fine = fine_bound(graph, costs, ram_bytes=ram)
        own = alone.plan.overhead_joules if alone.plan else None
        yield replace(row(OURS, result), alone_joules=own, fine_bound_joules=fine)


def show(rows: Sequence[Row], strategies: Sequence[str], console: Console) -> None:
    """Print one line per model, board and budget: overhead in percent of the step's energy, by strategy."""
    table = Table(
        "model",
        "board (estimated)",
        "budget",
        *strategies,
        "alone",
        "bound",
        "fine bound",
        "gap",
        "CPU s",
        title="energy overhead, % of keeping all",
    )
    keys = list(dict.fromkeys((r.model, r.board, r.budget_percent) for r in rows))
    for key in keys:
        found = {r.strategy: r for r in rows if (r.model, r.board, r.budget_percent) == key}
        cells = [_percent(found[s].overhead_joules, found[s]) if s in found else "" for s in strategies]
        ours = found.get(OURS)
        extra = [""] * 5
        if ours is not None:
            bounds = (ours.alone_joules, ours.bound_joules, ours.fine_bound_joules)
            gap = "" if ours.gap is None else f"{ours.gap:.0%}"
            extra = [*(_percent(joules, ours) for joules in bounds), gap, f"{ours.cpu_seconds:.1f}"]
        table.add_row(key[0], key[1], f"{key[2]} %", *cells, *extra)
    console.print(table)
    for line in beaten(rows):
        console.print(line)


def _percent(joules: float | None, row: Row) -> str:
    return "-" if joules is None else f"{100 * joules / row.base_joules:.2f}"


def beaten(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every case in which a baseline needs less energy than ours."""
    ours = {(r.model, r.board, r.budget_percent): r.overhead_joules for r in rows if r.strategy == OURS}
    found = []
    for r in rows:
        key = (r.model, r.board, r.budget_percent)
        best = ours.get(key, -1.0)
        if r.overhead_joules is not None and (best is None or r.overhead_joules < best * (1 - 1e-9) - 1e-12):
            found.append(f"{r.strategy} beats {OURS} on {r.model}, {r.board}, {r.budget_percent} %")
    return found


@dataclass(frozen=True, slots=True)
class Measurement:
    """Planned and measured step of one model on this machine; means over the steps after the first."""

    model: str
    budget_percent: int
    planned_s: float
    wall_s: float
    planned_compute_s: float
    compute_cpu_s: float

    @property
    def wall_error(self) -> float:
        return self.wall_s / self.planned_s - 1

    @property
    def compute_error(self) -> float:
        return self.compute_cpu_s / self.planned_compute_s - 1


def measure(name: str, percents: Sequence[int], folder: Path, limit_s: float) -> Iterator[Measurement]:
    """Plan, train five steps and yield what they took, per budget; flash at an SD card's speed."""
    from benchmarks.ours import Ours

    ours = Ours(name, folder, "sgd", None, steps=5)
    graph = next(iter(ours.captured.graphs.values()))
    costs = CostTable(ours.device, ours.measured.ops[0])
    whole, base = lower(graph, costs, Plan()).peak_bytes, costs.device.base_bytes
    for percent in percents:
        path = ours.plan(
            base + (whole - base) * percent // 100 + (8 << 20), strategy=OURS, time_limit_s=limit_s, limits=SD
        )
        run = ours.train(path, limits=SD) if path else None
        if path is None or run is None:
            continue
        bundle = Bundle(path)
        main_graph = bundle.manifest.graphs[0]
        program = lower(bundle.graphs[main_graph], bundle.costs[main_graph], bundle.plans[0][main_graph])
        steps = run.steps[1:]
        wall, cpu = (statistics.fmean(float(s[key]) for s in steps) for key in ("wall_s", "cpu_s"))
        yield Measurement(name, percent, program.seconds, wall, program.compute_seconds, cpu)


def show_measured(rows: Sequence[Measurement], console: Console) -> None:
    """Print planned against measured seconds."""
    table = Table(
        "model",
        "budget",
        "step planned s",
        "measured s",
        "off by",
        "compute planned s",
        "CPU s",
        "off by",
        title="planned and measured step on this machine, flash at 45/25 MB/s",
    )
    for r in rows:
        table.add_row(
            r.model,
            f"{r.budget_percent} %",
            f"{r.planned_s:.2f}",
            f"{r.wall_s:.2f}",
            f"{r.wall_error:+.0%}",
            f"{r.planned_compute_s:.2f}",
            f"{r.compute_cpu_s:.2f}",
            f"{r.compute_error:+.0%}",
        )
    console.print(table)
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > cores:
        console.print(f"load {load:.1f} on {cores} cores: wall times say little; repeat on a quiet machine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 4 if a baseline beats ours anywhere."""
    parser = argparse.ArgumentParser(prog="benchmarks.energy_frontier", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", default="resnet18,resnet50,vgg16bn,bert,gpt2")
    parser.add_argument("--boards", default="pi4b,pi5,jetson-orin")
    parser.add_argument("--budgets", default="30,50,70", help="percent of keeping everything")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="CPU seconds per plan of ours")
    parser.add_argument(
        "--baseline-limit", type=float, metavar="S", help="CPU seconds per baseline (default: the same)"
    )
    parser.add_argument("--measure", metavar="MODELS", help="train these on this machine and compare step times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    percents = [int(p) for p in options.budgets.split(",")]
    if options.measure:
        with tempfile.TemporaryDirectory(prefix="port-energy-") as folder:
            names = options.measure.split(",")
            measured = []
            for name in names:
                for row in measure(name, percents, Path(folder), options.time_limit):
                    print(f"{name}, {row.budget_percent} %: {row.wall_error:+.0%}", file=sys.stderr)
                    measured.append(row)
        if options.json:
            print(json.dumps([asdict(m) for m in measured], indent=1))
        else:
            show_measured(measured, Console(width=150))
        return 0
    strategies = options.strategies.split(",")
    limits = Limits(options.time_limit, options.baseline_limit or options.time_limit)
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in options.models.split(","):
        graph = capture(name)
        for board in options.boards.split(","):
            costs = estimated_costs(graph, load_board(board))
            for percent in percents:
                console.print(f"{name} ({len(graph.ops)} ops), {board}, {percent} %", highlight=False)
                rows += rows_of(name, graph, costs, board, percent, strategies, limits)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, strategies, Console(width=170))
    return 4 if beaten(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
