"""Same bits as plain PyTorch, how fast the plan is made, and how well it predicts memory: `python -m benchmarks.exact`.

Per model: seconds of capture, profile and planning, bytes of the plan, planned and measured peak, and whether losses
and a checksum over weights, buffers and optimizer state equal those of plain PyTorch on the same batches.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack
from rich.table import Table

from benchmarks.models import WORKLOADS
from benchmarks.ours import Ours
from benchmarks.plain import digest
from benchmarks.tables import table_console
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.codec import pack_plan
from port_planner.ir.plan import Action
from port_planner.plain_steps import plain_losses

OPTIMIZERS = dict.fromkeys(("bert", "gpt2", "llama", "vit", "unet2d", "unet2dcondition"), "adamw")


@dataclass
class Row:
    """One model."""

    model: str
    optimizer: str
    capture_profile_s: float
    plan_s: float
    plan_bytes: int
    paged: int
    recomputed: int
    planned_mib: float
    measured_mib: float
    share: float
    equal: bool


def main() -> int:
    """Parse the command line, measure, print; exit code 1 if any model differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="budget as a share of what the step takes, more where its ops need more (default 0.5)",
    )
    parser.add_argument("--small", action="store_true", help="shrunken models")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="port-exact-") as folder:
        for model in arguments.models or WORKLOADS:
            rows.append(measure(model, Path(folder), arguments.steps, arguments.share, arguments.small))
    if arguments.json:
        print(json.dumps([asdict(r) for r in rows]))
    else:
        show(rows)
    return 0 if all(r.equal for r in rows) else 1


def measure(model: str, folder: Path, steps: int, share: float, small: bool) -> Row:
    """Plan one model for a share of its memory, train it, and train it with plain PyTorch."""
    from port_planner.ir.costs import CostTable
    from port_planner.ir.lowering.lower import lower
    from port_planner.ir.plan import Plan

    optimizer = OPTIMIZERS.get(model, "sgd")
    begin = time.perf_counter()
    ours = Ours(model, folder, optimizer, None, steps=steps, small=small)
    captured_s = time.perf_counter() - begin
    graph = next(iter(ours.captured.graphs.values()))
    whole = lower(graph, CostTable(ours.device, ours.measured.ops[0]), Plan()).peak_bytes
    base = ours.device.base_bytes
    while True:
        budget = base + int((whole - base) * share) + (8 << 20)
        begin = time.perf_counter()
        path = ours.plan(budget)
        plan_s = time.perf_counter() - begin
        if path is not None:
            break
        share += 0.1  # the ops alone need more, as in a model of a few megabytes
    bundle = Bundle(path)
    run = ours.train(path)
    if run is None:
        raise SystemExit(f"{model} did not finish")
    losses = list(plain_losses(ours.job, ours.captured.data, steps))
    equal = losses == [s["loss"] for s in run.steps] and run.digest == digest(ours.job, list(bundle.manifest.state))
    plan = bundle.plans[0][bundle.manifest.graphs[0]]
    count = {a: sum(d.action is a for d in plan.decisions) for a in Action}
    return Row(
        model,
        optimizer,
        captured_s,
        plan_s,
        len(msgpack.packb(pack_plan(plan))),
        count[Action.PAGE],
        count[Action.RECOMPUTE],
        run.planned_peak_bytes / 2**20,
        run.peak_bytes / 2**20,
        share,
        equal,
    )


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="against plain PyTorch, same batches")
    for column in (
        "model", "optimizer", "capture + profile s", "plan + trials s", "plan B", "paged", "recomputed", "share", "planned MiB",
        "measured MiB", "equal to the bit",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.model,
            r.optimizer,
            f"{r.capture_profile_s:.0f}",
            f"{r.plan_s:.0f}",
            str(r.plan_bytes),
            str(r.paged),
            str(r.recomputed),
            f"{r.share:.1f}",
            f"{r.planned_mib:.0f}",
            f"{r.measured_mib:.0f}",
            "yes" if r.equal else "NO",
        )
    table_console(120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
