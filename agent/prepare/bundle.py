"""Make a bundle on this machine: capture, profile in a bare process, plan, try it out, write.

Behind `port-agent plan`.
"""

import contextlib
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from agent import packing
from agent.energy.media import Medium
from agent.energy.sources.estimated import PowerModel
from agent.malloc import preload_environment
from agent.packing.pages import pack_page, unpack_page
from agent.prepare.pools import Pools, with_host_room
from agent.system.python_process import module_command, module_environment
from agent.train.pager import CHUNK
from agent.worker.options import TorchOptions
from agent.worker.protocol import PackingProbed, StepDone, TrainingFailed, TrainingFinished, WorkerReady
from agent.worker.start import start_worker, torch_worker
from planner import make_bundle
from planner.ir.boards import estimated_costs, load_board, op_work
from planner.ir.bundle.bundle import NO_LIMITS, Bundle, Manifest, PlanChoice, PlannedLimits, kind_of_graph
from planner.ir.bundle.writer import publish_bundle, replace_plans
from planner.ir.costs import CostTable, DeviceCosts, Flash, PackingCost
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import StepGraph
from planner.ir.lowering.lower import lower
from planner.ir.plan import Action, Decision, Plan
from planner.ir.program import host_bytes_of
from planner.ir.units import format_bytes
from planner.make_bundle import InfeasibleError, Planner, Prepared
from planner.profiling import neighbours, operators
from planner.profiling.operators import Measured
from planner.search import pareto
from planner.search.pareto import point_of

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

_TRIES = 4
_TRIAL_STEPS = 2
_SLOW_STEP_S = 15.0
"""Of steps that take longer the first trial runs one: on an SD card a step of GPT-2 moves 4 GB, and the last trial shows the rest."""
_SPARE = 0.01
"""Share of the budget that is left free, for what differs from run to run."""
_UNKNOWN = 1 / 12
"""The same in the first trial, which finds out what a worker holds that nobody planned: 30 MiB for a small transformer, say."""


_NARROW, _WIDE = 2, 6
"""Smaller plans in a bundle."""

_SPARED_WRITES = 0.25
"""Of the bytes that the first plan writes, what a plan may for days on which the allowance of flash writes gets short."""

_LIKELY_PACE = (0.5, 2.0)
"""Outside of this the trial's step says more about what else the machine was doing."""

_SAMPLED_WEIGHTS = 16
"""So many of the largest weights tell how small pages get."""

_WORTH_PACKING_PAGES = 0.95
"""Of the seconds of a page's way out and back: packing must save more than what its measurement scatters by."""

_FRAGMENTS = 1 / 16
"""Of the device's budget: what is reserved more each time a trial finds no room there that its plan counts on."""

_MORE = 1.05

_TOLERANCE = 0.03
"""How far the measured peak may be from the planned one."""


