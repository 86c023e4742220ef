"""Measure how much less activation memory a step takes if idle tensors are packed and nothing else is done with them.

    python -m benchmarks.packing_footprint [resnet18 vgg16bn] [--batch 32] [--steps 3]
        [--pruned 0.9] [--pruning-steps 300] [--json]

On real CIFAR-10 images. Each step is planned twice: everything kept, and every tensor packed that the trial found worth
it (strategy "bittrain"). Both run in a worker of their own and must end with the same state to the bit. Two counts:

- "inputs": what convolutions and linear layers keep of their inputs. This is what BitTrain packs (arXiv 2110.15362; in
  its published code the input of each convolution, nothing else), so its figures are given next to it: up to 34 % less
  at 50 % sparsity, up to 56 % where pruning made more than 70 %, of its own nets.
- "waiting": all activations that lie between the forward and the backward pass. What norms keep of theirs is half of
  that and dense, so no lossless packing of zeros takes much more than a quarter off.

"peak" is what the step holds at its fullest moment besides weights, buffers, optimizer state and batch, gradients and
workspace included; "measured" the same by the worker's peak resident memory. `--pruned`: a second row for each model,
which first trained that many steps in plain PyTorch while this share of its weights was pruned by magnitude
(`port_planner.ir.bundle.pruning_schedule`), and whose workers keep pruning.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.mcu_tasks import DATA
from benchmarks.ours import Ours
from benchmarks.tables import table_console
from port_agent.prepare.measurement.dry_run import DryRunWorkers
from port_planner import make_bundle
from port_planner.ir.bundle.pruning_schedule import Pruning
from port_planner.ir.costs import Codec, CostTable, by_version
from port_planner.ir.graph import Phase, Role, StepGraph, references
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import TrainingJob
from port_planner.problem.coarsen import coarsen
from port_planner.search.heuristics import pack_everything

ROOM = 1 << 40
"""More memory than any machine has: nothing is packed for lack of memory."""
BITTRAIN_PERCENT, BITTRAIN_PRUNED_PERCENT = 34, 56
"""Less memory, as BitTrain reports it: up to that much at the activations' own sparsity, and where
pruning made them sparser.
"""
LEARNING_RATE = 0.02
"""Learning rate of a model that is pruned while it trains."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model, everything kept and everything packed."""

    model: str
    batch: int
    pruned: float
    """Share of the weights that are zero."""
    density: float
    """Of what is packed as a bitmap, weighted by bytes."""
    inputs_kept_bytes: int
    inputs_packed_bytes: int
    """Packed bytes of what convolutions and linear layers keep of their inputs, which is what BitTrain packs."""
    waiting_kept_bytes: int
    waiting_packed_bytes: int
    kept_bytes: int
    packed_bytes: int
    kept_measured_bytes: int
    packed_measured_bytes: int
    inputs_saved_percent: float
    waiting_saved_percent: float
    saved_percent: float
    saved_measured_percent: float
    more_seconds_percent: float
    overflows: int
    equal: bool


