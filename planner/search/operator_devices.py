"""On which device each operator of a step runs: the cheapest choice by measured seconds, joules and transfers.

Devices are whatever operators were measured on: a GPU, a CPU with so many threads, one cluster of a big.LITTLE CPU. Bits change
between devices, so nobody chooses here unasked: a step runs on one device. One operator or transfer runs at a time; what
each device's memory holds is not bounded here. Operators that write the same storage run on one device: it lies there.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.ir.costs import OpCost
from planner.ir.errors import ExitCode, PortError
from planner.ir.graph import Role, StepGraph, Storage
from planner.milp.highs import HighsSession, LinearModel

HOST = 0
"""The device that batches come from and losses go to."""


class DeviceChoiceError(PortError):
    """No device can run an operator, the tables do not fit each other, or the time was too short for any choice."""

    exit_code = ExitCode.IMPOSSIBLE


class Goal(enum.Enum):
    """What is made least; the other is no more than on the one device that is best at it."""

    JOULES = "joules"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """How contents get from one device to another; all nothing where both compute in the same memory."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    joules_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class HandedContents:
    """What one operator leaves in a storage, until the next writes there.

    `writer` None: they are on device `source` before the step. A persistent storage begins a step with what the step before left in
    it. What nobody writes lies where its first reader runs, which stands for the writer then. `to_host`: the caller reads it.
    """

    nbytes: int
    writer: int | None
    readers: tuple[int, ...]
    to_host: bool = False
    source: int = HOST


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """A step whose operators may run on several devices.

    `costs[i][d]`: of operator `i` on device `d`, without static power; None where it cannot run there. `links[d][e]`: from `d` to `e`.
    """

    costs: tuple[tuple[OpCost | None, ...], ...]
    contents: tuple[HandedContents, ...]
    links: tuple[tuple[DeviceLink, ...], ...]
    static_watts: float = 0.0
    together: tuple[tuple[int, ...], ...] = ()
    """Operators that run on one device, each group on its own."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device for each operator, and what a step takes so. `moved_bytes`: between devices."""

    devices: tuple[int, ...]
    seconds: float
    joules: float
    moved_bytes: int

    def amount(self, goal: Goal) -> float:
        """Return what a goal is about."""
        return self.joules if goal is Goal.JOULES else self.seconds


def contents_of(graph: StepGraph, homes: Mapping[str, int] = {}) -> tuple[HandedContents, ...]:
    """Return what operators of a step hand to each other; `homes`: devices, by key, that have what this step does not write."""
    found: list[HandedContents] = []
    for s, storage in enumerate(graph.storages):
        readers: dict[int | None, list[int]] = {w: [] for w in graph.writers[s]}
        last = graph.writers[s][-1] if graph.writers[s] else None
        for i in graph.uses[s]:
            if s in graph.reads[i]:
                before = [w for w in graph.writers[s] if w < i]
                readers.setdefault(before[-1] if before else last if storage.persistent else None, []).append(i)
        for writer, who in readers.items():
            if writer is None and storage.role is not Role.BATCH:
                found += _unwritten(storage, who, homes)
                continue
            to_host = s in graph.kept and writer == last
            if who or to_host:
                found.append(HandedContents(storage.nbytes, writer, tuple(who), to_host))
    return tuple(found)


def _unwritten(storage: Storage, readers: Sequence[int], homes: Mapping[str, int]) -> Iterator[HandedContents]:
    """Yield what is handed of a storage that lasts, and that no operator of the step writes."""
    if storage.key in homes:
        yield HandedContents(storage.nbytes, None, tuple(readers), source=homes[storage.key])
    elif len(readers) > 1:
        yield HandedContents(storage.nbytes, readers[0], tuple(readers[1:]))


def together_of(graph: StepGraph) -> tuple[tuple[int, ...], ...]:
    """Return the groups of operators that write the same storages, each of two or more, ascending."""
    first = list(range(len(graph.ops)))

    def root(i: int) -> int:
        while first[i] != i:
            i = first[i]
        return i

    for writers in graph.writers:
        for a, b in itertools.pairwise(writers):
            low, high = sorted((root(a), root(b)))
            first[high] = low
    groups: dict[int, list[int]] = {}
    for i in range(len(graph.ops)):
        groups.setdefault(root(i), []).append(i)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def on_devices(problem: DeviceProblem, devices: Sequence[int]) -> DeviceChoice:
    """Return what a step takes with these devices; raises DeviceChoiceError where an operator cannot run on its own."""
    seconds, joules, moved = 0.0, 0.0, 0
    for i, (costs, d) in enumerate(zip(problem.costs, devices, strict=True)):
        cost = costs[d]
        if cost is None:
            raise DeviceChoiceError(f"operator {i} cannot run on device {d}; nobody has measured it there")
        seconds += cost.seconds
        joules += cost.joules
    for contents in problem.contents:
        source = contents.source if contents.writer is None else devices[contents.writer]
        wanted = {devices[i] for i in contents.readers} | ({HOST} if contents.to_host else set())
        for target in wanted - {source}:
            link = problem.links[source][target]
            seconds += link.seconds(contents.nbytes)
            joules += link.joules_per_byte * contents.nbytes
            moved += contents.nbytes
    return DeviceChoice(tuple(devices), seconds, joules + problem.static_watts * seconds, moved)


