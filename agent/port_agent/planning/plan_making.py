"""How `plan` makes a bundle: what is captured, measured, chosen and dry-run, in this order."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from port_agent.planning.dividing import divide_among_teams, divide_with_device
from port_agent.planning.machine import PlanMachine, plan_machine, plan_peers
from port_agent.planning.measuring import (
    CapturedStep,
    Costs,
    StepTiling,
    captured_of,
    compared_steps_of,
    costs_of,
    sparse_of,
    step_tiling,
)
from port_agent.planning.pace import too_slow
from port_agent.planning.request import PlanRequest
from port_agent.planning.stage_clock import StageClock, StageTime
from port_agent.system.torch_loading import uncollected
from port_planner.script_loading import imports_kept

if TYPE_CHECKING:
    from port_agent.prepare.making.bundle_maker import BundleReport
    from port_agent.prepare.measurement.dry_run import DryRunWorkers
    from port_agent.prepare.measurement.progress import Progress
    from port_agent.prepare.peers import PlanPeers
    from port_agent.prepare.placement.device_watts import DeviceWatts
    from port_agent.prepare.sparse import SparseJob
    from port_planner.deadline import Pace
    from port_planner.ir.bundle.manifest import Manifest, PlainRun
    from port_planner.ir.costs import CostTable, DeviceCosts
    from port_planner.ir.graph import StepGraph
    from port_planner.ir.plan import Plan
    from port_planner.make_bundle import CapturedJob
    from port_planner.profiling.operator_profile import MeasuredCosts


STAGES = ("capture", "profile", "flash", "analyse", "compare", "follow", "plan", "try", "referee")
"""Stages of progress, in this order.

`follow`: plain PyTorch's first steps. `referee`: the script alone, and the bundle beside it.
"""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The result of planning: the `bundle`, its `manifest`, and what was measured on the way."""

    bundle: Path
    manifest: "Manifest"
    measured_peak_bytes: int
    """Peak of the process in the dry run, in bytes."""
    measured_device_bytes: int
    """Peak of a device's own memory in the dry run, in bytes."""
    sparse: "SparseJob | None"
    """The set of trained weights that was chosen, if `--sparse-update` was requested."""
    step_s_by_threads: Mapping[int, float]
    """Seconds of a step's operators, by the numbers of threads that were tried."""
    left_whole: tuple[str, ...]
    """Operators whose tiles did not give the same bits, and where that was found."""
    stages: Mapping[str, StageTime]
    """Time that each of `STAGES` took."""
    peers: tuple[str, ...]
    """Contributions of paired devices to the plan, and why there were no more."""
    step_s_by_device: Mapping[str, float]
    """Seconds of a step on each kind of device alone, if operators were divided between devices."""
    device_watts: "DeviceWatts | None"
    """The watts of a device other than the CPU, if a meter measures them."""
    epochs: int
    """Passes over the data for which it was planned."""
    planning_s: float


def plan(request: PlanRequest, progress: "Progress" = lambda stage, share: None) -> PlanReport:
    """Plan a script, write its bundle and return a report; `progress` is called with a stage and the share done.

    Planning itself stays within the budget, except for a job that cannot be intercepted with the same numbers, which
    takes plain PyTorch's memory. The script finds the modules that plain Python finds, and afterwards this process
    imports as before. Raises RequestError for settings that exclude each other, JobError and ScriptError for the
    script, InfeasibleError and DeadlineError if nothing fits, and further PortErrors with their remedies.
    """
    clock = StageClock(progress, STAGES[0])
    machine = plan_machine(request)  # before torch is loaded: a rejection then takes no seconds
    with uncollected():
        from port_agent.intercept.budget import UnsupportedError
        from port_agent.prepare.measurement.within_budget import within_budget

    with imports_kept():
        try:
            with within_budget(request.ram_bytes, machine.page_dir) as make_free:
                return _planned(request, clock, machine, make_free)
        except UnsupportedError:
            return _planned(request, clock, machine, lambda: None)


