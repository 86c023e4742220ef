"""How `plan` makes a bundle: what is captured, measured, chosen and tried, in this order, as the command line says."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.cli.devices_and_plots import too_slow
from port_agent.cli.plan.dividing import divide_among_teams, divide_with_device
from port_agent.cli.plan.machine import PlanningMachine, planning_machine, planning_peers
from port_agent.cli.plan.measuring import (
    Captured,
    Costs,
    StepPieces,
    captured_of,
    compared_steps_of,
    costs_of,
    sparse_of,
    step_pieces,
)
from port_agent.system.torch_loading import uncollected

if TYPE_CHECKING:
    from port_agent.cli.progress import Spent
    from port_agent.prepare.making.bundle import Made
    from port_agent.prepare.making.trial import TrialWorkers
    from port_agent.prepare.peers import PlanningPeers
    from port_agent.prepare.placement.device_watts import DeviceWatts
    from port_agent.prepare.progress import Progress
    from port_agent.prepare.sparse import SparseJob
    from port_planner.deadline import Pace
    from port_planner.ir.costs import CostTable, DeviceCosts
    from port_planner.ir.graph import StepGraph
    from port_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning made: the bundle, what is trained, seconds of a step's operators by the numbers of threads tried.

    `left_whole`: operators that did not give the same bits in pieces, and where that showed. `spent`: what each stage took. `peers`: what
    paired devices did for it, and why no more. `step_s_by_device`: where operators were divided, seconds of a step's by the kinds of devices
    that run them all. `drawn`: what a device beside the CPU draws, where a meter sees it.
    """

    made: "Made"
    sparse: "SparseJob | None"
    step_s: Mapping[int, float]
    left_whole: tuple[str, ...]
    spent: "Mapping[str, Spent]"
    peers: list[str]
    step_s_by_device: Mapping[str, float]
    drawn: "DeviceWatts | None"


def make_bundle_of(arguments: argparse.Namespace, out: Path) -> Planned:
    """Make the bundle within the budget that it is planned for.

    A job that cannot be followed with the same numbers takes plain PyTorch's memory.
    """
    machine = planning_machine(arguments)  # before torch: what it refuses takes no seconds
    with uncollected():
        from port_agent.follow.budget import NotFollowedError
        from port_agent.prepare.within_budget import within_budget

    try:
        with within_budget(arguments.ram, machine.page_dir) as make_room:
            return _planned(arguments, out, machine, make_room)
    except NotFollowedError:
        return _planned(arguments, out, machine, lambda: None)


_STAGES = ("capture", "profile", "flash", "analyse", "compare", "follow", "plan", "try")
"""What the bar shows; `follow`: plain PyTorch's first steps."""


def _planned(
    arguments: argparse.Namespace, out: Path, machine: PlanningMachine, make_room: Callable[[], None]
) -> Planned:
    """Capture, measure, choose what is trained where that was asked for, and plan; show how far it is.

    `make_room`: gives back memory before a search, and what searches left before tensors come again.
    """
    from port_agent.cli.progress import StageBar
    from port_agent.prepare.bench.bench import Bench
    from port_agent.prepare.making.trial import TrialWorkers
    from port_agent.prepare.slices.choosing import again_with_base

    peers = planning_peers(arguments)
    with StageBar(_STAGES, quiet=arguments.json) as bar:
        with Bench(arguments.ram) as bench:
            captured = captured_of(arguments, bench, bar.update)
            costs = costs_of(arguments, captured, machine, bench, peers, bar.update)
            make_room()
            sparse = sparse_of(arguments, captured, costs, bar.update) if arguments.sparse_update else None
            first: StepPieces | None = step_pieces(
                arguments, captured, costs, machine, bench, sparse, bar.update, make_room
            )

        def make(device: "DeviceCosts") -> "tuple[StepPieces, Made, Mapping[str, float]]":
            nonlocal first
            pieces, first, found = first, None, replace(costs, device=device)
            if pieces is None:
                with Bench(arguments.ram) as bench:
                    pieces = step_pieces(arguments, captured, found, machine, bench, sparse, bar.update, make_room)
            make_room()
            with closing(TrialWorkers(costs.choice.threads)) as workers:
                workers.load()
                return pieces, *_made(
                    arguments, out, captured, found, machine, pieces, peers, bar.update, make_room, workers
                )

        pieces, made, by_device = again_with_base(make, costs.device)
    told = peers.told() if peers is not None else []
    return Planned(made, sparse, costs.choice.step_s, pieces.sliced.left_whole, bar.spent, told, by_device, costs.drawn)


