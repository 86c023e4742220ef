"""How `plan` makes a bundle: what is captured, measured, chosen and tried, in this order, as the command line says."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli import places
from agent.cli.arguments import (
    UsageError,
    page_dirs,
)
from agent.cli.devices_and_plots import too_slow, wanted_pace
from agent.cli.plan.placement import names_teams, wanted_teams
from agent.energy.media import FlashPrices, Medium, medium_of, medium_under
from agent.energy.sources.power_models import power_with
from agent.system.torch_loading import uncollected
from planner.ir.boards import load_board
from planner.ir.costs import MediumKind
from planner.ir.devices.kinds import CPU

if TYPE_CHECKING:
    from agent.backend.base import Backend
    from agent.cli.progress import Spent
    from agent.energy.sources.estimated import PowerModel
    from agent.energy.sources.registry import EnergyConfig
    from agent.prepare.bench.bench import Bench
    from agent.prepare.making.bundle import Made
    from agent.prepare.making.trial import TrialWorkers
    from agent.prepare.peers import PlanningPeers
    from agent.prepare.placement.device_watts import DeviceWatts
    from agent.prepare.pools import Pools
    from agent.prepare.progress import Progress
    from agent.prepare.slices.sliced import Sliced
    from agent.prepare.sparse import SparseJob
    from agent.prepare.threads import ThreadChoice
    from planner.deadline import Pace
    from planner.ir.bundle.bundle import PlannedLimits
    from planner.ir.costs import CostTable, DeviceCosts
    from planner.ir.devices.cpu_teams import CpuTeam
    from planner.ir.graph import StepGraph
    from planner.ir.plan import Plan
    from planner.job import TrainingJob
    from planner.make_bundle import Prepared
    from planner.profiling.operators import Measured


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
    machine = _machine(arguments)  # before torch: what it refuses takes no seconds
    with uncollected():
        from agent.follow.budget import NotFollowedError
        from agent.prepare.within_budget import within_budget

    try:
        with within_budget(arguments.ram, machine.page_dir) as make_room:
            return _planned(arguments, out, machine, make_room)
    except NotFollowedError:
        return _planned(arguments, out, machine, lambda: None)


_STAGES = ("capture", "profile", "flash", "analyse", "compare", "follow", "plan", "try")
"""What the bar shows; `follow`: plain PyTorch's first steps."""


def _planned(arguments: argparse.Namespace, out: Path, machine: "_Machine", make_room: Callable[[], None]) -> Planned:
    """Capture, measure, choose what is trained where that was asked for, and plan; show how far it is.

    `make_room`: gives back memory before a search, and what searches left before tensors come again.
    """
    from agent.cli.progress import StageBar
    from agent.prepare.bench.bench import Bench
    from agent.prepare.making.trial import TrialWorkers
    from agent.prepare.slices.choosing import again_with_base

    peers = _planning_peers(arguments)
    with StageBar(_STAGES, quiet=arguments.json) as bar:
        with Bench(arguments.ram) as bench:
            captured = _captured(arguments, bench, bar.update)
            costs = _costs(arguments, captured, machine, bench, peers, bar.update)
            make_room()
            sparse = _sparse(arguments, captured, costs, bar.update) if arguments.sparse_update else None
            first: _Pieces | None = _pieces(arguments, captured, costs, machine, bench, sparse, bar.update, make_room)

        def make(device: "DeviceCosts") -> "tuple[_Pieces, Made, Mapping[str, float]]":
            nonlocal first
            pieces, first, found = first, None, replace(costs, device=device)
            if pieces is None:
                with Bench(arguments.ram) as bench:
                    pieces = _pieces(arguments, captured, found, machine, bench, sparse, bar.update, make_room)
            make_room()
            with closing(TrialWorkers(costs.choice.threads)) as workers:
                workers.load()
                return pieces, *_made(
                    arguments, out, captured, found, machine, pieces, peers, bar.update, make_room, workers
                )

        pieces, made, by_device = again_with_base(make, costs.device)
    told = peers.told() if peers is not None else []
    return Planned(made, sparse, costs.choice.step_s, pieces.sliced.left_whole, bar.spent, told, by_device, costs.drawn)


