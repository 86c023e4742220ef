"""What a step costs against plain PyTorch, and how well memory is predicted: `python -m benchmarks.cost [MODEL...]`.

Planned as `port-agent plan` does by default. Each model has two budgets: `ample` (nothing needs to be recomputed) and
the target of `benchmarks.fit`. The latter is enforced by the kernel (RLIMIT_DATA, which does not count code; the plan
is for what is resident). CPU seconds (of all threads) and wall seconds are medians of the steps after the first. Plain
PyTorch, with its default malloc and no limit, and ours take turns; the smaller median of each counts. Peaks are of
resident memory. `--threads 2`: both compute with two threads.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fit import TARGETS_MIB, run_child
from benchmarks.models import DEMO, case_of
from benchmarks.ours import BESIDE_RESIDENT, BESIDE_RESIDENT_PER_THREAD, Ours, Run
from benchmarks.tables import table_console
from port_planner.ir.costs import CostTable
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan

LIMITS_MIB = {DEMO: 420, **TARGETS_MIB}
"""Those of the demo: its own budget of 380 MiB, and what RLIMIT_DATA counts besides."""

STEPS = 5
TURNS = 2


@dataclass
class Row:
    """One model under one budget. `equal`: the losses are those of plain PyTorch, to the bit."""

    model: str
    budget: str
    budget_mib: int
    planned_mib: float
    measured_mib: float
    eager_peak_mib: int
    paged_mib: float
    recompute_s: float
    stall_s: float
    cpu_s: float
    eager_cpu_s: float
    ratio: float
    wall_s: float
    eager_wall_s: float
    wall_ratio: float
    equal: bool


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(LIMITS_MIB)} (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="of both (default 1)")
    parser.add_argument(
        "--ram", type=int, metavar="MIB", help="this budget of resident memory alone, planned and measured"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="port-cost-") as folder:
        for model in arguments.models or LIMITS_MIB:
            console.print(f"{model} ...")
            rows += measure(model, Path(folder), arguments.threads, arguments.ram)
    if arguments.json:
        print(json.dumps([asdict(r) for r in rows]))
        return 0
    table = Table(title=f"a step against plain PyTorch, compute threads: {arguments.threads}")
    for column in (
        "model", "budget", "MiB", "planned MiB", "peak RSS MiB", "eager peak MiB", "paged MiB", "recompute s", "stall s", "CPU s",
        "eager CPU s", "ratio", "wall s", "eager wall s", "ratio", "losses equal",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("model", "budget") else "right")
    for r in rows:
        table.add_row(
            r.model, r.budget, str(r.budget_mib), f"{r.planned_mib:.0f}", f"{r.measured_mib:.0f}", str(r.eager_peak_mib),
            f"{r.paged_mib:.0f}", f"{r.recompute_s:.2f}", f"{r.stall_s:.2f}", f"{r.cpu_s:.2f}", f"{r.eager_cpu_s:.2f}", f"{r.ratio:.2f}",
            f"{r.wall_s:.2f}", f"{r.eager_wall_s:.2f}", f"{r.wall_ratio:.2f}", "yes" if r.equal else "NO",
        )  # fmt: skip
    table_console().print(table)
    return 0


def measure(model: str, folder: Path, threads: int, ram_mib: int | None = None) -> list[Row]:
    """Return a row for each budget, or one for `ram_mib` of resident memory if that is given."""
    ours = Ours(model, folder, *case_of(model), steps=STEPS, threads=threads)
    graph = next(iter(ours.captured.graphs.values()))
    whole = lower(graph, CostTable(ours.device, ours.measured.ops[0]), Plan()).peak_bytes
    rows = []
    limit, beside = LIMITS_MIB[model] << 20, BESIDE_RESIDENT + (threads - 1) * BESIDE_RESIDENT_PER_THREAD
    budgets = {"ample": int(whole * 1.15), "target": limit - beside} if ram_mib is None else {"given": ram_mib << 20}
    for budget_name, budget in budgets.items():
        path = ours.plan(budget, strategy="milp")
        if path is None:
            raise SystemExit(f"{model} cannot be planned for {budget >> 20} MiB")
        pairs = [
            (_eager(model, threads), _ours(ours, path, limit if budget_name == "target" else None))
            for _ in range(TURNS)
        ]
        path.unlink()
        eager, run = pairs[0]
        later = run.steps[1:]
        plain, plain_wall = (min(statistics.median(e[name]) for e, _ in pairs) for name in ("cpu_s", "wall_s"))
        cpu, wall = (
            min(statistics.median(s[name] for s in run.steps[1:]) for _, run in pairs) for name in ("cpu_s", "wall_s")
        )
        rows.append(
            Row(
                model,
                budget_name,
                budget >> 20,
                run.planned_peak_bytes / 2**20,
                run.peak_bytes / 2**20,
                eager["peak_mib"],
                statistics.mean(s["paged_in_bytes"] + s["paged_out_bytes"] for s in later) / 2**20,
                statistics.mean(s["phases_s"].get("recompute", 0.0) for s in later),
                statistics.mean(s["phases_s"]["stall"] for s in later),
                cpu,
                plain,
                cpu / plain,
                wall,
                plain_wall,
                wall / plain_wall,
                eager["losses"] == [s["loss"].hex() for s in run.steps],
            )
        )
    return rows


def _ours(ours: Ours, path: Path, limit_bytes: int | None) -> Run:
    run = ours.train(path, data_limit_bytes=limit_bytes)
    if run is None:
        raise SystemExit(f"{path.name} did not finish under its limit")
    return run


def _eager(model: str, threads: int) -> dict[str, Any]:
    """Return losses, CPU and wall seconds and peak of plain PyTorch as a user starts it."""
    result = run_child("eager", model, None, steps=STEPS, thrifty=False, threads=threads)
    if result is None:
        raise SystemExit(f"plain PyTorch does not train {model} here")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
