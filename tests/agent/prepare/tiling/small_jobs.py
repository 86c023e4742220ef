"""Jobs small enough to be cut into tiles within a test, what they cost, and where they are compared."""

from pathlib import Path

import torch

from port_agent.prepare.tiling.choice import choose_tiling
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, CutTarget, TiledJob
from port_planner import make_bundle
from port_planner.ir.bundle.manifest import NO_LIMITS
from port_planner.ir.costs import DeviceCosts, OpCost
from port_planner.ir.graph import StepGraph
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.tiling.chains import touched_bytes
from tests.agent.exactness import OPTIMIZERS
from tests.agent.jobs_small import make_job
from tests.planner.tiling.adapted_step import ROWS, adapted_batch, adapted_loss, trained

ROOM = ComparisonLimits(1 << 30, Path("/var/tmp"), 1)


GREEDY = make_bundle.default_planner(strategy="greedy", time_limit_s=5.0)


def whole() -> tuple[make_bundle.CapturedJob, MeasuredCosts]:
    made = make_bundle.prepare(make_job())
    tables = tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in graph.ops) for graph in made.graphs.values())
    return made, MeasuredCosts(tables, 100, 10)


def chosen(
    recorded: TiledJob,
    presplit: TiledJob,
    device: DeviceCosts,
    ram_bytes: int,
    planner: make_bundle.PlanFunction = GREEDY,
) -> TiledJob:
    return choose_tiling(recorded, presplit, CutTarget(device, ram_bytes, ROOM, lambda *_: None), planner, NO_LIMITS)


def adapted_job(model: torch.nn.Module, rows: int = ROWS) -> TrainingJob:
    columns = [torch.cat(c) for c in zip(adapted_batch(0), adapted_batch(1), strict=True)]
    return TrainingJob(model, adapted_loss, OPTIMIZERS["adamw"](trained(model)), columns, rows, eval_data=columns)


def ops_by_bytes(graph: StepGraph) -> tuple[OpCost, ...]:
    """Return costs by what operators touch, and something for each call."""
    seconds = [1e-5 + touched_bytes(graph, i) / 2e9 for i in range(len(graph.ops))]
    return tuple(OpCost(s, 0, s) for s in seconds)
