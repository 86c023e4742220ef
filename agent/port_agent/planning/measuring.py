"""What `plan` measures before it searches: the recorded step, costs of its operators and media, and the tilings to
consider.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from port_agent.planning.machine import PlanMachine, all_page_dirs, computing_place, thread_counts
from port_agent.planning.pace import wanted_pace
from port_agent.planning.placement import wanted_teams
from port_agent.planning.request import PlanRequest
from port_planner.ir.device_kinds import CPU

if TYPE_CHECKING:
    from port_agent.backend.base import Backend
    from port_agent.prepare.measurement.measurement_worker import MeasurementWorker
    from port_agent.prepare.measurement.progress import Progress
    from port_agent.prepare.peers import PlanPeers
    from port_agent.prepare.placement.device_watts import DeviceWatts
    from port_agent.prepare.pools import Pools
    from port_agent.prepare.sparse import SparseJob
    from port_agent.prepare.threads import ThreadChoice
    from port_agent.prepare.tiling.tiled_job import TiledJob
    from port_planner.deadline import Pace
    from port_planner.ir.bundle.manifest import PlannedLimits
    from port_planner.ir.costs import CostTable, DeviceCosts
    from port_planner.ir.devices.cpu_teams import CpuTeam
    from port_planner.job import TrainingJob
    from port_planner.make_bundle import CapturedJob
    from port_planner.profiling.operator_profile import MeasuredCosts


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The script's job, and its recorded step.

    `counts`: numbers of threads to measure. `pace`: pace that a deadline allows. `teams`: teams of threads among
    which operators are divided.
    """

    job: "TrainingJob"
    backend: "Backend"
    pools: "Pools"
    captured: "CapturedJob"
    prepare: "Callable[[], CapturedJob]"
    counts: tuple[int, ...]
    pace: "Pace | None"
    teams: "tuple[CpuTeam, ...]"


