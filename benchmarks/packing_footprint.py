"""Measure how much less activation memory a step takes whose idle tensors are packed, all other fates off.

    python -m benchmarks.packing_footprint [resnet18 vgg16bn] [--batch 32] [--steps 3] [--json]

On real CIFAR-10 images. Each step is planned twice: everything kept, and every tensor packed that the trial found worth it
(strategy "bittrain"). Both run in a worker of their own and must end with the same state to the bit. "waiting" is what BitTrain
counts: activations that lie between the forward and the backward pass. "peak" is what the step holds at its fullest moment beside
weights, buffers, optimizer state and batch, gradients and workspace included; "measured" the same by the worker's peak resident
memory. BitTrain's figure is its own (arXiv 2110.15362): at the activations' own sparsity, on other nets and a GPU.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from agent.prepare import bundle
from benchmarks.mcu_tasks import DATA
from benchmarks.ours import Ours
from planner import make_bundle
from planner.ir.costs import Codec, CostTable, by_version
from planner.ir.graph import Phase, Role, StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.plan import Plan
from planner.problem.coarsen import coarsen
from planner.search.recipes import pack_everything

ROOM = 1 << 40
"""More than any machine has: nothing is packed for want of room."""
BITTRAIN_PERCENT = 34.0
"""Less activation memory, as BitTrain reports it at the activations' own sparsity."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model, everything kept and everything packed."""

    model: str
    batch: int
    density: float
    """Of what is packed as a bitmap, weighted by bytes."""
    waiting_kept_bytes: int
    waiting_packed_bytes: int
    kept_bytes: int
    packed_bytes: int
    kept_measured_bytes: int
    packed_measured_bytes: int
    waiting_saved_percent: float
    saved_percent: float
    saved_measured_percent: float
    more_seconds_percent: float
    overflows: int
    equal: bool


def main() -> None:
    """Run the benchmark and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["resnet18", "vgg16bn"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(model, Path(folder), arguments.batch, arguments.steps) for model in arguments.models]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)


def measure(model: str, folder: Path, batch: int, steps: int) -> Row:
    """Return the row of one model."""
    ours = on_images(model, folder, batch, steps)
    graph, name = ours.prepared.graphs["step"], f"{model}-kept.port"
    kept = CostTable(ours.device, ours.measured.ops[0])
    found = bundle.trial(written(ours, folder / name, kept, Plan()), (folder,), 1, probe_packing=True)
    costs = replace(kept, packings=found.packings["step"])
    coarse = coarsen(graph, costs, ram_bytes=ROOM)
    plan = coarse.plan(pack_everything(coarse.problem), ROOM, "bittrain")
    runs = [ours.train(written(ours, folder / f"{model}-{p.strategy}.port", costs, p)) for p in (Plan(), plan)]
    if runs[0] is None or runs[1] is None:
        raise SystemExit(f"{model}: a run failed")
    fixed = sum(s.nbytes for s in graph.storages if s.role is not Role.TEMPORARY) + ours.device.base_bytes
    planned = [lower(graph, costs, p).peak_bytes - fixed for p in (Plan(), plan)]
    unplanned = runs[0].peak_bytes - runs[0].planned_peak_bytes
    measured = [run.peak_bytes - unplanned - fixed for run in runs if run is not None]
    seconds = [min(step["cpu_s"] for step in run.steps) for run in runs if run is not None]
    sparse = [
        (graph.storages[p.storage].nbytes, p.density)
        for p in lower(graph, costs, plan).packings
        if p.codec is Codec.BITMAP
    ]
    between = [waiting(graph, costs, p) for p in (Plan(), plan)]
    return Row(
        model, batch, sum(n * d for n, d in sparse) / sum(n for n, _ in sparse), *between, *planned, *measured,
        100 * (1 - between[1] / between[0]), 100 * (1 - planned[1] / planned[0]), 100 * (1 - measured[1] / measured[0]), 100 * (seconds[1] / seconds[0] - 1),
        sum(step["packing_overflows"] for step in runs[1].steps), runs[0].digest == runs[1].digest,
    )  # fmt: skip


def waiting(graph: StepGraph, costs: CostTable, plan: Plan) -> int:
    """Return the bytes of activations between the passes: what was made before the loss is done and is read after it."""
    last = max(i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD)
    costs_of = by_version(costs.packings)
    packed = {
        d.storage: costs_of[d.storage, sum(w <= d.after for w in graph.writers[d.storage])].reserved_bytes
        for d in plan.decisions
        if d.after <= last < d.before
    }
    return sum(
        packed.get(s, storage.nbytes)
        for s, (storage, uses) in enumerate(zip(graph.storages, graph.uses, strict=True))
        if storage.role is Role.TEMPORARY and uses and uses[0] <= last < uses[-1]
    )


def on_images(model: str, folder: Path, batch: int, steps: int) -> Ours:
    """Return a model of the benchmarks with real images for its data."""
    images = np.load(DATA / "cifar10_train4k_test1k.npz")
    count = batch * steps
    x = torch.from_numpy(images["train_images"][:count]).permute(0, 3, 1, 2).float() / 255
    x = ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)).contiguous()
    y = torch.from_numpy(images["train_labels"][:count]).long()
    return Ours(model, folder, "sgd", batch, steps=steps, size=32, data=[x, y])


def written(ours: Ours, path: Path, costs: CostTable, plan: Plan) -> Path:
    """Write the bundle of one plan; return its path."""
    graphs = ours.prepared.graphs
    made = replace(plan, ram_bytes=ROOM, peak_bytes=lower(graphs["step"], costs, plan).peak_bytes)
    make_bundle.write(path, ours.prepared, [{"step": made}], {"step": costs}, [ROOM], threads=1)
    return path


def print_table(rows: list[Row]) -> None:
    """Print the rows for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="activation memory of a step, every tensor packed that can be, MiB")
    headings = (
        "model",
        "density",
        "waiting",
        "packed",
        "less",
        "BitTrain",
        "peak",
        "measured",
        "CPU time",
        "overflows",
        "equal",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        table.add_row(
            f"{row.model} b{row.batch}", f"{row.density:.2f}", f"{row.waiting_kept_bytes / 2**20:.1f}",
            f"{row.waiting_packed_bytes / 2**20:.1f}", f"{row.waiting_saved_percent:.1f} %", f"{BITTRAIN_PERCENT:.0f} %",
            f"-{row.saved_percent:.1f} %", f"-{row.saved_measured_percent:.1f} %", f"{row.more_seconds_percent:+.1f} %",
            str(row.overflows), "yes" if row.equal else "NO",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
