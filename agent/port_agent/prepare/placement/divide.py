"""Operators of a job's graphs divided between the CPU and a device: measured on both, and chosen by
time, including transfers.

Both memories limit the choice. If one of them is short, each division is planned within the budgets, as is the whole
step on one device. The fastest of these plans is used.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from port_agent.backend.base import Backend
from port_agent.backend.cpu import CpuBackend
from port_agent.backend.transfer_ring import MIN_BYTES, TransferRing
from port_agent.paging.pager import BURST
from port_agent.prepare.placement.memories import DEVICE, PlacementMemory
from port_agent.prepare.pools import copy_seconds
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.manifest import UPDATING, kind_of_graph
from port_planner.ir.costs import OpCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.graph import StepGraph
from port_planner.ir.operands.verify import verify_operands
from port_planner.make_bundle import CapturedJob
from port_planner.problem.placed_step import PlacedStep, on_kind, placed_step
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.placement.operator_devices import (
    HOST,
    DeviceChoice,
    DeviceChoiceError,
    DeviceLink,
    DeviceProblem,
    Goal,
    choose_devices,
    contents_of,
    on_devices,
    on_one_device,
    together_of,
)

_SAMPLE_BYTES, _LATENCY_BYTES = 4 << 20, 4096
_MIN_SECONDS = 1e-9
"""Least seconds of a transfer's sample, because no link takes zero seconds or less."""


class PlacementError(PortError):
    """The operators cannot be divided, or need not be."""

    exit_code = ExitCode.IMPOSSIBLE


