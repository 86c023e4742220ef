"""A small real job as a bundle, made once per test run: planned for a tight budget, with
evaluation and short batches.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare.reference import with_expected_results
from port_planner import make_bundle
from port_planner.ir.bundle.data_order import epoch_order
from port_planner.ir.bundle.manifest import WHOLE_UPDATE, PlainRun
from port_planner.ir.costs import DeviceCosts, Flash, OpCost, PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.job import TrainingJob
from port_planner.problem.whole_update import whole_update
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.pareto import full_batches
from tests.agent.exactness import random_plan

torch.set_num_threads(1)

ROWS, BATCH = 22, 4

SMALL_ROOM = 24 << 10
"""Bytes for tensors in which not all of the model's weights have room at once."""


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = model(x)
    return functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


class Odd(nn.Module):
    """Tied weights, a head that no loss reaches, a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight
        self.other_head = nn.Linear(8, 3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.scratch: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(self.embed(x))) * self.scratch[0]
        return result


def next_token(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def make_job(**options: Any) -> TrainingJob:
    """Return a job with dropout, batch norm, a schedule, evaluation and a short last batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [torch.randn(ROWS, 3, 8, 8), torch.randint(0, 10, (ROWS,))]
    held_out = [torch.randn(6, 3, 8, 8), torch.randint(0, 10, (6,))]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    settings: dict[str, Any] = {"eval_data": held_out, "scheduler": scheduler, "seed": 3, **options}
    return TrainingJob(model, classify, optimizer, data, BATCH, **settings)


@functools.cache
def endless_bundle() -> Path:
    """Return the path of the same job's bundle without a schedule, whose rates are known for as
    many steps as anybody asks.
    """
    path = Path(_folder().name) / "endless.port"
    write_job(path, make_job(scheduler=None))
    return path


def unseen_row(job: TrainingJob) -> int:
    """Return a row that no recording of the step sees."""
    order: list[int] = epoch_order(job.seed, 0, ROWS).tolist()
    return next(row for row in order[BATCH:-BATCH] if row >= BATCH)


def state_on_flash(graph: StepGraph, _: int) -> Plan:
    """Return the plan that keeps large optimizer state on flash from one step's update to the next."""
    return Plan(
        tuple(
            Decision(s, graph.uses[s][-1], graph.uses[s][0], Action.PAGE)
            for s, storage in enumerate(graph.storages)
            if storage.key.startswith("state/") and storage.nbytes > 10_000 and graph.uses[s]
        )
    )


def write_job(
    path: Path,
    job: TrainingJob,
    *,
    ram_bytes: int = 1 << 40,
    seeds: tuple[int, ...] = (0, 1),
    plan: Callable[[StepGraph, int], Plan] = random_plan,
    compared: int = 5,
    scratch_targets: tuple[Flash, ...] = (),
    packs_pages: bool = False,
    remake: bool | None = None,
    room_bytes: int = SMALL_ROOM,
    packings: Callable[[StepGraph], tuple[PackingCost, ...]] = lambda graph: (),
    plain: PlainRun | None = None,
    ahead: make_bundle.Ahead | None = None,
) -> None:
    """Write the bundle of a job: one choice of plans per seed (0: keep everything), with so
    many steps of plain PyTorch.

    `remake`: with the graph of a whole update, cut into small chunks, that does or does not make
    again what a chunk needs.
    """
    captured = with_expected_results(make_bundle.prepare(job, updates=30, followed=compared, ahead=ahead), compared)
    captured = replace(captured, plain=plain or captured.plain)
    if remake is not None:
        names = [name for name, count in full_batches(captured.graphs, job.accumulate).items() for _ in range(count)]
        update = whole_update([captured.graphs[name] for name in names], room_bytes, remake=remake)
        assert update is not None
        captured = replace(captured, graphs={**captured.graphs, WHOLE_UPDATE: update.graph})
    device = DeviceCosts(
        "test",
        0,
        1.0,
        1.0,
        Flash("card", 1e8, 2e6, 1e-4, 1e-9, 1e-9, packs_pages=packs_pages),
        scratch_targets=scratch_targets,
    )
    tables = tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in g.ops) for g in captured.graphs.values())
    measured = MeasuredCosts(tables, 0, 0, packings=tuple(packings(g) for g in captured.graphs.values()))
    plans, costs = make_bundle.plan_all(captured, measured, device, 1 << 40, _keep_all)
    choices = []
    for seed in seeds:
        made = {n: plan(g, seed) if seed else plans[n] for n, g in captured.graphs.items()}
        peaks = {n: lower(captured.graphs[n], costs[n], p, check_budget=False).peak_bytes for n, p in made.items()}
        choices.append({n: Plan(p.decisions, p.order, p.sliced, ram_bytes, peaks[n]) for n, p in made.items()})
    make_bundle.write(path, captured, choices, costs, [ram_bytes] * len(seeds), threads=1)


def _keep_all(graph: Any, costs: Any, ram_bytes: int) -> Any:
    from port_planner.search.plan_step import plan_step

    return plan_step(graph, costs, ram_bytes=ram_bytes, strategy="greedy")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="port-jobs-")


@functools.cache
def small_bundle(accumulate: int = 1) -> Path:
    """Return the path of the small job's bundle; plan 0 keeps everything, plan 1 moves and rematerializes at random."""
    path = Path(_folder().name) / f"small{accumulate}.port"
    clip = 1.0 if accumulate > 1 else None
    write_job(path, make_job(accumulate=accumulate, clip_grad_norm=clip))
    return path