def on_one_device(problem: DeviceProblem) -> dict[int, DeviceChoice]:
    """Return what the step takes on each device that can run all of it."""
    return {
        d: on_devices(problem, [d] * len(problem.costs))
        for d in range(len(problem.links))
        if all(costs[d] is not None for costs in problem.costs)
    }


def choose_devices(problem: DeviceProblem, goal: Goal = Goal.JOULES, time_limit_s: float = 30.0) -> DeviceChoice:
    """Return the choice with the least joules (seconds) whose seconds (joules) are no more than on the best single device.

    So neither is ever more than on that device: it stands where nothing better was found in time. Raises DeviceChoiceError
    where tables do not fit each other, some operator runs nowhere, or no single device runs all and nothing was found.
    """
    _verify(problem)
    single = min(on_one_device(problem).values(), key=lambda c: c.amount(goal), default=None)
    model, place = _model(problem, goal, single)
    values = HighsSession(model).run(time_limit_s).values
    if values is None:
        if single is None:
            raise DeviceChoiceError(
                "no device runs all operators, and no choice was found in "
                f"{time_limit_s:g} s: allow more time, or measure all operators on one device"
            )
        return single
    found = on_devices(problem, [max((values[v], d) for d, v in columns.items())[1] for columns in place])
    other = Goal.SECONDS if goal is Goal.JOULES else Goal.JOULES
    if single is not None and (
        found.amount(goal) >= single.amount(goal) or found.amount(other) > single.amount(other) * (1 + 1e-6)
    ):
        return single
    return found


def _verify(problem: DeviceProblem) -> None:
    count = len(problem.links)
    if any(len(row) != count for row in problem.links) or any(len(costs) != count for costs in problem.costs):
        raise DeviceChoiceError(
            f"the table of links has {count} devices; every operator needs a cost, or None, for each of them"
        )
    for i, costs in enumerate(problem.costs):
        if all(cost is None for cost in costs):
            raise DeviceChoiceError(f"operator {i} runs on none of the {count} devices; measure it on one of them")


def _model(problem: DeviceProblem, goal: Goal, single: DeviceChoice | None) -> tuple[LinearModel, list[dict[int, int]]]:
    """Return the model, and the columns `d(i,e)`: operator `i` runs on device `e`."""
    scales = {g: 1.0 if single is None else single.amount(g) or 1.0 for g in Goal}
    model = LinearModel()
    taken: dict[Goal, list[tuple[int, float]]] = {g: [] for g in Goal}

    def column(name: str, seconds: float, joules: float, *, integral: bool) -> int:
        amounts = {Goal.SECONDS: seconds, Goal.JOULES: joules + problem.static_watts * seconds}
        made = model.column(name, 100 * amounts[goal] / scales[goal], integral=integral)
        for g, amount in amounts.items():
            taken[g].append((made, amount / scales[g]))
        return made

    place = [
        {
            d: column(f"d({i},{d})", cost.seconds, cost.joules, integral=True)
            for d, cost in enumerate(costs)
            if cost is not None
        }
        for i, costs in enumerate(problem.costs)
    ]
    for i, columns in enumerate(place):
        model.row(f"one_device({i})", [(v, 1.0) for v in columns.values()], 1.0, 1.0)
    for first, *others in problem.together:
        for i, d in itertools.product(others, range(len(problem.links))):
            ends = [(place[k][d], sign) for k, sign in ((first, 1.0), (i, -1.0)) if d in place[k]]
            if ends:
                model.row(f"together({first},{i},{d})", ends, 0.0, 0.0)
    for c, contents in enumerate(problem.contents):
        for source, target in _ways(problem, place, contents):
            link = problem.links[source][target]
            moved = column(
                f"t({c},{source},{target})", link.seconds(contents.nbytes),
                link.joules_per_byte * contents.nbytes, integral=False,
            )  # fmt: skip
            written = [] if contents.writer is None else [(place[contents.writer][source], -1.0)]
            there = len(written)
            for i in contents.readers:
                if target in place[i]:
                    terms = [(moved, 1.0), (place[i][target], -1.0), *written]
                    model.row(f"moved({c},{source},{target},{i})", terms, -there, np.inf)
            if contents.to_host and target == HOST:
                model.row(f"moved({c},{source},{target},host)", [(moved, 1.0), *written], 1.0 - there, np.inf)
    if single is not None:
        other = Goal.SECONDS if goal is Goal.JOULES else Goal.JOULES
        model.row(f"no_more_{other.value}", taken[other], -np.inf, single.amount(other) / scales[other])
    return model, place


def _ways(
    problem: DeviceProblem, place: Sequence[dict[int, int]], contents: HandedContents
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of devices between which contents may have to move."""
    for source in (contents.source,) if contents.writer is None else tuple(place[contents.writer]):
        for target in range(len(problem.links)):
            if target != source:
                yield source, target