@dataclass(frozen=True, slots=True)
class _Machine:
    """What settings and command line say of this one: its energy, where pages go, and what media lie there."""

    energy: "EnergyConfig"
    page_dir: Path
    medium: Medium
    further: list[tuple[Path, Medium]]

    @property
    def scratch_dirs(self) -> tuple[Path, ...]:
        return tuple(folder for folder, _ in self.further)

    def power(self, threads: int) -> "PowerModel":
        energy = self.energy
        return power_with(threads, static_watts=energy.static_watts, full_watts=energy.full_watts, board=energy.board)


def _page_dirs(arguments: argparse.Namespace) -> list[Path]:
    return page_dirs(arguments.page_dirs) or [Path()]


def _machine(arguments: argparse.Namespace) -> _Machine:
    energy, _ = places.energy_settings(arguments.config)
    page_dir, *scratch_dirs = _page_dirs(arguments)
    return _Machine(
        energy, page_dir, _medium(arguments, energy, page_dir), _further_media(arguments, energy, scratch_dirs)
    )


@dataclass(frozen=True, slots=True)
class _Captured:
    """The script's job and its recorded step. `counts`: numbers of threads to measure; `pace`: what a deadline leaves; `teams`: of threads, to
    divide operators among."""

    job: "TrainingJob"
    backend: "Backend"
    pools: "Pools"
    prepared: "Prepared"
    prepare: "Callable[[], Prepared]"
    counts: tuple[int, ...]
    pace: "Pace | None"
    teams: "tuple[CpuTeam, ...]"


