"""Choose the device of each operator of a step: the cheapest choice by measured seconds, joules and transfers.

A device is anything on which operators were measured: a GPU, a CPU with some number of threads, one cluster of a
big.LITTLE CPU. Bits differ between devices, so this choice is made only on request; otherwise a step runs on one
device. One operator, transfer or page runs at a time. Operators that write the same storage run on one device, where
the storage is. Storages that exceed a memory (`device_memory`) are paged, or their operators run elsewhere. Rows for
memory are added where a choice violates them, until it violates none.
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
"""The device from which batches come and to which losses go."""


class DeviceChoiceError(PortError):
    """No device can run an operator, the tables do not match, or no choice was found in time."""

    exit_code = ExitCode.IMPOSSIBLE


class Goal(enum.Enum):
    """The quantity that is minimised; the other one is at most that of the single device that is best at it."""

    JOULES = "joules"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The cost of moving contents from one device to another; zero if both use the same memory."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    joules_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class HandedContents:
    """The contents that one operator leaves in a storage, until the next one writes there.

    `writer` None: the contents are on device `source` before the step. A persistent storage begins a step with the
    contents that the previous step left in it. Contents that no operator writes are where their first reader runs,
    which then takes the place of the writer. `to_host`: the caller reads them.
    """

    nbytes: int
    writer: int | None
    readers: tuple[int, ...]
    to_host: bool = False
    source: int = HOST


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """A step whose operators may run on several devices.

    `costs[i][d]`: cost of operator `i` on device `d`, without static power; None if it cannot run there.
    `links[d][e]`: from `d` to `e`.
    """

    costs: tuple[tuple[OpCost | None, ...], ...]
    contents: tuple[HandedContents, ...]
    links: tuple[tuple[DeviceLink, ...], ...]
    static_watts: float = 0.0
    together: tuple[tuple[int, ...], ...] = ()
    """Groups of operators that must run on one device each."""
    memory: DeviceMemory | None = None
    """Capacities of memories; None: unlimited."""
    switch_s: tuple[tuple[float, ...], ...] = ()
    """Seconds from an operator on one device to the next on another, besides transfers; None: no time.

    The first operator follows the last.
    """

    @property
    def switches(self) -> Iterator[tuple[int, int]]:
        """Yield the neighbouring operators between which a switch takes time."""
        count = len(self.costs)
        return ((i, (i + 1) % count) for i in range(count) if self.switch_s and count > 1)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device for each operator, and the cost of such a step.

    `moved_bytes`: bytes moved between devices. `pages`: pages of storages that exceed a memory.
    """

    devices: tuple[int, ...]
    seconds: float
    joules: float
    moved_bytes: int
    pages: tuple[DevicePage, ...] = ()

    def amount(self, goal: Goal) -> float:
        """Return the quantity that a goal minimises."""
        return self.joules if goal is Goal.JOULES else self.seconds


def contents_of(graph: StepGraph, homes: Mapping[str, int] = {}) -> tuple[HandedContents, ...]:
    """Return what operators of a step pass to each other; `homes`: devices, by key, of contents
    that the step does not write.
    """
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
    """Yield the contents of a lasting storage that no operator of the step writes."""
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
    """Return the cost of a step with these devices and pages, even if it exceeds a memory.

    Raises DeviceChoiceError if an operator cannot run on its device.
    """
    seconds, joules, moved = 0.0, 0.0, 0
    for i, (costs, d) in enumerate(zip(problem.costs, devices, strict=True)):
        cost = costs[d]
        if cost is None:
            raise DeviceChoiceError(f"operator {i} cannot run on device {d}; it was not measured there")
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
    """Return the cost of the step on each device that can run all of it, with the pages that its memory requires.

    A device without a solution within its memory in time is left out.
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
    """Return the choice with the least joules (seconds) whose seconds (joules) are at most those of the
    best device, or `within`.

    So neither ever exceeds the best device's, whose choice is returned if nothing better is found in time. Every choice
    fits the memories. Raises DeviceChoiceError if the tables do not match, if some operator runs on no device, or if no
    single device runs all operators and nothing was found.
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
                f"{time_limit_s:g} s; allow more time or memory, or measure all operators on one device"
            )
        return single
    other = Goal.SECONDS if goal is Goal.JOULES else Goal.JOULES
    if single is not None and (
        found.amount(goal) >= single.amount(goal) or found.amount(other) > single.amount(other) * (1 + 1e-6)
    ):
        return single
    return found


_SAME_MEMORY = DeviceLink()
"""The cost between devices that share a memory, where nothing is moved."""
_MIN_S = 0.05
"""Least seconds for one look at a model, even if time is up, because a single device is also limited by its memory."""


def _tight(problem: DeviceProblem, choice: DeviceChoice) -> frozenset[tuple[int, int]]:
    """Return the places at which a choice exceeds its memories."""
    if problem.memory is None:
        return frozenset()
    return overfull(problem.memory, pool_bytes(problem.memory, problem.costs, choice.devices, choice.pages))


def _search(problem: DeviceProblem, goal: Goal, single: DeviceChoice | None, end: float) -> DeviceChoice | None:
    """Return the best choice within the memories found until `end` (CPU time of this
    process); None if there is none.
    """
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
            f"the table of links has {count} devices, so every operator needs {count} costs, None where it cannot run"
        )
    for i, costs in enumerate(problem.costs):
        if all(cost is None for cost in costs):
            raise DeviceChoiceError(f"operator {i} runs on none of the {count} devices; measure it on one of them")


def _model(
    problem: DeviceProblem, goal: Goal, single: DeviceChoice | None, tight: frozenset[tuple[int, int]]
) -> tuple[LinearModel, list[dict[int, int]], MemoryRows | None]:
    """Return the model, the columns `d(i,e)` (operator `i` runs on device `e`), and the memory
    rows at `tight` operators.
    """
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
        for source, target in _pairs_of_devices(problem, place, contents):
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
    """Count the switch from an operator's device to that of the next operator."""
    for i, j in problem.switches:
        for (d, here), (e, there) in itertools.product(place[i].items(), place[j].items()):
            if d != e and problem.switch_s[d][e]:
                switched = column(f"s({i},{d},{e})", problem.switch_s[d][e])
                model.row(f"switched({i},{d},{e})", [(switched, 1.0), (here, -1.0), (there, -1.0)], -1.0, np.inf)


def _pairs_of_devices(
    problem: DeviceProblem, place: Sequence[dict[int, int]], contents: HandedContents
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of devices between which contents may have to move."""
    for source in (contents.source,) if contents.writer is None else tuple(place[contents.writer]):
        for target in range(len(problem.links)):
            if target != source and problem.links[source][target] != _SAME_MEMORY:
                yield source, target
