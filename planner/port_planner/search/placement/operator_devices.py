"""On which device each operator of a step runs: the cheapest choice by measured seconds, joules and transfers.

Devices are whatever operators were measured on: a GPU, a CPU with so many threads, one cluster of a big.LITTLE CPU. Bits change
between devices, so nobody chooses here unasked: a step runs on one device. One operator, transfer or page runs at a time. Operators that
write the same storage run on one device: it lies there. What memories have no room for (`device_memory`) is paged, or its operators run
elsewhere; rows for that are added where the choice found breaks them, until it breaks none.
"""

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import OpCost
from port_planner.ir.graph import Role, StepGraph, Storage
from port_planner.milp.highs import HighsSession, LinearModel
from port_planner.search.placement.device_memory import (
    Column,
    DeviceMemory,
    DevicePage,
    MemoryRows,
    overfull,
    paging_costs,
    pool_bytes,
)

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
    memory: DeviceMemory | None = None
    """What memories have room for; None: for all."""
    switch_s: tuple[tuple[float, ...], ...] = ()
    """Seconds from an operator on one device to the next on another, beside transfers; the first follows the last. None: no time."""

    @property
    def switches(self) -> Iterator[tuple[int, int]]:
        """Yield the neighbours between which a switch takes time."""
        count = len(self.costs)
        return ((i, (i + 1) % count) for i in range(count) if self.switch_s and count > 1)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device for each operator, and what a step takes so. `moved_bytes`: between devices. `pages`: what memory has no room for."""

    devices: tuple[int, ...]
    seconds: float
    joules: float
    moved_bytes: int
    pages: tuple[DevicePage, ...] = ()

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


def on_devices(problem: DeviceProblem, devices: Sequence[int], pages: Sequence[DevicePage] = ()) -> DeviceChoice:
    """Return what a step takes with these devices and pages, whatever memories have room for.

    Raises DeviceChoiceError where an operator cannot run on its device.
    """
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
            if link != _SAME_MEMORY:
                seconds += link.seconds(contents.nbytes)
                joules += link.joules_per_byte * contents.nbytes
                moved += contents.nbytes
    seconds += sum(problem.switch_s[devices[i]][devices[j]] for i, j in problem.switches)
    if problem.memory is not None:
        for page in pages:
            flash = problem.memory.targets[page.target].flash
            more = paging_costs(problem.memory.held[page.held], page.gap, flash)
            seconds, joules = seconds + more[0], joules + more[1]
    return DeviceChoice(tuple(devices), seconds, joules + problem.static_watts * seconds, moved, tuple(pages))


def on_one_device(
    problem: DeviceProblem, goal: Goal = Goal.JOULES, time_limit_s: float = 30.0
) -> dict[int, DeviceChoice]:
    """Return what the step takes on each device that can run all of it, with the pages that its memory makes necessary.

    A device for whose memory no way was found in time is left out.
    """
    found = {}
    for d in range(len(problem.links)):
        if all(costs[d] is not None for costs in problem.costs):
            choice = on_devices(problem, [d] * len(problem.costs))
            if _tight(problem, choice):
                alone = tuple(tuple(c if e == d else None for e, c in enumerate(costs)) for costs in problem.costs)
                within = _search(replace(problem, costs=alone), goal, None, time.process_time() + time_limit_s)
                if within is None:
                    continue
                choice = within
            found[d] = choice
    return found


def choose_devices(
    problem: DeviceProblem, goal: Goal = Goal.JOULES, time_limit_s: float = 30.0, *, within: DeviceChoice | None = None
) -> DeviceChoice:
    """Return the choice with the least joules (seconds) whose seconds (joules) are no more than on the best single device, or `within`.

    So neither is ever more than on that device: it stands where nothing better was found in time. All of them keep to what memories have
    room for. Raises DeviceChoiceError where tables do not fit each other, some operator runs nowhere, or no single device runs all and nothing
    was found.
    """
    _verify(problem)
    end = time.process_time() + time_limit_s
    alone = () if within is not None else on_one_device(problem, goal, time_limit_s).values()
    single = within or min(alone, key=lambda c: c.amount(goal), default=None)
    found = _search(problem, goal, single, end)
    if found is None:
        if single is None:
            raise DeviceChoiceError(
                "no device runs all operators within its memory, and no choice was found in "
                f"{time_limit_s:g} s: allow more time or memory, or measure all operators on one device"
            )
        return single
    other = Goal.SECONDS if goal is Goal.JOULES else Goal.JOULES
    if single is not None and (
        found.amount(goal) >= single.amount(goal) or found.amount(other) > single.amount(other) * (1 + 1e-6)
    ):
        return single
    return found


_SAME_MEMORY = DeviceLink()
"""Between devices that compute in one memory nothing is moved."""
_MIN_S = 0.05
"""Of a look at a model, also once the time is over: a device alone is bounded by its memory, too."""


def _tight(problem: DeviceProblem, choice: DeviceChoice) -> frozenset[tuple[int, int]]:
    """Return where a choice holds more than its memories have room for."""
    if problem.memory is None:
        return frozenset()
    return overfull(problem.memory, pool_bytes(problem.memory, problem.costs, choice.devices, choice.pages))


def _search(problem: DeviceProblem, goal: Goal, single: DeviceChoice | None, end: float) -> DeviceChoice | None:
    """Return the best choice that keeps to its memories, found until `end` (CPU time of this process); None where none was."""
    tight, start = frozenset[tuple[int, int]](), single
    while True:
        model, place, rows = _model(problem, goal, single, tight)
        session = HighsSession(model)
        if start is not None:
            session.start_from(
                {v: float(d == start.devices[i]) for i, columns in enumerate(place) for d, v in columns.items()}
            )
        values = session.run(max(end - time.process_time(), _MIN_S)).values
        if values is None:
            return None
        devices = [max((values[v], d) for d, v in columns.items())[1] for columns in place]
        found = on_devices(problem, devices, rows.chosen(values) if rows is not None else ())
        more = _tight(problem, found) - tight
        if not more:
            return None if _tight(problem, found) else found
        tight |= more
        if time.process_time() > end:
            return None


def _verify(problem: DeviceProblem) -> None:
    count = len(problem.links)
    if any(len(row) != count for row in problem.links) or any(len(costs) != count for costs in problem.costs):
        raise DeviceChoiceError(
            f"the table of links has {count} devices; every operator needs a cost, or None, for each of them"
        )
    for i, costs in enumerate(problem.costs):
        if all(cost is None for cost in costs):
            raise DeviceChoiceError(f"operator {i} runs on none of the {count} devices; measure it on one of them")


def _model(
    problem: DeviceProblem, goal: Goal, single: DeviceChoice | None, tight: frozenset[tuple[int, int]]
) -> tuple[LinearModel, list[dict[int, int]], MemoryRows | None]:
    """Return the model, the columns `d(i,e)`: operator `i` runs on device `e`, and the rows of memory at the `tight` operators."""
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
                f"t({c},{source},{target})",
                link.seconds(contents.nbytes),
                link.joules_per_byte * contents.nbytes,
                integral=False,
            )
            written = [] if contents.writer is None else [(place[contents.writer][source], -1.0)]
            there = len(written)
            for i in contents.readers:
                if target in place[i]:
                    terms = [(moved, 1.0), (place[i][target], -1.0), *written]
                    model.row(f"moved({c},{source},{target},{i})", terms, -there, np.inf)
            if contents.to_host and target == HOST:
                model.row(f"moved({c},{source},{target},host)", [(moved, 1.0), *written], 1.0 - there, np.inf)
    _switch_rows(problem, model, place, lambda name, seconds: column(name, seconds, 0.0, integral=False))
    rows = None
    if problem.memory is not None and tight:
        paged: Column = lambda name, seconds, joules: column(name, seconds, joules, integral=True)  # noqa: E731
        rows = MemoryRows(model, place, problem.costs, problem.memory, tight, paged)
    if single is not None:
        other = Goal.SECONDS if goal is Goal.JOULES else Goal.JOULES
        model.row(f"no_more_{other.value}", taken[other], -np.inf, single.amount(other) / scales[other])
    return model, place, rows


def _switch_rows(
    problem: DeviceProblem, model: LinearModel, place: Sequence[dict[int, int]], column: Callable[[str, float], int]
) -> None:
    """Charge what it takes from an operator's device to that of the next."""
    for i, j in problem.switches:
        for (d, here), (e, there) in itertools.product(place[i].items(), place[j].items()):
            if d != e and problem.switch_s[d][e]:
                switched = column(f"s({i},{d},{e})", problem.switch_s[d][e])
                model.row(f"switched({i},{d},{e})", [(switched, 1.0), (here, -1.0), (there, -1.0)], -1.0, np.inf)


def _ways(
    problem: DeviceProblem, place: Sequence[dict[int, int]], contents: HandedContents
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of devices between which contents may have to move."""
    for source in (contents.source,) if contents.writer is None else tuple(place[contents.writer]):
        for target in range(len(problem.links)):
            if target != source and problem.links[source][target] != _SAME_MEMORY:
                yield source, target
