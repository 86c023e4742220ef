"""A job with tiled operators, the resources for comparing them, and the cost of a plan for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
from port_agent.prepare.measurement.progress import Progress
from port_planner import make_bundle
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.graph import StepGraph
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.plan_step import base_joules
from port_planner.tiling.tilings import Tiling


@dataclass(frozen=True, slots=True)
class TiledJob:
    """A job whose graphs have tiled operators, their costs, and what stayed whole and why."""

    captured: CapturedJob
    measured: MeasuredCosts
    left_whole: tuple[str, ...]
    tiled_chains: tuple[str, ...] = ()
    """The chains that run in tiles."""
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    """The tilings from which `tiled_chains` was made, for each graph."""
    untiled: Mapping[str, StepGraph] = field(default_factory=dict)
    """The same graphs before tiling."""


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """Resources for comparing: bytes of RAM, a page directory and threads, and the process that compares."""

    ram_bytes: int
    page_dir: Path
    threads: int
    measurer: MeasurementWorker = field(default_factory=MeasurementWorker)


@dataclass(frozen=True, slots=True)
class CutTarget:
    """The target of tiling a job: a device, bytes of RAM there, and where tiles are
    compared; `progress` reports that.
    """

    device: DeviceCosts
    ram_bytes: int
    allowed: ComparisonLimits
    progress: Progress


@dataclass(frozen=True, slots=True)
class PlanCost:
    """The total cost of a plan, wear included, and whether it moves nothing."""

    sliced: TiledJob
    joules: float
    keeps_everything: bool


def cost_of_plan(
    tiled: TiledJob, device: DeviceCosts, ram_bytes: int, planner: make_bundle.PlanFunction
) -> PlanCost | None:
    """Return the cost of a plan of the main graph; None if none fits."""
    graph, costs = main_step(tiled, device)
    found = planner(graph, costs, ram_bytes).plan
    if found is None:
        return None
    return PlanCost(tiled, base_joules(costs) + found.overhead_joules, not found.decisions and not found.sliced)


def main_step(tiled: TiledJob, device: DeviceCosts) -> tuple[StepGraph, CostTable]:
    """Return the main graph, and the costs of its operators."""
    return next(iter(tiled.captured.graphs.values())), CostTable(device, tiled.measured.ops[0])


def blocked_keys(tiled: TiledJob) -> frozenset[str]:
    """Return the keys of blocks of weights, whose readers do not join chains."""
    return frozenset(key for one in tiled.captured.blocks.values() for key in (*one.rows, *one.columns))
