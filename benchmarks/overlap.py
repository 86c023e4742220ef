"""Whether paging hides behind compute: `python -m benchmarks.overlap [MODEL...]`, with flash
throttled to a Pi's SD card.

Per model and budget: seconds of a step, of its compute alone and of its transfers alone, and the step against the
larger of the two. The page thread is throttled to 45 MB/s read and 25 MB/s write, for the plan as for the run. Budgets:
`target` is that of `benchmarks.fit`; shares are of what the step's tensors take, all kept, beyond the bare worker.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.fit import TARGETS_MIB
from benchmarks.models import CASES as TARGET_CASES
from benchmarks.ours import Ours
from benchmarks.tables import table_console

SHARES = (0.7, 0.5)
SHARED_CASES = {"resnet18": ("sgd", 32), "mobilenetv2": ("sgd", 16), "vit": ("adamw", 4)}
CASES = TARGET_CASES | SHARED_CASES


@dataclass
class Row:
    """Means over the steps after the first."""

    model: str
    budget: str
    budget_mib: int
    compute_s: float
    transfer_s: float
    step_s: float
    ratio: float
    recompute_s: float


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--read", type=float, default=45e6, help="bytes per second (default 45e6)")
    parser.add_argument("--write", type=float, default=25e6, help="bytes per second (default 25e6)")
    parser.add_argument(
        "--time-limit", type=float, default=20.0, metavar="S", help="CPU seconds of planning (default 20)"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="port-overlap-") as folder:
        for model in arguments.models or CASES:
            rows += measure(model, Path(folder), (arguments.read, arguments.write), arguments.time_limit)
    if arguments.json:
        print(json.dumps([asdict(r) for r in rows]))
        return 0
    table = Table(
        title=f"flash at {arguments.read / 1e6:.0f}/{arguments.write / 1e6:.0f} MB/s read/write; seconds per step"
    )
    for column in (
        "model",
        "budget",
        "MiB",
        "compute",
        "of it recompute",
        "transfers",
        "step",
        "step / max(compute, transfers)",
    ):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.model,
            r.budget,
            str(r.budget_mib),
            f"{r.compute_s:.2f}",
            f"{r.recompute_s:.2f}",
            f"{r.transfer_s:.2f}",
            f"{r.step_s:.2f}",
            f"{r.ratio:.2f}",
        )
    table_console(110).print(table)
    return 0


def measure(model: str, folder: Path, limits: tuple[float, float], time_limit_s: float) -> list[Row]:
    """Return a row per budget."""
    from port_planner.ir.costs import CostTable
    from port_planner.ir.lowering.lower import lower
    from port_planner.ir.plan import Plan

    ours = Ours(model, folder, *CASES[model], steps=4)
    graph = next(iter(ours.captured.graphs.values()))
    whole = lower(graph, CostTable(ours.device, ours.measured.ops[0]), Plan()).peak_bytes
    base = ours.device.base_bytes
    budgets = {"target": TARGETS_MIB[model] << 20} if model in TARGETS_MIB else {}
    if model in SHARED_CASES:
        budgets |= {f"{share:.0%}": base + int((whole - base) * share) + (8 << 20) for share in SHARES}
    rows = []
    for name, budget in budgets.items():
        path = ours.plan(budget, strategy="milp", time_limit_s=time_limit_s, limits=limits)
        run = ours.train(path, limits=limits) if path else None
        if run is None:
            continue
        steps = run.steps[1:]
        mean = {k: sum(s[k] for s in steps) / len(steps) for k in ("wall_s", "transfer_s")}
        stall = sum(s["phases_s"]["stall"] for s in steps) / len(steps)
        recompute = sum(s["phases_s"].get("recompute", 0.0) for s in steps) / len(steps)
        compute = mean["wall_s"] - stall
        ratio = mean["wall_s"] / max(compute, mean["transfer_s"])
        rows.append(Row(model, name, budget >> 20, compute, mean["transfer_s"], mean["wall_s"], ratio, recompute))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
