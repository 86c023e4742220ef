"""A job whose operators run in pieces, what may be taken while they are compared, and what a plan of it costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from port_agent.prepare.bench.bench import Bench
from port_agent.prepare.progress import Progress
from port_planner import make_bundle
from port_planner.ir.costs import CostTable, DeviceCosts
from port_planner.ir.graph import StepGraph
from port_planner.make_bundle import Prepared
from port_planner.profiling.operators import Measured
from port_planner.search.plan_step import base_joules
from port_planner.slices.choices import Cut


@dataclass(frozen=True, slots=True)
class Sliced:
    """A job whose graphs have operators in pieces, what they cost, and what was left whole and why."""

    prepared: Prepared
    measured: Measured
    left_whole: tuple[str, ...]
    in_pieces: tuple[str, ...] = ()
    """The chains that run in pieces."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By graph: what `in_pieces` was made of."""
    uncut: Mapping[str, StepGraph] = field(default_factory=dict)
    """What those graphs were before."""


@dataclass(frozen=True, slots=True)
class ComparingRoom:
    """What the process that compares may take: bytes of RAM, a directory for what has no room there, threads; and that process."""

    ram_bytes: int
    page_dir: Path
    threads: int
    bench: Bench = field(default_factory=Bench)


@dataclass(frozen=True, slots=True)
class CutTarget:
    """What a job is cut into pieces for: a device, bytes of RAM there, and where pieces are compared; `progress` follows that."""

    device: DeviceCosts
    ram_bytes: int
    room: ComparingRoom
    progress: Progress


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What a plan costs in all, wear included, and whether it moves nothing."""

    sliced: Sliced
    joules: float
    keeps_everything: bool


def cost_of_plan(sliced: Sliced, device: DeviceCosts, ram_bytes: int, planner: make_bundle.Planner) -> PlanCost | None:
    """Return what a plan of the main graph costs; None where none fits."""
    graph, costs = main_step(sliced, device)
    found = planner(graph, costs, ram_bytes).plan
    if found is None:
        return None
    return PlanCost(sliced, base_joules(costs) + found.overhead_joules, not found.decisions and not found.sliced)


def main_step(sliced: Sliced, device: DeviceCosts) -> tuple[StepGraph, CostTable]:
    """Return the main graph, and what its operators cost."""
    return next(iter(sliced.prepared.graphs.values())), CostTable(device, sliced.measured.ops[0])


def keys_in_blocks(sliced: Sliced) -> frozenset[str]:
    """Return the keys of blocks of weights, whose readers stay out of chains."""
    return frozenset(key for one in sliced.prepared.blocks.values() for key in (*one.rows, *one.columns))