def _captured(arguments: argparse.Namespace, bench: "Bench", progress: "Progress") -> _Captured:
    """Load the script's job, move it where it computes, and record its step, while the `bench` loads torch."""
    from agent.prepare.device_room import in_device_room
    from agent.prepare.repeatable import reordered_in
    from agent.prepare.threads import counts_set
    from planner import make_bundle
    from planner.ir.bundle.pruning import Pruning
    from planner.ir.devices.torch_device import repeat_kernels
    from planner.job_device import kind_of_job
    from planner.job_sources import load_job

    progress("capture", 0.0)
    with counts_set() as counts_of_script:
        job = load_job(arguments.script, _page_dirs(arguments)[0])
    backend, pools = _place(job, arguments)
    repeat_kernels(backend.kind)
    on_device = backend.kind != CPU and arguments.place is None
    counts = _thread_counts(arguments, set_by_script=bool(counts_of_script), on_device=on_device)
    teams = wanted_teams(arguments.place)
    if teams:
        counts = tuple(sorted({team.threads for team in teams if not team.cores} or {teams[0].threads}))
    if arguments.place is not None and kind_of_job(job) != CPU:
        counts = counts[-1:]  # what is recorded on the device does not tell which number is fastest: all cores
    steps, updates = make_bundle.steps_and_updates(job, arguments.epochs)
    bench.load(counts[0])
    if arguments.prune is not None:
        job.pruning = Pruning(arguments.prune, max(updates // 2, 1))
    prepare = partial(make_bundle.prepare, job, updates=updates, followed=_compared_steps(arguments, job))
    prepared = in_device_room(prepare, "recording the step", job, backend, pools)
    reordered = reordered_in(prepared.graphs.values(), allowed=arguments.allow is not None)
    progress("capture", 1.0)
    pace = wanted_pace(arguments, steps)
    return _Captured(job, backend, pools, replace(prepared, reordered=reordered), prepare, counts, pace, teams)


@dataclass(frozen=True, slots=True)
class _Costs:
    """What the step's operators take here, and on the `device` that is planned for, which `here` is but for --board.

    `drawn`: what a device beside the CPU draws, where a meter sees it.
    """

    choice: "ThreadChoice"
    measured: "Measured"
    here: "DeviceCosts"
    device: "DeviceCosts"
    drawn: "DeviceWatts | None"


def _costs(
    arguments: argparse.Namespace, captured: _Captured, machine: _Machine, bench: "Bench", peers: "PlanningPeers | None",
    progress: "Progress",
) -> _Costs:  # fmt: skip
    """Measure the operators, with the number of threads that is fastest, and the media; set that number."""
    import torch

    from agent.prepare.making import device_costs
    from agent.prepare.making.packed_pages import with_packed_pages
    from agent.prepare.page_ways import measured_page_ways
    from agent.prepare.placement.device_watts import measured_device_watts
    from agent.prepare.pools import with_own_memory
    from agent.prepare.threads import fastest

    graphs = captured.prepared.graphs
    choice = fastest(graphs, captured.counts, lambda count: machine.power(count).compute_watts, progress, peers, bench)
    power = machine.power(choice.threads)
    measured = device_costs.by_class(graphs, choice.measured, power)
    torch.set_num_threads(choice.threads)
    here = device = device_costs.this_device(measured, machine.page_dir, choice.threads, power, progress)
    if arguments.board is not None:
        measured, device = device_costs.other_board(graphs, measured, here, arguments.board)
    device = device_costs.slower_flash(device, arguments.flash_read, arguments.flash_write)
    device = device_costs.on_medium(device, machine.medium)
    device = device_costs.with_scratch(device, machine.further, progress)
    if captured.backend.kind != CPU:
        device = with_own_memory(device, captured.backend, captured.pools)
        if captured.backend.unified:
            device = measured_page_ways(captured.backend, machine.page_dir).applied(device)
    device = with_packed_pages(device, captured.prepared.initial_tensors)
    drawn = measured_device_watts(captured.backend, machine.energy, captured.pools.computing_bytes)
    if drawn is not None and arguments.place is None:
        device = replace(device, compute_watts=drawn.dense)
    return _Costs(choice, measured, here, device, drawn)


def _sparse(arguments: argparse.Namespace, captured: _Captured, costs: _Costs, progress: "Progress") -> "SparseJob":
    """Choose what is trained, and record the step again.

    It is what the device that the model lies on can train alone: operators that are divided then take no more time.
    """
    from agent.prepare.device_room import in_device_room
    from agent.prepare.placement.room import of_the_cpu
    from agent.prepare.sparse import StepLimits, train_less
    from planner.job_device import kind_of_job

    device, room_bytes = costs.device, captured.pools.computing_bytes
    if kind_of_job(captured.job) == CPU:
        device, room_bytes = of_the_cpu(device), arguments.ram
    limits = StepLimits(None if captured.pace is None else captured.pace.seconds_per_step, arguments.step_joules)
    choose = partial(
        train_less, captured.job, captured.prepared, costs.measured, device, room_bytes, prepare=captured.prepare,
        threads=costs.choice.threads, steps=arguments.probe_steps, limits=limits, progress=progress,
    )  # fmt: skip
    return in_device_room(choose, "choosing what is trained", captured.job, captured.backend, captured.pools)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The step as it is planned: `sliced` with what its operators cost here, `measured` on the device planned for."""

    sliced: "Sliced"
    measured: "Measured"
    limits: "PlannedLimits"


def _pieces(
    arguments: argparse.Namespace, captured: _Captured, costs: _Costs, machine: _Machine, bench: "Bench",
    sparse: "SparseJob | None", progress: "Progress", make_room: Callable[[], None],
) -> _Pieces:  # fmt: skip
    """Put operators in pieces, where that gives the same bits and costs less; room is made once frozen weights were looked through."""
    from agent.prepare.frozen_weights.grids import with_grid_weights
    from agent.prepare.further_shapes import with_further_shapes
    from agent.prepare.making import device_costs
    from agent.prepare.slices.choosing import QUICK_S, in_pieces
    from agent.prepare.slices.comparing import costs_of_rewritten
    from agent.prepare.slices.halves import in_halves
    from agent.prepare.slices.sliced import ComparingRoom, Sliced
    from planner import make_bundle
    from planner.ir.costs import CostTable

    progress("compare", 0.0)
    prepared, whole = captured.prepared, costs.choice.measured
    if sparse is not None:
        prepared, whole = sparse.prepared, sparse.measured
    threads = costs.choice.threads
    power = machine.power(threads)
    limits = _limits(arguments, captured.pace, CostTable(costs.device, whole.ops[0]))
    sliced = Sliced(prepared, whole, ())
    if arguments.board is None and arguments.place is None:  # of another board's kernels nothing is known here
        room = ComparingRoom(arguments.ram, machine.page_dir, threads, bench)
        prepared, whole = with_grid_weights(
            prepared, whole, costs.device, captured.pools.computing_bytes,
            make_bundle.default_planner(strategy="greedy", time_limit_s=QUICK_S, limits=limits),
            lambda coded: costs_of_rewritten(coded.graphs, costs.choice.measured, room, power.compute_watts, progress),
        )  # fmt: skip
        make_room()
        sliced = Sliced(prepared, whole, ())
        planner = make_bundle.default_planner(
            strategy=arguments.strategy, time_limit_s=min(arguments.time_limit, QUICK_S), limits=limits
        )
        halved = in_halves(prepared, whole, room, power.compute_watts, progress)
        sliced = in_pieces(
            sliced, halved, costs.device, captured.pools.computing_bytes, room, planner, progress, limits,
            reordered=arguments.allow is not None,
        )  # fmt: skip
        sliced = with_further_shapes(sliced, costs.device, captured.pools.computing_bytes, room, progress)
    graphs = sliced.prepared.graphs
    measured = device_costs.by_class(graphs, sliced.measured, power)
    if costs.drawn is not None and arguments.place is None:
        measured = costs.drawn.applied(graphs, sliced.measured)
    if arguments.board is not None:
        measured, _ = device_costs.other_board(sliced.prepared.graphs, measured, costs.here, arguments.board)
    return _Pieces(sliced, measured, limits)


def _made(
    arguments: argparse.Namespace, out: Path, captured: _Captured, costs: _Costs, machine: _Machine, pieces: _Pieces,
    peers: "PlanningPeers | None", progress: "Progress", make_room: Callable[[], None], workers: "TrialWorkers",
) -> "tuple[Made, Mapping[str, float]]":  # fmt: skip
    """Follow plain PyTorch's first steps, plan, try the plan beside them with `workers`, and write; raise what says why that cannot be.

    Where operators are divided, return seconds of a step by single device, too.
    """
    from agent.prepare.device_room import in_device_room
    from agent.prepare.frozen_weights.files import with_weight_files
    from agent.prepare.making import bundle
    from agent.prepare.reference import with_reference
    from agent.prepare.whole_updates import with_whole_update
    from planner import make_bundle
    from planner.deadline import DeadlineError
    from planner.ir.bundle.bundle import Bundle
    from planner.ir.costs import CostTable
    from planner.ir.plan import Plan
    from planner.search.plan_problem import plan_problem

    device, measured, limits, pace = costs.device, pieces.measured, pieces.limits, captured.pace
    computing_bytes = captured.pools.computing_bytes
    asked = {"strategy": arguments.strategy, "time_limit_s": arguments.time_limit, "limits": limits}
    progress("follow", 0.0)
    prepared = with_weight_files(pieces.sliced.prepared)
    follow = partial(with_reference, prepared, _compared_steps(arguments, captured.job))
    prepared = in_device_room(follow, "following plain PyTorch", captured.job, captured.backend, captured.pools)
    by_device: Mapping[str, float] = {}
    if captured.teams:
        prepared, measured, by_device = _divided_by_teams(
            arguments, captured, costs, machine, prepared, measured, progress
        )
    elif arguments.place is not None:
        prepared, measured, device, by_device = _divided(arguments, captured, costs, pieces, prepared, progress)
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


def _divided(
    arguments: argparse.Namespace, captured: _Captured, costs: _Costs, pieces: _Pieces, prepared: "Prepared", progress: "Progress"
) -> "tuple[Prepared, Measured, DeviceCosts, Mapping[str, float]]":  # fmt: skip
    """Measure the operators on the other device, too, and divide them; the reference is then what they give one by one where they run.

    Raises PlacementError where that saves no time.
    """
    from agent.prepare.bench.bench import Bench
    from agent.prepare.making import device_costs
    from agent.prepare.placement.divide import divided, measured_links
    from agent.prepare.placement.reference import with_placed_reference
    from agent.prepare.placement.room import PlacementRoom
    from agent.prepare.pools import with_transfer_ring
    from agent.prepare.repeatable import reordered_in
    from planner.job_device import kind_of_job
    from planner.problem.placed_step import on_kind

    backend, threads = captured.backend, costs.choice.threads
    watts = costs.device.compute_watts
    home = kind_of_job(captured.job)
    other = backend.kind if home == CPU else CPU
    graphs = {name: on_kind(graph, other) for name, graph in prepared.graphs.items()}
    there = Bench(arguments.ram).measure(graphs.values(), threads, watts, progress, resident=False, elsewhere=True)
    if arguments.board is not None and other == CPU:
        there, _ = device_costs.other_board(graphs, there, costs.here, arguments.board)
    on_cpu, on_device = (pieces.measured, there) if home == CPU else (there, pieces.sliced.measured)
    if costs.drawn is not None:
        on_device = costs.drawn.applied(prepared.graphs, on_device)
    links = measured_links(backend, watts)
    device = with_transfer_ring(costs.device, backend)
    room = PlacementRoom(captured.pools, device)
    found = divided(prepared, on_cpu, on_device, backend.kind, links, watts, room, time_limit_s=arguments.time_limit)
    reordered = reordered_in(found.prepared.graphs.values(), allowed=arguments.allow is not None)
    made = with_placed_reference(
        replace(found.prepared, reordered=reordered), prepared.graphs, found.kinds, backend.kind
    )
    device = room.costs(next(iter(made.graphs.values())), found.measured.ops[0]).device
    return made, found.measured, device, found.alone


def _divided_by_teams(
    arguments: argparse.Namespace, captured: _Captured, costs: _Costs, machine: _Machine, prepared: "Prepared", with_all: "Measured",
    progress: "Progress",
) -> "tuple[Prepared, Measured, Mapping[str, float]]":  # fmt: skip
    """Measure the operators with each further team of threads and divide them; the reference is then what they give one by one so.

    `with_all`: what they take with the bundle's number of threads. Raises PlacementError where that saves nothing.
    """
    from agent.prepare.bench.bench import Bench
    from agent.prepare.making import device_costs
    from agent.prepare.placement.reference import with_placed_reference
    from agent.prepare.placement.teams import divided_by_teams, measured_times, on_cores_of
    from planner.ir.devices.cpu_teams import CpuTeam

    threads, graphs = costs.choice.threads, prepared.graphs
    teams = tuple(team for team in captured.teams if team != CpuTeam(threads))
    powers = [machine.power(count) for count in (threads, *(team.threads for team in teams))]
    measured = [with_all]
    for team, power in zip(teams, powers[1:], strict=True):
        with on_cores_of(team):
            found = Bench(arguments.ram).measure(
                graphs.values(), team.threads, power.compute_watts, progress, resident=False
            )
        measured.append(device_costs.by_class(graphs, found, power))
    times = measured_times(threads, teams)
    watts = [power.compute_watts for power in powers]
    made = divided_by_teams(
        prepared, measured, threads, teams, times, watts, powers[0].static_watts, time_limit_s=arguments.time_limit
    )
    kinds = {name: (CPU,) * len(graph.ops) for name, graph in graphs.items()}
    return with_placed_reference(made.prepared, graphs, kinds, CPU), made.measured, made.alone


def _compared_steps(arguments: argparse.Namespace, job: "TrainingJob") -> int:
    """Return how many of the job's first steps are followed with plain PyTorch and compared."""
    from agent.prepare.reference import compared_steps

    if arguments.allow is not None:
        return 0
    return compared_steps(job) if arguments.verify is None else int(arguments.verify)


def _place(job: "TrainingJob", arguments: argparse.Namespace) -> "tuple[Backend, Pools]":
    """Move the job to the device that was asked for, and return where it computes and what it may take there."""
    from agent.backend.choose import backend_of
    from agent.prepare.pools import pools_of
    from planner.job_device import kind_of_job, move

    if arguments.device is not None:
        backend_of(arguments.device)
        move(job, arguments.device)
    backend = backend_of(kind_of_job(job))
    if names_teams(arguments.place) and backend.kind != CPU:
        raise UsageError(
            f"--place {arguments.place}: the model computes on {backend.kind}; --device cpu moves it to the CPU"
        )
    if arguments.place is not None and not names_teams(arguments.place):
        backend = _beside_the_cpu(arguments.place, backend)
    return backend, pools_of(backend, arguments.ram, arguments.gpu_ram, arguments.recording_gpu_ram)


def _beside_the_cpu(kind: str, where: "Backend") -> "Backend":
    """Return the device that operators are divided with; raise UsageError for a job that lies on a third."""
    from agent.backend.choose import backend_of

    if where.kind not in (CPU, kind):
        raise UsageError(f"--place {kind}: the model computes on {where.kind}; move it to the CPU or to {kind}")
    return backend_of(kind)


def _planning_peers(arguments: argparse.Namespace) -> "PlanningPeers | None":
    """Return what paired devices may do here: solve where that was asked for, share where the agent's settings say so."""
    from agent.control.client import ControlError
    from agent.control.peer_exchange import PeerExchange
    from agent.prepare.peers import PlanningPeers

    client = places.connect(arguments.runtime_dir)
    try:
        shares = bool(client.get("/v1/peers").get("shares"))
    except ControlError:
        shares = False
    if not shares and arguments.solve_on is None:
        return None
    return PlanningPeers(
        PeerExchange(client, arguments.solve_on or ""), shares=shares, solves=arguments.solve_on is not None
    )


def _thread_counts(arguments: argparse.Namespace, *, set_by_script: bool, on_device: bool) -> tuple[int, ...]:
    """Return the numbers of threads to measure: the one that somebody set, else those up to all cores and of clusters of them.

    A board's rates are scaled from one thread's here, and beside a device the CPU has little to compute, unless told otherwise.
    """
    import torch

    from agent.facts.cpu_clusters import read_clusters
    from agent.facts.sysfs import Tree
    from agent.prepare.threads import tried_counts
    from agent.worker.thread_room import usable_core_numbers, usable_cores

    if arguments.threads is not None:
        return (arguments.threads,)
    if set_by_script or "OMP_NUM_THREADS" in os.environ:
        return (torch.get_num_threads(),)
    if arguments.board is not None or on_device:
        return (1,)
    clusters = read_clusters(Tree(), usable_core_numbers())
    return tried_counts(usable_cores(), [len(cluster.cores) for cluster in clusters])


def _further_media(
    arguments: argparse.Namespace, energy: "EnergyConfig", scratch_dirs: list[Path]
) -> list[tuple[Path, Medium]]:
    """Return the media of further page directories, as the kernel tells."""
    if scratch_dirs and arguments.board is not None:
        raise UsageError("--page-dir: a board that is not at hand has one medium; give one directory with --board")
    prices = FlashPrices(per_kwh=energy.price_per_kwh)  # what else the owner says is of the first
    return [(folder, medium_under(folder, prices)) for folder in scratch_dirs]


def _medium(arguments: argparse.Namespace, energy: "EnergyConfig", page_dir: Path) -> Medium:
    """Return what pages are written to: as said, else of the board, else as the kernel tells of the page directory."""
    prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
    kind = None if arguments.medium is None else MediumKind[arguments.medium.upper()]
    if kind is None and arguments.board is not None:
        kind = load_board(arguments.board).medium
    medium = medium_under(page_dir, prices) if kind is None else medium_of(kind, prices)
    if arguments.flash_life is not None and medium.endurance_bytes is None:
        raise UsageError(
            f"--flash-life: writing does not wear out a {medium.kind.value}; name the --medium of the device"
        )
    return medium


def _limits(arguments: argparse.Namespace, pace: "Pace | None", costs: "CostTable") -> "PlannedLimits":
    """Return what the plans keep to."""
    from planner.ir.bundle.bundle import PlannedLimits

    charging = None
    if arguments.charging is not None:
        begin, end = arguments.charging
        charging = (f"{begin:%H:%M}", f"{end:%H:%M}")
    return PlannedLimits(
        step_s=None if pace is None else pace.seconds_per_step, written_bytes=_write_limit(arguments, costs),
        deadline_at=arguments.deadline, charging=charging,
    )  # fmt: skip


def _write_limit(arguments: argparse.Namespace, costs: "CostTable") -> int | None:
    """Return how many bytes a step may write; a step takes at least what its operators do."""
    if arguments.flash_life is None:
        limit: int | None = arguments.writes_per_step
        return limit
    endurance = min((target.endurance_bytes for target in costs.device.targets if target.endurance_bytes), default=None)
    if endurance is None:
        return None
    return int(endurance / arguments.flash_life * sum(op.seconds for op in costs.ops))


def _write_model(
    arguments: argparse.Namespace, graph: "StepGraph", costs: "CostTable", plan: "Plan", pace: "Pace | None"
) -> None:
    """Write the planning model where that was asked for."""
    if arguments.write_model is not None:
        from planner.search.written_model import write_model

        deadline_s = None if pace is None else pace.seconds_per_step
        write_model(arguments.write_model, graph, costs, plan, deadline_s=deadline_s)