def _planned(
    request: PlanRequest, progress: StageClock, machine: PlanMachine, make_free: Callable[[], None]
) -> PlanReport:
    """Capture, measure, choose what is trained if requested, and plan.

    `make_free`: frees memory before a search, and what searches have left over before tensors are needed again.
    """
    from port_agent.prepare.making.tried_floor import confirm_floor
    from port_agent.prepare.measurement.dry_run import DryRunWorkers
    from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
    from port_agent.prepare.pools import Pools
    from port_agent.prepare.tiling.choice import again_with_base
    from port_planner.make_bundle import InfeasibleError

    peers = plan_peers(request)
    with MeasurementWorker(request.ram_bytes) as measurer:
        recorded = captured_of(request, measurer, progress)
        costs = costs_of(request, recorded, machine, measurer, peers, progress)
        make_free()
        sparse = sparse_of(request, recorded, costs, progress) if request.sparse_update else None
        first: StepTiling | None = step_tiling(request, recorded, costs, machine, measurer, sparse, progress, make_free)

    def make(
        device: "DeviceCosts",
        is_last: bool,
        request: PlanRequest = request,
        recorded: CapturedStep = recorded,
        *,
        unpublished: bool = False,
    ) -> "tuple[StepTiling, BundleReport, Mapping[str, float]]":
        nonlocal first
        tiling, first, found = first, None, replace(costs, device=device)
        if tiling is None:
            with MeasurementWorker(request.ram_bytes) as measurer:
                tiling = step_tiling(request, recorded, found, machine, measurer, sparse, progress, make_free)
        make_free()
        with closing(DryRunWorkers(costs.choice.threads)) as workers:
            workers.load()
            job = _Job(request, recorded, found, machine, tiling, make_free, is_last, unpublished)
            return tiling, *_made(job, None if unpublished else peers, progress, workers)

    def accept(ram_bytes: int, held_bytes: int) -> None:
        """Make a bundle for another budget, up to its dry run, as the next run with that budget does."""
        other = replace(request, ram_bytes=ram_bytes, strategy="greedy", iterations=None, write_model=None)
        device = replace(costs.device, base_bytes=held_bytes)
        make(device, True, other, replace(recorded, pools=Pools(ram_bytes)), unpublished=True)

    try:
        tiling, made, by_device = again_with_base(make, costs.device)
    except InfeasibleError as refusal:
        if sparse is None and request.place is None:
            confirm_floor(refusal, accept)
        raise
    stages = progress.taken()
    return PlanReport(
        bundle=request.out, manifest=made.manifest, measured_peak_bytes=made.measured_peak_bytes,
        measured_device_bytes=made.measured_device_bytes, sparse=sparse, step_s_by_threads=costs.choice.step_s,
        left_whole=tiling.sliced.left_whole, stages=stages, peers=tuple(peers.report()) if peers is not None else (),
        step_s_by_device=by_device, device_watts=costs.drawn, epochs=request.epochs or recorded.job.epochs, planning_s=sum(taken.wall_s for taken in stages.values()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Job:
    """What is known about a job when its plans are made."""

    request: PlanRequest
    recorded: CapturedStep
    costs: Costs
    machine: PlanMachine
    tiling: StepTiling
    make_free: Callable[[], None]
    is_last: bool
    """Whether no other tiling is planned if this one does not fit."""
    unpublished: bool
    """Whether only to find out that a plan keeps within the budget."""


def _made(
    job: _Job, peers: "PlanPeers | None", progress: "Progress", workers: "DryRunWorkers"
) -> "tuple[BundleReport, Mapping[str, float]]":
    """Run plain PyTorch's first steps, plan, run the plan with `workers` in comparison, and write the bundle.

    If operators are divided, also return the seconds of a step on each single device. Raises an error with the
    reason if this is impossible.
    """
    from port_agent.prepare.device_headroom import within_device
    from port_agent.prepare.frozen_weights.files import with_weight_files
    from port_agent.prepare.making import bundle_maker
    from port_agent.prepare.making.bundle_file import BundleFile
    from port_agent.prepare.reference import with_expected_results
    from port_agent.prepare.whole_updates import with_whole_update
    from port_planner import make_bundle
    from port_planner.deadline import DeadlineError
    from port_planner.ir.bundle.bundle import Bundle
    from port_planner.ir.costs import CostTable
    from port_planner.ir.plan import Plan
    from port_planner.search.plan_problem import plan_problem

    request, recorded, tiling = job.request, job.recorded, job.tiling
    limits, computing_bytes = tiling.limits, recorded.pools.computing_bytes
    asked: dict[str, Any] = {"strategy": request.strategy, "time_limit_s": request.time_limit_s, "limits": limits}
    progress("follow", 0.0)
    captured = with_weight_files(tiling.sliced.captured)
    follow = partial(with_expected_results, captured, compared_steps_of(request, recorded.job))
    captured = within_device(follow, "running plain PyTorch", recorded.job, recorded.backend, recorded.pools)
    captured, measured, device, by_device = _divided(job, captured, progress)
    job.make_free()
    progress("plan", 0.0)
    if limits.step_s is None and limits.written_bytes is None:  # those are limits of one batch
        quick = make_bundle.default_planner(strategy="greedy", time_limit_s=request.time_limit_s)
        captured, measured = with_whole_update(captured, measured, device, computing_bytes, quick)
    planner = make_bundle.default_planner(**asked, iterations=request.iterations)
    if peers is not None:
        planner = peers.planner(planner, partial(plan_problem, **asked))
    options = bundle_maker.MakeOptions(
        recorded.pools, (job.machine.page_dir, *job.machine.scratch_dirs), planner, request.frontier, is_last=job.is_last,
        run_alone=partial(_alone, job, captured, CostTable(device, measured.ops[0])), unpublished=job.unpublished,
    )  # fmt: skip
    draft = BundleFile.beside(
        request.out, captured, job.costs.choice.threads, estimated=request.board is not None, limits=limits,
        make_free=job.make_free,
    )  # fmt: skip
    try:
        made = bundle_maker.make(request.out, draft, measured, device, options, progress, workers)
    except make_bundle.InfeasibleError as error:
        error.left_whole = tiling.sliced.left_whole
        graph, table = next(iter(captured.graphs.values())), CostTable(device, measured.ops[0])
        _write_model(request, graph, table, Plan(ram_bytes=computing_bytes), recorded.pace)
        if recorded.pace is None or error.fastest_seconds is None:
            raise
        raise DeadlineError(too_slow(graph, table, recorded.pace, computing_bytes, error.fastest_seconds)) from error
    if request.write_model is not None:
        written, main = Bundle(request.out), made.manifest.main_graph
        _write_model(request, written.graphs[main], written.costs[main], written.plans[0][main], recorded.pace)
    return made, by_device


def _alone(job: _Job, captured: "CapturedJob", costs: "CostTable") -> "PlainRun":
    """Run the script alone if its results are needed; `costs`: costs of the first graph."""
    from port_agent.prepare.referee.plain_run import Script, run_alone
    from port_planner.ir.bundle.manifest import PlainRun
    from port_planner.ir.lowering.lower import lower
    from port_planner.ir.plan import Plan
    from port_planner.make_bundle import steps_and_updates

    request = job.request
    if not compared_steps_of(request, job.recorded.job):
        return PlainRun(unchecked="not requested (--verify 0, --allow reordered)")
    if request.sparse_update:
        return PlainRun(unchecked="fewer parameters are trained than by the script (--sparse-update)")
    peak_bytes = lower(next(iter(captured.graphs.values())), costs, Plan(), check_budget=False).peak_bytes
    _, updates = steps_and_updates(captured.job, request.epochs or captured.job.epochs)
    script = Script(
        request.script, job.machine.page_dir, request.ram_bytes, job.costs.choice.threads, peak_bytes, updates
    )
    return run_alone(captured, script)


def _divided(
    job: _Job, captured: "CapturedJob", progress: "Progress"
) -> "tuple[CapturedJob, MeasuredCosts, DeviceCosts, Mapping[str, float]]":
    """Divide the operators if requested; also return the seconds of a step on each single device."""
    request, recorded, costs, tiling = job.request, job.recorded, job.costs, job.tiling
    if recorded.teams:
        captured, measured, by_device = divide_among_teams(
            request, recorded, costs, job.machine, captured, tiling.measured, progress
        )
        return captured, measured, costs.device, by_device
    if request.place is not None:
        return divide_with_device(request, recorded, costs, tiling, captured, progress)
    return captured, tiling.measured, costs.device, {}


def _write_model(
    request: PlanRequest, graph: "StepGraph", costs: "CostTable", plan: "Plan", pace: "Pace | None"
) -> None:
    """Write the planning model if requested."""
    if request.write_model is not None:
        from port_planner.search.written_model import write_model

        deadline_s = None if pace is None else pace.seconds_per_step
        write_model(request.write_model, graph, costs, plan, deadline_s=deadline_s)