def captured_of(request: PlanRequest, measurer: "MeasurementWorker", progress: "Progress") -> CapturedStep:
    """Load the script's job, move it to its device, and record its step, while the `measurer` loads torch."""
    from port_agent.prepare.device_headroom import within_device
    from port_agent.prepare.referee.plain_run import run_ahead
    from port_agent.prepare.repeatable import reordered_in
    from port_agent.prepare.threads import counts_set
    from port_planner import make_bundle
    from port_planner.ir.bundle.pruning_schedule import Pruning
    from port_planner.ir.torch_device import repeat_kernels
    from port_planner.job_device import kind_of_job
    from port_planner.job_sources import load_job

    progress("capture", 0.0)
    with counts_set() as counts_of_script:
        job = load_job(request.script, all_page_dirs(request)[0])
    backend, pools = computing_place(job, request)
    repeat_kernels(backend.kind)
    on_device = backend.kind != CPU and request.place is None
    counts = thread_counts(request, set_by_script=bool(counts_of_script), on_device=on_device)
    teams = wanted_teams(request.place)
    if teams:
        counts = tuple(sorted({team.threads for team in teams if not team.cores} or {teams[0].threads}))
    if request.place is not None and kind_of_job(job) != CPU:
        counts = counts[-1:]  # what is recorded on the device does not show which number is fastest: use all cores
    epochs = request.epochs or job.epochs
    steps, updates = make_bundle.steps_and_updates(job, epochs)
    measurer.load(counts[0])
    if request.pruned_share is not None:
        job.pruning = Pruning(request.pruned_share, max(updates // 2, 1))
    ahead = partial(run_ahead, request.script, all_page_dirs(request)[0], backend.kind, counts[0])
    prepare = partial(make_bundle.prepare, job, updates=updates, followed=compared_steps_of(request, job), ahead=ahead)
    captured = within_device(prepare, "recording the step", job, backend, pools)
    reordered = reordered_in(captured.graphs.values(), allowed=request.reordered)
    progress("capture", 1.0)
    pace = wanted_pace(request.deadline_at, request.charging, epochs, steps)
    return CapturedStep(job, backend, pools, replace(captured, reordered=reordered), prepare, counts, pace, teams)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the step's operators here, and on the planned `device`, which is the same except with --board.

    `drawn`: the watts of a device other than the CPU, if a meter measures them.
    """

    choice: "ThreadChoice"
    measured: "MeasuredCosts"
    here: "DeviceCosts"
    device: "DeviceCosts"
    drawn: "DeviceWatts | None"


def costs_of(
    request: PlanRequest,
    recorded: CapturedStep,
    machine: PlanMachine,
    measurer: "MeasurementWorker",
    peers: "PlanPeers | None",
    progress: "Progress",
) -> Costs:
    """Measure the operators, with the fastest number of threads, and the media; set that number."""
    import torch

    from port_agent.prepare.making import device_costs
    from port_agent.prepare.making.packed_pages import with_packed_pages
    from port_agent.prepare.page_routes import measured_page_routes
    from port_agent.prepare.placement.device_watts import measured_device_watts
    from port_agent.prepare.pools import with_own_memory
    from port_agent.prepare.threads import fastest

    graphs = recorded.captured.graphs
    choice = fastest(
        graphs, recorded.counts, lambda count: machine.power(count).compute_watts, progress, peers, measurer
    )
    power = machine.power(choice.threads)
    measured = device_costs.by_class(graphs, choice.measured, power)
    torch.set_num_threads(choice.threads)
    here = device = device_costs.this_device(measured, machine.page_dir, choice.threads, power, progress)
    if request.board is not None:
        measured, device = device_costs.other_board(graphs, measured, here, request.board)
    device = device_costs.slower_flash(device, request.flash_read_bytes_per_s, request.flash_write_bytes_per_s)
    device = device_costs.on_medium(device, machine.medium)
    device = device_costs.with_scratch(device, machine.further, progress)
    if recorded.backend.kind != CPU:
        device = with_own_memory(device, recorded.backend, recorded.pools)
        if recorded.backend.unified:
            device = measured_page_routes(recorded.backend, machine.page_dir).applied(device)
    device = with_packed_pages(device, recorded.captured.initial_tensors)
    drawn = measured_device_watts(recorded.backend, machine.energy, recorded.pools.computing_bytes)
    if drawn is not None and request.place is None:
        device = replace(device, compute_watts=drawn.dense)
    return Costs(choice, measured, here, device, drawn)


def sparse_of(request: PlanRequest, recorded: CapturedStep, costs: Costs, progress: "Progress") -> "SparseJob":
    """Choose what is trained, and record the step again.

    The choice is made for the device that holds the model; divided operators then take no more time.
    """
    from port_agent.prepare.device_headroom import within_device
    from port_agent.prepare.placement.memories import of_the_cpu
    from port_agent.prepare.sparse import StepLimits, train_less
    from port_planner.job_device import kind_of_job

    device, ram_bytes = costs.device, recorded.pools.computing_bytes
    if kind_of_job(recorded.job) == CPU:
        device, ram_bytes = of_the_cpu(device), request.ram_bytes
    step_s = None if recorded.pace is None else recorded.pace.seconds_per_step
    choose = partial(
        train_less,
        recorded.captured,
        costs.measured,
        device,
        StepLimits(ram_bytes, step_s, request.step_joules),
        prepare=recorded.prepare,
        threads=costs.choice.threads,
        steps=request.probe_steps,
        progress=progress,
    )
    return within_device(choose, "choosing what is trained", recorded.job, recorded.backend, recorded.pools)


@dataclass(frozen=True, slots=True)
class StepTiling:
    """The step to be planned: `sliced` with the costs of its operators here, `measured` with
    those on the planned device.
    """

    sliced: "TiledJob"
    measured: "MeasuredCosts"
    limits: "PlannedLimits"


def step_tiling(
    request: PlanRequest,
    recorded: CapturedStep,
    costs: Costs,
    machine: PlanMachine,
    measurer: "MeasurementWorker",
    sparse: "SparseJob | None",
    progress: "Progress",
    make_free: Callable[[], None],
) -> StepTiling:
    """Tile operators if that gives the same bits and costs less; afterwards, memory used to
    examine frozen weights is freed.
    """
    from port_agent.prepare.frozen_weights.quantized_weights import with_quantized_weights
    from port_agent.prepare.further_shapes import with_further_shapes
    from port_agent.prepare.making import device_costs
    from port_agent.prepare.tiling.choice import QUICK_S, choose_tiling
    from port_agent.prepare.tiling.comparing import costs_of_rewritten
    from port_agent.prepare.tiling.split_gradients import with_split_gradients
    from port_agent.prepare.tiling.tiled_job import ComparisonLimits, CutTarget, TiledJob
    from port_planner import make_bundle
    from port_planner.ir.costs import CostTable

    progress("compare", 0.0)
    captured, whole = recorded.captured, costs.choice.measured
    if sparse is not None:
        captured, whole = sparse.captured, sparse.measured
    threads = costs.choice.threads
    power = machine.power(threads)
    limits = limits_of(request, recorded.pace, CostTable(costs.device, whole.ops[0]))
    sliced = TiledJob(captured, whole, ())
    if request.board is None and request.place is None:  # of another board's kernels nothing is known here
        op_memory = ComparisonLimits(request.ram_bytes, machine.page_dir, threads, measurer)
        target = CutTarget(costs.device, recorded.pools.computing_bytes, op_memory, progress)
        captured, whole = with_quantized_weights(
            captured,
            whole,
            costs.device,
            recorded.pools.computing_bytes,
            make_bundle.default_planner(strategy="greedy", time_limit_s=QUICK_S, limits=limits),
            lambda coded: costs_of_rewritten(
                coded.graphs, costs.choice.measured, op_memory, power.compute_watts, progress
            ),
        )
        make_free()
        sliced = TiledJob(captured, whole, ())
        planner = make_bundle.default_planner(
            strategy=request.strategy, time_limit_s=min(request.time_limit_s, QUICK_S), limits=limits
        )
        halved = with_split_gradients(captured, whole, op_memory, power.compute_watts, progress)
        sliced = choose_tiling(sliced, halved, target, planner, limits, reordered=request.reordered)
        sliced = with_further_shapes(sliced, costs.device, recorded.pools.computing_bytes, op_memory, progress)
    graphs = sliced.captured.graphs
    measured = device_costs.by_class(graphs, sliced.measured, power)
    if costs.drawn is not None and request.place is None:
        measured = costs.drawn.applied(graphs, sliced.measured)
    if request.board is not None:
        measured, _ = device_costs.other_board(sliced.captured.graphs, measured, costs.here, request.board)
    return StepTiling(sliced, measured, limits)


def compared_steps_of(request: PlanRequest, job: "TrainingJob") -> int:
    """Return how many of the job's first steps also run as plain PyTorch and are compared."""
    from port_agent.prepare.reference import compared_steps

    if request.reordered:
        return 0
    return compared_steps(job) if request.compared_steps is None else request.compared_steps


def limits_of(request: PlanRequest, pace: "Pace | None", costs: "CostTable") -> "PlannedLimits":
    """Return the limits that the plans must keep."""
    from port_planner.ir.bundle.manifest import PlannedLimits

    charging = None
    if request.charging is not None:
        begin, end = request.charging
        charging = (f"{begin:%H:%M}", f"{end:%H:%M}")
    return PlannedLimits(
        step_s=None if pace is None else pace.seconds_per_step,
        written_bytes=_write_limit(request, costs),
        deadline_at=request.deadline_at,
        charging=charging,
    )


def _write_limit(request: PlanRequest, costs: "CostTable") -> int | None:
    """Return how many bytes a step may write, given that a step takes at least the time of its operators."""
    if request.flash_life_s is None:
        return request.written_bytes_per_step
    endurance = min((target.endurance_bytes for target in costs.device.targets if target.endurance_bytes), default=None)
    if endurance is None:
        return None
    return int(endurance / request.flash_life_s * sum(op.seconds for op in costs.ops))