class TrialError(PortError):
    """The plan could not be tried out; `ended` is the exit code of the worker that tried."""

    def __init__(self, message: str, ended: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        never = ended in (ExitCode.IMPOSSIBLE, ExitCode.DIVERGED)
        self.exit_code = ExitCode.IMPOSSIBLE if never else ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class Throttle:
    """How fast the trial's worker may page, bytes per second, to try a slower medium than this machine's."""

    read_bytes_per_s: int
    write_bytes_per_s: int


@dataclass(frozen=True)
class Made:
    """A finished bundle: its manifest, and what the trial run measured: of the host's memory, and of the device's own."""

    manifest: Manifest
    measured_peak_bytes: int
    measured_device_bytes: int = 0


def by_class(graphs: Mapping[str, StepGraph], measured: Measured, power: PowerModel) -> Measured:
    """Return the same with the joules of operators that memory holds up at their own watts, where those are known."""
    tables = tuple(
        tuple(
            cost if op_work(graph, index).dense else replace(cost, joules=cost.joules * power.moving_share)
            for index, cost in enumerate(table)
        )
        for graph, table in zip(graphs.values(), measured.ops, strict=True)
    )
    return replace(measured, ops=tables)


def this_device(measured: Measured, page_dir: Path, threads: int, power: PowerModel, progress: Progress) -> DeviceCosts:
    """Return the costs of this machine, which draws `power`; bandwidth is measured in `page_dir`."""
    rounds: Callable[[int, int], None] = lambda done, total: progress("flash", done / total)  # noqa: E731
    flash = operators.measure_flash(page_dir, compute_watts=power.compute_watts, progress=rounds)
    return DeviceCosts(
        platform.node() or "this machine", measured.worker_bytes, power.static_watts, power.compute_watts, flash, threads
    )  # fmt: skip


def other_board(
    graphs: Mapping[str, StepGraph], measured: Measured, device: DeviceCosts, name: str
) -> tuple[Measured, DeviceCosts]:
    """Return what was measured here scaled to another board, and that board's device (estimated).

    By its name or file.
    """
    board = load_board(name)
    tables = [
        estimated_costs(graph, board, CostTable(device, ops))
        for graph, ops in zip(graphs.values(), measured.ops, strict=True)
    ]
    return replace(measured, ops=tuple(table.ops for table in tables)), tables[0].device


def slower_flash(device: DeviceCosts, read_bytes_per_s: float | None, write_bytes_per_s: float | None) -> DeviceCosts:
    """Return the device with a medium no faster than the given limits.

    It then takes more joules per byte.
    """
    flash = device.flash
    read = min(flash.read_bytes_per_s, read_bytes_per_s or flash.read_bytes_per_s)
    write = min(flash.write_bytes_per_s, write_bytes_per_s or flash.write_bytes_per_s)
    more_read = operators.medium_joules(read) - operators.medium_joules(flash.read_bytes_per_s)
    more_write = operators.medium_joules(write) - operators.medium_joules(flash.write_bytes_per_s)
    slower = replace(
        flash, read_bytes_per_s=read, read_joules_per_byte=flash.read_joules_per_byte + more_read,
        write_bytes_per_s=write, write_joules_per_byte=flash.write_joules_per_byte + more_write,
    )  # fmt: skip
    return replace(device, flash=slower)


def on_medium(device: DeviceCosts, medium: Medium) -> DeviceCosts:
    """Return the device with flash of this kind: its endurance, and the price of what a written byte wears off."""
    return replace(device, flash=_of_kind(device.flash, medium))


def with_scratch(device: DeviceCosts, media: Sequence[tuple[Path, Medium]], progress: Progress) -> DeviceCosts:
    """Return the device with further media for what lives within a step, each measured in its directory."""
    further = []
    for number, (folder, medium) in enumerate(media, 1):
        rounds: Callable[[int, int], None] = partial(_report_share, progress, number / len(media))
        flash = operators.measure_flash(folder, compute_watts=device.compute_watts, progress=rounds)
        further.append(_of_kind(flash, medium))
    return replace(device, scratch_targets=tuple(further))


def with_packed_pages(device: DeviceCosts, weights: Iterable[torch.Tensor]) -> DeviceCosts:
    """Return the device with pages that lie packed on each medium that is slow enough for that to save time.

    How small pages get and how long packing takes is measured on `weights`; momenta and activations are much alike.
    """
    found = _page_packing(weights)
    if found is None:
        return device
    targets = [_packing_medium(target, found, device.compute_watts) for target in device.targets]
    return replace(device, flash=targets[0], scratch_targets=tuple(targets[1:]))


@dataclass(frozen=True, slots=True)
class _PagePacking:
    """What a packed page takes of its size, and seconds per byte of it to pack and to unpack."""

    share: float
    pack_s: float
    unpack_s: float


def _page_packing(weights: Iterable[torch.Tensor]) -> _PagePacking | None:
    """Pack the beginnings of the largest weights; None where there are none to speak of or nothing can be packed here."""
    large = sorted(
        (w for w in weights if w.dtype is torch.float32 and w.numel() * 4 >= CHUNK), key=lambda w: -w.numel()
    )
    if not large or not packing.available():
        return None
    target, stored, taken = bytearray(CHUNK), 0, [0.0, 0.0]
    sampled = large[:_SAMPLED_WEIGHTS]
    for weight in sampled:
        page = weight.detach().reshape(-1)[: CHUNK // 4].clone()  # a weight whose address is taken stays resident
        back = torch.empty(CHUNK, dtype=torch.uint8)
        begin = time.thread_time()
        size = pack_page(page.data_ptr(), CHUNK, 4, target)
        middle = time.thread_time()
        if size:
            unpack_page(memoryview(target)[:size], back.data_ptr(), CHUNK, 4)
        taken = [taken[0] + middle - begin, taken[1] + time.thread_time() - middle]
        stored += size or CHUNK
    total = len(sampled) * CHUNK
    return _PagePacking(stored / total, taken[0] / total, taken[1] / total)


def _packing_medium(flash: Flash, found: _PagePacking, compute_watts: float) -> Flash:
    """Return the medium with packed pages, or as it is where they would not save time."""
    read_s = found.share / flash.read_bytes_per_s + found.unpack_s
    write_s = found.share / flash.write_bytes_per_s + found.pack_s
    if read_s + write_s > _WORTH_PACKING_PAGES * (1 / flash.read_bytes_per_s + 1 / flash.write_bytes_per_s):
        return flash
    return replace(
        flash, packs_pages=True, read_bytes_per_s=1 / read_s, write_bytes_per_s=1 / write_s,
        read_joules_per_byte=found.share * flash.read_joules_per_byte + found.unpack_s * compute_watts,
        write_joules_per_byte=found.share * flash.write_joules_per_byte + found.pack_s * compute_watts,
        wear_joules_per_byte=found.share * flash.wear_joules_per_byte,
        endurance_bytes=None if flash.endurance_bytes is None else flash.endurance_bytes / found.share,
    )  # fmt: skip


def _report_share(progress: Progress, share: float, done: int, total: int) -> None:
    progress("flash", share * done / total)


def _of_kind(flash: Flash, medium: Medium) -> Flash:
    return replace(
        flash, name=medium.kind.value, endurance_bytes=medium.endurance_bytes,
        wear_joules_per_byte=medium.wear_joules_per_byte,
    )  # fmt: skip


def make(
    path: Path,
    prepared: Prepared,
    measured: Measured,
    device: DeviceCosts,
    ram_bytes: int,
    *,
    device_bytes: int | None = None,
    planner: Planner,
    page_dir: Path,
    scratch_dirs: tuple[Path, ...] = (),
    threads: int,
    progress: Progress,
    wide: bool = False,
    throttle: Throttle | None = None,
    estimated: bool = False,
    limits: PlannedLimits = NO_LIMITS,
    make_room: Callable[[], None] = lambda: None,
) -> Made:
    """Plan, try the plan for two steps, reserve what turned out unplanned, and write the bundle.

    The bundle's first plan is for `ram_bytes`, and for `device_bytes` where the device has memory of its own; smaller ones follow, to which the agent switches when memory gets short
    (`wide`: more of them, by the chosen planner instead of the quick one, none dominated by another). `estimated`: the
    costs are those of another board; the trial then only tells how much memory is unplanned. `limits`: what `planner` keeps
    to; the bundle says so, and its smaller plans write no more either and keep to its deadline where they can.
    `page_dir` and `scratch_dirs` lie on the device's media, in their order.
    Raises InfeasibleError where nothing fits; nothing is left behind then, and a bundle that was there stays. Weights and
    data are written once, into a draft beside `path`: every further try only replaces the plans behind them, and `make_room` is called.
    """
    quick, pools = _quick(NO_LIMITS), Pools(ram_bytes, device_bytes)
    draft = path.with_name(path.name + ".making")
    page_dirs = (page_dir, *scratch_dirs)
    making = _Making(
        draft, prepared, measured, device, pools, page_dirs, threads, throttle, estimated, limits, make_room
    )
    try:
        made = _settled(making, quick, planner, progress, wide=wide)
        publish_bundle(draft, path)
    except InfeasibleError as error:
        if making.begun and making.device.base_bytes < pools.computing_bytes:
            error.base_bytes = making.device.base_bytes
        raise
    finally:
        draft.unlink(missing_ok=True)
    return made


def _quick(limits: PlannedLimits) -> Planner:
    return make_bundle.default_planner(strategy="greedy", time_limit_s=1.0, limits=limits)


def _settled(making: "_Making", quick: Planner, planner: Planner, progress: Progress, *, wide: bool) -> Made:
    """Try plans until one takes what it says, then add smaller ones. Raises InfeasibleError, TrialError."""
    progress("try", 0.0)
    found = making.first_tried(quick)
    making.keep_packings(found)
    making.keep_pace(found)
    for attempt in range(_TRIES):
        progress("plan", attempt / _TRIES)
        found, settled = making.tried(planner)
        if settled:
            smaller = making.smaller_plans(planner if wide else None, _WIDE if wide else _NARROW)
            found = making.with_cheapest_first(smaller, found)
            manifest = making.with_smaller_plans(smaller)
            device_bytes = 0 if making.pools.device_bytes is None else found.device_peak_bytes
            return Made(manifest, making.held_bytes(found), device_bytes)
    raise making.too_much(found)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a trial run measured.

    Peaks of resident memory, with what blocks that are touched in part may still add, and its last step's compute seconds over
    those planned.

    `start_bytes`: the peak before the first step, while the worker loads Python, torch and the bundle. `packings`: by graph,
    what packing takes, where the run looked at that; without joules.
    """

    peak_bytes: int
    start_bytes: int = 0
    pace: float = 1.0
    packings: Mapping[str, tuple[PackingCost, ...]] = field(default_factory=dict)
    device_peak_bytes: int = 0
    """Of the device's memory, by tensors, context and libraries; `peak_bytes` is the host's."""
    device_full: bool = False
    """It ended because the device had no memory left for a tensor."""


_Runs = dict[str, tuple[tuple[int, ...], tuple[Decision, ...]]]
"""By graph: the order of a plan's operators, and what is computed again."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """Plans that took in a trial what was planned."""

    plans: _Runs
    trial: _Trial


@dataclass(frozen=True, slots=True)
class _Smaller:
    """Plans of a bundle's graphs for a budget below its own, or that write less."""

    plans: Mapping[str, Plan]
    ram_bytes: int
    keeps_limits: bool
    """Whether they keep to the deadline, where the bundle has one."""


@dataclass(slots=True)
class _Making:
    """A bundle in the making: what is known of the costs gets better with every trial."""

    draft: Path
    prepared: Prepared
    measured: Measured
    device: DeviceCosts
    pools: Pools
    page_dirs: tuple[Path, ...]
    threads: int
    throttle: Throttle | None
    estimated: bool
    limits: PlannedLimits
    make_room: Callable[[], None]
    begun: bool = False
    """Whether the draft is written."""
    start_bytes: int = 0
    """The peak before the first step; 0 until a trial, or a budget that is too small for one, asks for it."""
    shown: _Shown | None = None
    """What ran as planned already; the same plans need no further trial."""

    def target_bytes(self, spared: float = _SPARE) -> int:
        """Return what is planned for: the budget of the memory that operators compute in, without the share that is spared."""
        return int(self.pools.computing_bytes * (1 - spared))

    def held_bytes(self, found: _Trial) -> int:
        """Return what a trial took of the host's memory: the device's too, where they are one."""
        return found.peak_bytes + (found.device_peak_bytes if self.pools.device_bytes is None else 0)

    def first_tried(self, quick: Planner) -> _Trial:
        """Find out what is unplanned, and what packing takes; the last word is the chosen planner's."""
        try:
            return self.tried(quick, spared=_UNKNOWN, probe_packing=True)[0]
        except InfeasibleError:
            return self.tried(quick, probe_packing=True)[0]

    def tried(self, planner: Planner, *, spared: float = _SPARE, probe_packing: bool = False) -> tuple[_Trial, bool]:
        """Plan, write and run; note what turned out unplanned. Say whether that was next to nothing."""
        return self._run(*self._planned(planner, self.target_bytes(spared)), probe_packing=probe_packing)

    def _run(
        self, plans: Mapping[str, Plan], costs: Mapping[str, CostTable], *, probe_packing: bool = False
    ) -> tuple[_Trial, bool]:
        manifest = self._written([plans], costs, [self.pools.computing_bytes])
        if self.shown is not None and self.shown.plans == _what_runs(plans):
            return self.shown.trial, True
        compared = len(manifest.reference.losses)
        steps = max(_TRIAL_STEPS, compared)
        if probe_packing and manifest.plans[0].seconds > _SLOW_STEP_S:
            steps = 1
        elif probe_packing and self.prepared.buckets and _what_runs(plans) is None:
            begun = max(_TRIAL_STEPS, self.prepared.job.accumulate + 1)  # the last trial shows the other shapes
            steps = min(steps, begun)
        found = trial(
            self.draft, self.page_dirs, self.threads, self.throttle, min(steps, compared), probe_packing, steps
        )  # fmt: skip
        self.start_bytes = max(self.start_bytes, found.start_bytes)
        if self.start_bytes > self.pools.ram_bytes:
            raise self._too_little_to_start(f"the budget is {format_bytes(self.pools.ram_bytes)}")
        settled = self._settled(manifest.plans[0], found)
        runs = _what_runs(plans)
        if settled and runs is not None and steps >= max(_TRIAL_STEPS, compared):
            self.shown = _Shown(runs, found)
        return found, settled

    def _settled(self, planned: PlanChoice, found: _Trial) -> bool:
        """Say whether a trial took what was planned, of each pool; else reserve what turned out unplanned."""
        device, held = self.device, self.held_bytes(found)
        if found.device_full:  # within its budget by the plan, which knows nothing of gaps between tensors
            self.device = replace(device, base_bytes=device.base_bytes + int(_FRAGMENTS * self.pools.computing_bytes))
            return False
        fits = _near(held, planned.peak_bytes, self.pools.ram_bytes)
        unplanned = held - planned.peak_bytes
        if self.pools.device_bytes is None:
            if not fits:
                self.device = replace(device, base_bytes=max(0, device.base_bytes + unplanned))
            return fits
        if not fits:
            beside = max(0, device.host_base_bytes + unplanned)
            self.device = with_host_room(replace(device, host_base_bytes=beside), self.pools.ram_bytes)
        if _near(found.device_peak_bytes, planned.device_peak_bytes, self.pools.device_bytes):
            return fits
        more = found.device_peak_bytes - planned.device_peak_bytes
        self.device = replace(self.device, base_bytes=max(0, self.device.base_bytes + more))
        return False

    def too_much(self, found: _Trial) -> InfeasibleError:
        """Return the error of a step that no try kept within its budgets."""
        held, pools = self.held_bytes(found), self.pools
        if pools.device_bytes is not None and held <= pools.ram_bytes:
            held, budget, option = found.device_peak_bytes, pools.device_bytes, "--gpu-ram"
        else:
            budget, option = pools.ram_bytes, "--ram"
        return InfeasibleError(
            f"the step's memory could not be kept within {format_bytes(budget)}: the last trial took {format_bytes(held)}; raise "
            f"{option} to {format_bytes(max(held, budget) * _MORE)}",
            int(max(held, budget) * _MORE),
        )

    def _planned(self, planner: Planner, ram_bytes: int) -> tuple[dict[str, Plan], dict[str, CostTable]]:
        try:
            found = make_bundle.plan_all(self.prepared, self.measured, self.device, ram_bytes, planner, self.limits)
            self._check_host(*found)
            return found
        except InfeasibleError as error:
            if self.pools.device_bytes is not None:
                raise
            self.start_bytes = self.start_bytes or loading_peak()
            if error.needed_bytes is None or error.needed_bytes >= self.start_bytes:
                raise
            raise self._too_little_to_start(str(error)) from error

    def _check_host(self, plans: Mapping[str, Plan], costs: Mapping[str, CostTable]) -> None:
        """Raise InfeasibleError where operators on the CPU beside a device, and pages, take more of the host's memory than there is."""
        if self.pools.device_bytes is None or not self.prepared.placed:
            return
        graphs = self.prepared.graphs
        programs = [lower(graphs[name], costs[name], plan) for name, plan in plans.items()]
        needed = self.device.host_base_bytes + host_bytes_of(programs)
        if needed > self.pools.ram_bytes:
            raise InfeasibleError(
                f"operators that run on the CPU, and pages of the device, take {format_bytes(needed)} of the host's memory, the budget "
                f"is {format_bytes(self.pools.ram_bytes)}: raise --ram, or --gpu-ram so that fewer pages leave the device, or plan without "
                "--place",
                needed,
            )

    def _too_little_to_start(self, reason: str) -> InfeasibleError:
        least = int(self.start_bytes * (1 + _SPARE))
        return InfeasibleError(
            f"{reason}; before the first step, loading Python and torch takes {format_bytes(self.start_bytes)}: raise "
            f"--ram to at least {format_bytes(least)}",
            least,
        )

    def keep_packings(self, found: _Trial) -> None:
        """Let further plans pack what the trial saw, for the watts of this device; another board's seconds are estimated.

        There packing takes as much longer as the step's operators do. Of shapes that it did not run, what it saw of the next larger one.
        """
        pace = found.pace if self.estimated and found.pace > 0 else 1.0
        scaled = {
            name: tuple(
                replace(
                    cost, pack_seconds=cost.pack_seconds / pace, unpack_seconds=cost.unpack_seconds / pace,
                    joules=cost.seconds / pace * self.device.compute_watts,
                )
                for cost in costs
            )
            for name, costs in found.packings.items()
        }  # fmt: skip
        graphs = self.prepared.graphs
        seen = {name: graphs[name] for name in scaled}
        for name, graph in graphs.items():
            like = make_bundle.neighbour(
                graph, {n: g for n, g in seen.items() if kind_of_graph(n) == kind_of_graph(name)}
            )
            if name not in scaled and like is not None:
                scaled[name] = neighbours.packings_of(graph, seen[like], scaled[like])
        self.measured = replace(self.measured, packings=tuple(scaled.get(name, ()) for name in graphs))

    def keep_pace(self, found: _Trial) -> None:
        """Scale the operators' costs, measured one by one, to what a whole step of the trial took.

        Together they also pay for page faults on memory that was given back, and find caches warmer or colder.
        """
        if not self.estimated and _LIKELY_PACE[0] <= found.pace <= _LIKELY_PACE[1]:
            self.measured = self.measured.at_pace(found.pace)

    def smaller_plans(self, planner: Planner | None, count: int) -> list[_Smaller]:
        """Plan for smaller budgets, and once more so that flash is spared.

        Without a planner quick ones make them.
        """
        limited = planner or _quick(self.limits)
        late = None if self.limits.step_s is None else _quick(replace(self.limits, step_s=None))
        bundle = Bundle(self.draft)
        single = bundle.manifest.graphs[0]
        smaller = pareto.budgets(bundle.graphs[single], bundle.costs[single], self.target_bytes(), count + 1)[1:]
        least = self.start_bytes if self.pools.device_bytes is None else 0
        tries = [(limit, limited, True) for limit in smaller if limit >= least]
        written = bundle.manifest.plans[0].written_bytes
        if written and self.device.flash.wear_joules_per_byte:
            sparing = replace(self.limits, step_s=None, written_bytes=int(written * _SPARED_WRITES))
            tries.insert(0, (self.target_bytes(), _quick(sparing), self.limits.step_s is None))
        found = []
        for limit, chosen, keeping in tries:
            plans = self._smaller(limit, chosen)
            if plans is None and late is not None:
                plans, keeping = self._smaller(limit, late), False
            if plans is not None:
                found.append(_Smaller(plans, limit, keeping))
        return found

    def with_cheapest_first(self, smaller: Sequence[_Smaller], found: _Trial) -> _Trial:
        """Put plans for smaller budgets in the first one's place where they cost less, and return what a trial of it took.

        Where they take in that trial what was not planned, the first stays: it took what was `found`.
        """
        bundle, device = Bundle(self.draft), self.device
        keeping = [one.plans for one in smaller if one.keeps_limits]
        cheapest = {
            name: pareto.cheapest_within(plan, (plans[name] for plans in keeping))
            for name, plan in bundle.plans[0].items()
        }
        if cheapest == bundle.plans[0]:
            return found
        again, settled = self._run(cheapest, bundle.costs)
        if settled:
            return again
        self.device = device
        self._written([bundle.plans[0]], bundle.costs, [self.pools.computing_bytes])
        return found

    def with_smaller_plans(self, smaller: Sequence[_Smaller]) -> Manifest:
        """Add plans behind the one the draft has, but for those that another beats, and return its manifest."""
        bundle = Bundle(self.draft)
        main = bundle.manifest.main_graph
        choices = [bundle.plans[0], *(one.plans for one in smaller)]
        limits = [self.pools.computing_bytes, *(one.ram_bytes for one in smaller)]
        points = [point_of(bundle.graphs[main], bundle.costs[main], c[main]) for c in choices]
        kept = [0] + [i for i in range(1, len(points)) if not any(p.dominates(points[i]) for p in points)]
        return self._written([choices[i] for i in kept], bundle.costs, [limits[i] for i in kept])

    def _smaller(self, ram_bytes: int, planner: Planner) -> dict[str, Plan] | None:
        try:
            return make_bundle.plan_all(self.prepared, self.measured, self.device, ram_bytes, planner, self.limits)[0]
        except InfeasibleError:
            return None

    def _written(
        self, plans: Sequence[Mapping[str, Plan]], costs: Mapping[str, CostTable], budgets: Sequence[int]
    ) -> Manifest:
        """Put these plans into the draft and return its manifest; the first time, write the draft."""
        if not self.begun:
            self.begun = True
            written = make_bundle.write(
                self.draft, self.prepared, plans, costs, budgets, threads=self.threads, estimated=self.estimated,
                limits=self.limits,
            )  # fmt: skip
            self.make_room()
            return written
        manifest = make_bundle.describe(
            self.prepared, plans, costs, budgets, threads=self.threads, estimated=self.estimated, limits=self.limits
        )
        replace_plans(self.draft, manifest, plans, costs)
        return manifest


def _what_runs(plans: Mapping[str, Plan]) -> _Runs | None:
    """Return what plans do, without their figures; None where costs decide about that too: when transfers begin."""
    moving = any(
        plan.sliced or any(d.action not in (Action.RECOMPUTE, Action.INTERMEDIATE) for d in plan.decisions)
        for plan in plans.values()
    )
    return None if moving else {name: (plan.order, plan.decisions) for name, plan in plans.items()}


def _near(taken: int, planned: int, budget: int) -> bool:
    return taken <= budget and abs(taken - planned) <= _TOLERANCE * planned


def loading_peak() -> int:
    """Return what a worker takes at its peak while it loads Python and torch, bytes.

    Raises TrialError where torch cannot be loaded.
    """
    command = module_command("agent.system.torch_loading")
    environment = {**module_environment(), **preload_environment(None)}
    try:
        return int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
    except subprocess.CalledProcessError as error:
        raise TrialError(f"torch could not be loaded in a process of its own: {error.stderr}") from error


def trial(
    path: Path,
    page_dirs: Sequence[Path],
    threads: int,
    throttle: Throttle | None = None,
    compared: int = 0,
    probe_packing: bool = False,
    steps: int = _TRIAL_STEPS,
) -> _Trial:
    """Run a few steps of a bundle, paging to a directory on each of its media, and return what they took.

    At least as many as are `compared` with plain PyTorch's. `probe_packing`: look at what packing tensors would take, too.

    Raises TrialError where the worker fails, or gives other numbers.
    """
    steps = max(steps, compared)
    with contextlib.ExitStack() as stack:
        folder, *further = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=".port-trial-")))
            for place in page_dirs
        )
        options = TorchOptions(
            bundle=path, state_dir=folder, scratch_dirs=tuple(further), steps=steps, verify=compared, probe_packing=probe_packing,
            discard=True,
            read_limit=None if throttle is None else throttle.read_bytes_per_s,
            write_limit=None if throttle is None else throttle.write_bytes_per_s,
        )  # fmt: skip
        worker = start_worker(torch_worker(options), limit_bytes=1 << 30, threads=threads)
        peak, start, pace, device_peak = 0, 0, 1.0, 0
        packings: dict[str, tuple[PackingCost, ...]] = {}
        failure, full = "", False
        for event in worker.events():
            match event:
                case WorkerReady():
                    start = event.start_peak_bytes or 0
                case StepDone():
                    peak, pace = max(peak, event.peak_rss_bytes or 0), _pace(event, threads)
                    device_peak = max(device_peak, event.device_peak_bytes or 0)
                case PackingProbed():
                    packings[event.graph] = (*packings.get(event.graph, ()), *event.costs)
                case TrainingFinished():
                    peak = max(peak, event.peak_rss_bytes or 0) + event.untouched_block_bytes
                case TrainingFailed():
                    failure = event.message
                    full = event.code == torch.OutOfMemoryError.__name__
        if full:
            return _Trial(peak, start, device_full=True)
        if worker.process.returncode:
            raise TrialError(
                failure or f"the trial run ended with exit code {worker.process.returncode}", worker.process.returncode
            )
        return _Trial(peak, start, pace, packings, device_peak)


def _pace(step: StepDone, threads: int) -> float:
    """Return how many seconds a step's compute took for each that was planned.

    One thread computes no longer than the CPU time of the process, which other processes disturb less than the clock.
    """
    planned = step.planned_compute_s or 0.0
    taken = step.wall_s - step.phases_s["stall"]
    if threads == 1:
        taken = min(taken, step.cpu_s)
    return taken / planned if planned > 0 else 1.0