_Costs = tuple[OpCost | None, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """Transfers between the host's memory and a device's."""

    into: DeviceLink
    out: DeviceLink

    @property
    def table(self) -> tuple[tuple[DeviceLink, ...], ...]:
        """Return the links in the form of `DeviceProblem`."""
        return (DeviceLink(), self.into), (self.out, DeviceLink())


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """The job with placed graphs, and the costs of their operators.

    `kinds`: for each recorded graph, the kind of device of each operator. `choice`: the choice made for the first
    graph. `alone`: seconds of the first graph on each kind of device that can run all of it.
    """

    captured: CapturedJob
    measured: MeasuredCosts
    kinds: Mapping[str, tuple[str, ...]]
    choice: DeviceChoice
    alone: Mapping[str, float]


def measured_links(backend: Backend, watts: float) -> Links:
    """Return the costs of transfers between the host's ordinary memory and the device's, at `watts`: through a ring, as
    in steps.
    """
    ring = None if backend.unified else TransferRing(backend, BURST)
    found = []
    try:
        for out in (False, True):
            large, small = (_seconds(backend, ring, nbytes, out=out) for nbytes in (_SAMPLE_BYTES, _LATENCY_BYTES))
            rate = max(large - small, _MIN_SECONDS) / (_SAMPLE_BYTES - _LATENCY_BYTES)
            found.append(DeviceLink(small, rate, rate * watts))
    finally:
        if ring is not None:
            ring.close()
    return Links(*found)


def _seconds(backend: Backend, ring: TransferRing | None, nbytes: int, *, out: bool) -> float:
    """Return the seconds of the fastest of a few transfers into the device, or out of it."""
    here, there = CpuBackend().allocate(nbytes)[:nbytes].zero_(), backend.allocate(nbytes)[:nbytes].zero_()
    target, source = (here, there) if out else (there, here)
    through = ring if nbytes >= MIN_BYTES else None
    return copy_seconds(backend, target, source, through)


def placed_job(
    captured: CapturedJob,
    on_cpu: MeasuredCosts,
    on_device: MeasuredCosts,
    kind: str,
    links: Links,
    watts: float,
    memory: PlacementMemory,
    *,
    time_limit_s: float,
) -> PlacedJob:
    """Return the job with its operators where they take the least time within `memory`, by measurements of
    each graph on both devices.

    Graphs with an update come first: weights, sums of gradients and optimizer state stay where these graphs put them.
    `watts`: power of the machine during transfers. Raises PlacementError if no division was found that is faster within
    the budgets than one device alone. Raises DeviceChoiceError if an operator of a further graph cannot run where the
    first graph's weights are, or no choice fits the memories.
    """
    kinds, known = dict[str, tuple[str, ...]](), dict[str, str]()
    made, ops, elsewhere = dict[str, StepGraph](), dict[str, tuple[OpCost, ...]](), dict[str, _Costs]()
    first: tuple[DeviceChoice, Mapping[str, float]] | None = None
    tables = dict(
        zip(captured.graphs, zip(_table(on_cpu, captured), _table(on_device, captured), strict=True), strict=True)
    )
    for name in sorted(captured.graphs, key=lambda name: kind_of_graph(name) not in UPDATING):
        graph, costs = captured.graphs[name], tables[name]
        problem = _problem(graph, costs, known, kind, links, memory)
        choice = choose_devices(problem, Goal.SECONDS, time_limit_s)
        if first is None:
            judged = _judged(graph, problem, choice, kind, links, watts, memory, time_limit_s)
            choice, alone = judged
            if len(set(choice.devices)) == 1:
                raise PlacementError(_one_is_best((CPU, kind)[choice.devices[0]], alone, time_limit_s))
            first = judged
        kinds[name] = tuple((CPU, kind)[d] for d in _with_the_device(choice.devices, problem))
        placed = placed_step(graph, kinds[name], known)
        verify_operands(placed.graph)
        known |= {s.key: s.device for i, s in enumerate(placed.graph.storages) if s.persistent and placed.graph.uses[i]}
        made[name] = placed.graph
        ops[name] = _costs(placed, kinds[name], costs, links, watts)
        elsewhere[name] = _elsewhere(placed, kinds[name], costs)
    if first is None:
        raise PlacementError("the job has no graph; capture it again")
    names = tuple(captured.graphs)
    there = replace(captured, graphs={name: made[name] for name in names}, placed=(CPU, kind))
    measured = replace(
        on_cpu,
        ops=tuple(ops[name] for name in names),
        packings=(),
        absent=(),
        elsewhere=tuple(elsewhere[name] for name in names),
    )
    return PlacedJob(there, measured, kinds, *first)


def _judged(
    graph: StepGraph,
    problem: DeviceProblem,
    choice: DeviceChoice,
    kind: str,
    links: Links,
    watts: float,
    memory: PlacementMemory,
    time_limit_s: float,
) -> tuple[DeviceChoice, Mapping[str, float]]:
    """Return the choice that takes the least time within the budgets, and the times of single kinds of devices.

    If nothing is paged, that is the first choice. Otherwise plans decide, because they page or recompute during
    computation: plans of that choice, of the choices with unlimited memory and without paging, and of all on one
    device.
    """
    kinds = (CPU, kind)
    alone = on_one_device(problem, Goal.SECONDS, time_limit_s)
    whole = [d for d in range(len(kinds)) if all(costs[d] is not None for costs in problem.costs)]
    if len(alone) == len(whole) and not any(c.pages for c in (choice, *alone.values())):
        return choice, {kinds[d]: c.seconds for d, c in alone.items()}
    unbounded = choose_devices(replace(problem, memory=None), Goal.SECONDS, time_limit_s)
    candidates = {choice.devices: choice, unbounded.devices: unbounded}
    if problem.memory is not None:
        unpaged = replace(problem, memory=replace(problem.memory, targets=()))
        with contextlib.suppress(DeviceChoiceError):  # no choice fits the memories without pages
            found = choose_devices(unpaged, Goal.SECONDS, time_limit_s)
            candidates[found.devices] = found
    candidates |= {(d,) * len(graph.ops): on_devices(problem, [d] * len(graph.ops)) for d in whole}
    tables = tuple(row[HOST] for row in problem.costs), tuple(row[DEVICE] for row in problem.costs)
    taken = dict[tuple[int, ...], float]()
    for devices in candidates:
        where = tuple(kinds[d] for d in devices)
        if len(set(devices)) == 1:
            made, ops = on_kind(graph, where[0]), tuple(c for c in tables[devices[0]] if c is not None)
        else:
            placed = placed_step(graph, where)
            made, ops = placed.graph, _costs(placed, where, tables, links, watts)
        seconds = memory.planned_seconds(made, ops)
        if seconds is not None:
            taken[devices] = seconds
    if not taken:
        return choice, {}
    best = min(taken, key=lambda devices: taken[devices])
    single = {kinds[d]: taken[each] for d in whole if (each := (d,) * len(graph.ops)) in taken}
    return replace(candidates[best], seconds=taken[best]), single


def _one_is_best(kind: str, alone: Mapping[str, float], time_limit_s: float) -> str:
    taken = ", ".join(f"{1e3 * seconds:.3g} ms on {where}" for where, seconds in alone.items())
    return (
        f"no division of the operators that saves time was found in {time_limit_s:g} s: a step's operators take "
        f"{taken}; leave out --place and plan with --device {kind}, or search longer with --time-limit"
    )


def _table(measured: MeasuredCosts, captured: CapturedJob) -> list[_Costs]:
    """Return the costs of operators, graph by graph; None for those that a device lacks."""
    absent = measured.absent or ((),) * len(captured.graphs)
    return [
        tuple(None if i in lacking else cost for i, cost in enumerate(table))
        for table, lacking in zip(measured.ops, map(frozenset, absent), strict=True)
    ]


def _problem(
    graph: StepGraph,
    costs: tuple[_Costs, _Costs],
    known: Mapping[str, str],
    kind: str,
    links: Links,
    memory: PlacementMemory,
) -> DeviceProblem:
    """Return the placement problem of a graph whose lasting storages are where other graphs put them."""
    rows: list[_Costs] = list(zip(*costs, strict=True))
    for s, storage in enumerate(graph.storages):
        home = known.get(storage.key) if storage.persistent else None
        for i in graph.writers[s] if home is not None else ():
            rows[i] = (rows[i][HOST], None) if home == CPU else (None, rows[i][DEVICE])
    homes = {key: HOST if where == CPU else DEVICE for key, where in known.items()}
    return DeviceProblem(
        tuple(rows),
        contents_of(graph, homes),
        links.table,
        memory.device.static_watts,
        together=together_of(graph),
        memory=memory.memory(graph, homes),
    )


def _with_the_device(devices: Sequence[int], problem: DeviceProblem) -> tuple[int, ...]:
    """Return a choice that includes the device: bundles are of one kind of device, and further
    graphs may hardly use it.
    """
    if DEVICE in devices:
        return tuple(devices)
    grouped = {i for group in problem.together for i in group}
    expensive = [(c.seconds, i) for i, (_, c) in enumerate(problem.costs) if c is not None and i not in grouped]
    chosen = max(expensive, default=(0.0, -1))[1]
    return tuple(DEVICE if i == chosen else d for i, d in enumerate(devices))


def _elsewhere(placed: PlacedStep, kinds: Sequence[str], costs: tuple[_Costs, _Costs]) -> _Costs:
    """Return the costs of a placed graph's operators on the other device; None for transfers, and for operators that it
    lacks.
    """
    return tuple(None if i is None else costs[DEVICE if kinds[i] == CPU else HOST][i] for i in placed.origin)


def _costs(
    placed: PlacedStep, kinds: Sequence[str], costs: tuple[_Costs, _Costs], links: Links, watts: float
) -> tuple[OpCost, ...]:
    """Return the costs of a placed graph's operators; workspace on the CPU is taken from the host's memory,
    not from the planned one.
    """
    graph, found = placed.graph, []
    for op, origin in zip(graph.ops, placed.origin, strict=True):
        moved = transfer_of(graph, op)
        if origin is None:
            if moved is None:
                raise PlacementError(f"{op.name} was placed but is not an operator of the step; report this")
            target = graph.storages[moved.target]
            seconds = (links.out if target.device == CPU else links.into).seconds(target.nbytes)
            found.append(OpCost(seconds, 0, seconds * watts))
            continue
        on_cpu = kinds[origin] == CPU
        cost = costs[HOST if on_cpu else DEVICE][origin]
        if cost is None:
            raise PlacementError(f"{op.name} was placed on {kinds[origin]}, which does not have it; report this")
        found.append(replace(cost, workspace_bytes=0, beside_bytes=cost.workspace_bytes) if on_cpu else cost)
    return tuple(found)