def main() -> None:
    """Run the benchmark and print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", default=["resnet18", "vgg16bn"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pruned", type=float, help="share of the weights pruned before and in a second row")
    parser.add_argument("--pruning-steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    prunings = [None] if arguments.pruned is None else [None, Pruning(arguments.pruned, arguments.pruning_steps)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(model, Path(folder), arguments.batch, arguments.steps, pruning)
            for model in arguments.models
            for pruning in prunings
        ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)


def measure(model: str, folder: Path, batch: int, steps: int, pruning: Pruning | None = None) -> Row:
    """Return the row of one model; it is pruned before if a schedule says so."""
    ours = on_images(model, folder, batch, steps, pruning)
    graph, name = ours.captured.graphs["step"], f"{model}-kept.port"
    kept = CostTable(ours.device, ours.measured.ops[0])
    found = DryRunWorkers(1).dry_run(written(ours, folder / name, kept, Plan()), (folder,), probe_packing=True)
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
    inputs = [waiting(graph, costs, p, layer_inputs(graph)) for p in (Plan(), plan)]
    return Row(
        model=model,
        batch=batch,
        pruned=0.0 if pruning is None else pruning.sparsity,
        density=sum(n * d for n, d in sparse) / sum(n for n, _ in sparse),
        inputs_kept_bytes=inputs[0],
        inputs_packed_bytes=inputs[1],
        waiting_kept_bytes=between[0],
        waiting_packed_bytes=between[1],
        kept_bytes=planned[0],
        packed_bytes=planned[1],
        kept_measured_bytes=measured[0],
        packed_measured_bytes=measured[1],
        inputs_saved_percent=100 * (1 - inputs[1] / inputs[0]),
        waiting_saved_percent=100 * (1 - between[1] / between[0]),
        saved_percent=100 * (1 - planned[1] / planned[0]),
        saved_measured_percent=100 * (1 - measured[1] / measured[0]),
        more_seconds_percent=100 * (seconds[1] / seconds[0] - 1),
        overflows=sum(step["packing_overflows"] for step in runs[1].steps),
        equal=runs[0].digest == runs[1].digest,
    )


LAYERS = ("aten::convolution", "aten::addmm", "aten::mm", "aten::linear")


def layer_inputs(graph: StepGraph) -> frozenset[int]:
    """Return the storages that convolutions and linear layers read in the forward pass."""
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD and op.name in LAYERS)
    return frozenset(graph.values[v].storage for op in forward for a in op.args for v in references(a))


def waiting(graph: StepGraph, costs: CostTable, plan: Plan, among: frozenset[int] | None = None) -> int:
    """Return the bytes of activations between the passes: made before the loss is done, and read after it.

    `among`: these storages alone.
    """
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
        if (among is None or s in among) and storage.role is Role.TEMPORARY and uses and uses[0] <= last < uses[-1]
    )


def on_images(model: str, folder: Path, batch: int, steps: int, pruning: Pruning | None = None) -> Ours:
    """Return a model of the benchmarks with real images for its data, trained on more of them
    while a schedule prunes it.
    """
    images = np.load(DATA / "cifar10_train4k_test1k.npz")
    x = torch.from_numpy(images["train_images"]).permute(0, 3, 1, 2).float() / 255
    x = ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)).contiguous()
    y = torch.from_numpy(images["train_labels"]).long()

    def change(job: TrainingJob) -> None:
        if pruning is not None:
            prune(job, pruning, x, y)

    count = batch * steps
    return Ours(model, folder, "sgd", batch, steps=steps, size=32, data=[x[:count], y[:count]], change=change)


def prune(job: TrainingJob, pruning: Pruning, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a job's model on these images to the end of a schedule, in plain PyTorch; the job keeps pruning as much."""
    weights = [p for p in job.model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(job.model.parameters(), LEARNING_RATE, momentum=0.9)
    thresholds = [0.0] * len(weights)
    draw = torch.Generator().manual_seed(job.seed)
    for update in range(1, pruning.end + 1):
        rows = torch.randint(0, len(x), (job.batch_size,), generator=draw)
        optimizer.zero_grad()
        job.loss_fn(job.model, x[rows], y[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            for k, weight in enumerate(weights):
                if pruning.looks(update):
                    kept = round(pruning.sparsity_at(update) * weight.numel())
                    thresholds[k] = float(weight.abs().flatten().kthvalue(max(kept, 1)).values)
                if thresholds[k]:
                    weight.masked_fill_(weight.abs() <= thresholds[k], 0.0)
    job.model.zero_grad()
    job.pruning = replace(pruning, begin=0, end=1)


def written(ours: Ours, path: Path, costs: CostTable, plan: Plan) -> Path:
    """Write the bundle of one plan; return its path."""
    graphs = ours.captured.graphs
    made = replace(plan, ram_bytes=ROOM, peak_bytes=lower(graphs["step"], costs, plan).peak_bytes)
    make_bundle.write(path, ours.captured, [{"step": made}], {"step": costs}, [ROOM], threads=1)
    return path


def print_table(rows: list[Row]) -> None:
    """Print the rows for people."""
    from rich.table import Table

    table = Table(title="activation memory of a step, every tensor packed that can be, MiB")
    headings = (
        "model",
        "pruned",
        "density",
        "inputs",
        "BitTrain",
        "waiting",
        "packed",
        "less",
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
            f"{row.model} b{row.batch}",
            f"{row.pruned:.0%}",
            f"{row.density:.2f}",
            f"-{row.inputs_saved_percent:.1f} %",
            f"-{BITTRAIN_PRUNED_PERCENT if row.pruned else BITTRAIN_PERCENT} %",
            f"{row.waiting_kept_bytes / 2**20:.1f}",
            f"{row.waiting_packed_bytes / 2**20:.1f}",
            f"{row.waiting_saved_percent:.1f} %",
            f"-{row.saved_percent:.1f} %",
            f"-{row.saved_measured_percent:.1f} %",
            f"{row.more_seconds_percent:+.1f} %",
            str(row.overflows),
            "yes" if row.equal else "NO",
        )
    table_console().print(table)


if __name__ == "__main__":
    main()