def _made(
    arguments: argparse.Namespace, out: Path, captured: Captured, costs: Costs, machine: PlanningMachine, pieces: StepPieces,
    peers: "PlanningPeers | None", progress: "Progress", make_room: Callable[[], None], workers: "TrialWorkers",
) -> "tuple[Made, Mapping[str, float]]":  # fmt: skip
    """Follow plain PyTorch's first steps, plan, try the plan beside them with `workers`, and write; raise what says why that cannot be.

    Where operators are divided, return seconds of a step by single device, too.
    """
    from port_agent.prepare.device_room import in_device_room
    from port_agent.prepare.frozen_weights.files import with_weight_files
    from port_agent.prepare.making import bundle
    from port_agent.prepare.reference import with_reference
    from port_agent.prepare.whole_updates import with_whole_update
    from port_planner import make_bundle
    from port_planner.deadline import DeadlineError
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.ir.costs import CostTable
    from port_planner.ir.plan import Plan
    from port_planner.search.plan_problem import plan_problem

    device, measured, limits, pace = costs.device, pieces.measured, pieces.limits, captured.pace
    computing_bytes = captured.pools.computing_bytes
    asked = {"strategy": arguments.strategy, "time_limit_s": arguments.time_limit, "limits": limits}
    progress("follow", 0.0)
    prepared = with_weight_files(pieces.sliced.prepared)
    follow = partial(with_reference, prepared, compared_steps_of(arguments, captured.job))
    prepared = in_device_room(follow, "following plain PyTorch", captured.job, captured.backend, captured.pools)
    by_device: Mapping[str, float] = {}
    if captured.teams:
        prepared, measured, by_device = divide_among_teams(
            arguments, captured, costs, machine, prepared, measured, progress
        )
    elif arguments.place is not None:
        prepared, measured, device, by_device = divide_with_device(
            arguments, captured, costs, pieces, prepared, progress
        )
    make_room()
    progress("plan", 0.0)
    if limits.step_s is None and limits.written_bytes is None:  # those are limits of one batch
        quick = make_bundle.default_planner(strategy="greedy", time_limit_s=arguments.time_limit)
        prepared, measured = with_whole_update(prepared, measured, device, computing_bytes, quick)
    planner = make_bundle.default_planner(**asked)
    if peers is not None:
        planner = peers.planner(planner, partial(plan_problem, **asked))
    try:
        made = bundle.make(
            out, prepared, measured, device, arguments.ram, device_bytes=captured.pools.device_bytes, planner=planner,
            page_dir=machine.page_dir, scratch_dirs=machine.scratch_dirs, threads=costs.choice.threads, progress=progress,
            wide=arguments.frontier, estimated=arguments.board is not None, limits=limits, make_room=make_room, workers=workers,
        )  # fmt: skip
    except make_bundle.InfeasibleError as error:
        error.left_whole = pieces.sliced.left_whole
        graph, table = next(iter(prepared.graphs.values())), CostTable(device, measured.ops[0])
        _write_model(arguments, graph, table, Plan(ram_bytes=computing_bytes), pace)
        if pace is None or error.fastest_seconds is None:
            raise
        raise DeadlineError(too_slow(graph, table, pace, computing_bytes, error.fastest_seconds)) from error
    if arguments.write_model is not None:
        written, main = Bundle(out), made.manifest.main_graph
        _write_model(arguments, written.graphs[main], written.costs[main], written.plans[0][main], pace)
    return made, by_device


def _write_model(
    arguments: argparse.Namespace, graph: "StepGraph", costs: "CostTable", plan: "Plan", pace: "Pace | None"
) -> None:
    """Write the planning model where that was asked for."""
    if arguments.write_model is not None:
        from port_planner.search.written_model import write_model

        deadline_s = None if pace is None else pace.seconds_per_step
        write_model(arguments.write_model, graph, costs, plan, deadline_s=deadline_s)
