"""Plans real models for several boards and budgets, with every strategy: one table of energy overhead.

    python -m benchmarks.energy_frontier [--models resnet18,vgg16bn] [--boards pi4b,pi5,jetson-orin] [--budgets 30,50,70]
        [--strategies milp,greedy,...] [--time-limit 20] [--json]

A budget is a share of what the step takes when everything is kept (tensors only; the worker's base is added to both).
Costs are estimated for the board from the operators' work, and the table says so. "-": the strategy has no plan.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.models import workload
from planner.capture import capture_step
from planner.costs import CostTable
from planner.devices import estimated_costs, load_board
from planner.graph import StepGraph
from planner.plan import Plan
from planner.program import expand
from planner.solve import STRATEGIES
from planner.step import plan_step


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one board at one budget under one strategy; joules and seconds are None where there is no plan."""

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


def capture(name: str) -> StepGraph:
    """Return the training step of a model of benchmarks.models, with SGD and momentum."""
    import torch

    made = workload(name)
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return capture_step(made.model, made.loss_fn, optimizer, made.batch(0)).graphs["step"]


def rows_of(
    name: str, graph: StepGraph, costs: CostTable, board: str, percent: int, strategies: Sequence[str], limit_s: float
) -> Iterator[Row]:
    """Yield a row per strategy."""
    whole = expand(graph, costs, Plan())
    base = costs.device.base_bytes
    ram = base + round((whole.peak_bytes - base) * percent / 100)
    for strategy in strategies:
        result = plan_step(graph, costs, ram_bytes=ram, strategy=strategy, time_limit_s=limit_s)
        plan = result.plan
        yield Row(
            name, board, percent, strategy, result.outcome.name.lower(), plan.overhead_joules if plan else None,
            whole.joules, plan.seconds if plan else None, whole.seconds, result.bound_joules, result.gap, result.seconds,
        )  # fmt: skip


def show(rows: Sequence[Row], strategies: Sequence[str], console: Console) -> None:
    """Print one line per model, board and budget: overhead in percent of the step's energy, by strategy."""
    table = Table(
        "model", "board (estimated)", "budget", *strategies, "gap", "CPU s", title="energy overhead, % of keeping all"
    )
    keys = list(dict.fromkeys((r.model, r.board, r.budget_percent) for r in rows))
    for key in keys:
        found = {r.strategy: r for r in rows if (r.model, r.board, r.budget_percent) == key}
        ours = found.get("milp")
        cells = [_percent(found[s]) if s in found else "" for s in strategies]
        gap = f"{ours.gap:.0%}" if ours is not None and ours.gap is not None else ""
        cpu = f"{ours.cpu_seconds:.1f}" if ours is not None else ""
        table.add_row(key[0], key[1], f"{key[2]} %", *cells, gap, cpu)
    console.print(table)
    for line in beaten(rows):
        console.print(line)


def _percent(row: Row) -> str:
    return "-" if row.overhead_joules is None else f"{100 * row.overhead_joules / row.base_joules:.2f}"


def beaten(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for every case in which a baseline needs less energy than ours."""
    ours = {(r.model, r.board, r.budget_percent): r.overhead_joules for r in rows if r.strategy == "milp"}
    found = []
    for r in rows:
        key = (r.model, r.board, r.budget_percent)
        best = ours.get(key, -1.0)
        if r.overhead_joules is not None and (best is None or r.overhead_joules < best * (1 - 1e-9) - 1e-12):
            found.append(f"{r.strategy} beats milp on {r.model}, {r.board}, {r.budget_percent} %")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 4 if a baseline beats ours anywhere."""
    parser = argparse.ArgumentParser(prog="benchmarks.energy_frontier", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet18,resnet50,vgg16bn,bert,gpt2")
    parser.add_argument("--boards", default="pi4b,pi5,jetson-orin")
    parser.add_argument("--budgets", default="30,50,70", help="percent of keeping everything")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="CPU seconds per plan")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    strategies = options.strategies.split(",")
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in options.models.split(","):
        graph = capture(name)
        for board in options.boards.split(","):
            costs = estimated_costs(graph, load_board(board))
            for percent in map(int, options.budgets.split(",")):
                console.print(f"{name} ({len(graph.ops)} ops), {board}, {percent} %", highlight=False)
                rows += rows_of(name, graph, costs, board, percent, strategies, options.time_limit)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, strategies, Console(width=150))
    return 4 if beaten(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
