"""Memory of a step whose operators run on several devices: the bytes in each pool, and rows
that keep a choice within it.

A storage is in the memory where it is written, as long as it is used there or must be copied from there. A copy lives
from its first reader in another memory to its last. A storage that fits into no pool is paged between two uses, or
its operators run elsewhere.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from port_planner.ir.costs import Flash, OpCost
from port_planner.ir.graph import Role, StepGraph
from port_planner.milp.highs import LinearModel

Terms = list[tuple[int, float]]

_MARGIN = 4e-6
"""Share of a pool that the rows leave free, in whole bytes, because the solver is accurate to a millionth."""


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A storage of a step, by the indices of the operators that use it.

    `owner`: the operator whose memory it lies in; None: it lies in memory `home`. `segments`: its readers between two
    writes, in order. `lasting`: it exists throughout the step, and so do its copies if `copies_last`. `kept`: it exists
    from its first use to the end. `written`: an operator of the step changes it.
    """

    nbytes: int
    owner: int | None
    home: int
    uses: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    lasting: bool = False
    copies_last: bool = False
    kept: bool = False
    written: bool = True

    def gaps(self, operators: int) -> "Iterator[IdleSpan]":
        """Yield the spans in which it may be paged out: between non-adjacent uses, and around
        the step's end if it lasts.
        """
        for after, before in itertools.pairwise(self.uses):
            if before > after + 1:
                yield IdleSpan(after, before)
        if self.lasting and len(self.uses) and self.uses[-1] - self.uses[0] + 1 < operators:
            yield IdleSpan(self.uses[-1], self.uses[0])


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """The operators after `after` and before `before`; it wraps around the end of the step if
    `before` is not after `after`.
    """

    after: int
    before: int

    def covers(self, i: int) -> bool:
        """Return whether an operator is in the span."""
        return self.after < i < self.before if self.after < self.before else (i > self.after or i < self.before)


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Bytes that tensors and workspace may take together in some memories."""

    memories: frozenset[int]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PageTarget:
    """A target for pages of one memory, and the memory that contains these pages; None for a medium."""

    memory: int
    flash: Flash
    into: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memories in which devices compute (`memory_of`, one per device), what a step holds
    there, and their capacities.
    """

    memory_of: tuple[int, ...]
    held: tuple[HeldStorage, ...]
    pools: tuple[MemoryPool, ...]
    targets: tuple[PageTarget, ...] = ()


@dataclass(frozen=True, slots=True)
class DevicePage:
    """A storage (index among the held ones) that is paged to a target while it is not used."""

    held: int
    gap: IdleSpan
    target: int


def held_of(graph: StepGraph, homes: Mapping[str, int] = {}, *, host: int = 0) -> tuple[HeldStorage, ...]:
    """Return the storages of a step as devices hold them; `homes`: memories, by key, that
    already hold lasting storages.
    """
    found = []
    for s, storage in enumerate(graph.storages):
        uses, writers = graph.uses[s], graph.writers[s]
        if not uses or not storage.nbytes:
            continue
        segments: dict[int, list[int]] = {}
        for i in uses:
            if s in graph.reads[i]:
                segments.setdefault(sum(w < i for w in writers), []).append(i)
        batch, known = storage.role is Role.BATCH, homes.get(storage.key) if storage.persistent else None
        owner = None if known is not None else writers[0] if writers else None if batch else uses[0]
        found.append(
            HeldStorage(
                storage.nbytes,
                owner,
                host if known is None else known,
                uses,
                tuple(map(tuple, segments.values())),
                lasting=storage.role is not Role.TEMPORARY,
                copies_last=batch,
                kept=s in graph.kept,
                written=bool(writers),
            )
        )
    return tuple(found)


def paging_costs(held: HeldStorage, gap: IdleSpan, flash: Flash) -> tuple[float, float]:
    """Return seconds and joules of writing a page and then reading it back.

    Unchanged contents are not written around the end of the step.
    """
    seconds, joules = flash.read_seconds(held.nbytes), flash.read_joules_per_byte * held.nbytes
    if held.written or not held.lasting:
        seconds += flash.write_seconds(held.nbytes)
        joules += flash.written_cost_joules_per_byte * held.nbytes
    return seconds, joules


def pool_bytes(
    memory: DeviceMemory, costs: Sequence[Sequence[OpCost | None]], devices: Sequence[int], pages: Sequence[DevicePage]
) -> npt.NDArray[np.int64]:
    """Return the bytes in each pool while each operator runs on its device: a row per pool, a column per operator.

    While an operator reads a copy that is made for it alone, the original counts too.
    """
    count = len(devices)
    where = [memory.memory_of[d] for d in devices]
    taken = np.zeros((1 + max(memory.memory_of), count), dtype=np.int64)
    for i, d in enumerate(devices):
        cost = costs[i][d]
        taken[where[i], i] += 0 if cost is None else cost.workspace_bytes
    ends, homes = [], []
    for held in memory.held:
        home = held.home if held.owner is None else where[held.owner]
        first, last = held.uses[0], max((i for i in held.uses if where[i] == home), default=held.uses[0])
        for segment in held.segments:
            for other in {where[i] for i in segment} - {home}:
                readers = [i for i in segment if where[i] == other]
                span = slice(None) if held.copies_last else slice(readers[0], readers[-1] + 1)
                taken[other, span] += held.nbytes
                last = max(last, readers[0])
        begin, end = (0, count - 1) if held.lasting else (first, count - 1 if held.kept else last)
        taken[home, begin : end + 1] += held.nbytes
        homes.append(home)
        ends.append(end)
    copied = set[tuple[int, int]]()
    for page in pages:
        held, target = memory.held[page.held], memory.targets[page.target]
        if target.memory != homes[page.held] or (not held.lasting and ends[page.held] < page.gap.before):
            continue
        inside = [i for i in range(count) if page.gap.covers(i)]
        taken[target.memory, inside] -= held.nbytes
        if target.into is not None and not held.lasting:
            taken[target.into, inside] += held.nbytes
        elif target.into is not None and (page.held, target.into) not in copied:
            copied.add((page.held, target.into))
            taken[target.into] += held.nbytes
    return np.array([taken[sorted(pool.memories)].sum(axis=0) for pool in memory.pools]).reshape(-1, count)


def overfull(memory: DeviceMemory, taken: npt.NDArray[np.int64]) -> frozenset[tuple[int, int]]:
    """Return pool and operator of the fullest moment in each span in which a pool exceeds its capacity."""
    found = set[tuple[int, int]]()
    for p, pool in enumerate(memory.pools):
        over = np.flatnonzero(taken[p] > pool.free_bytes)
        for span in np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else ():
            found.add((p, int(span[np.argmax(taken[p, span])])))
    return frozenset(found)


Column = Callable[[str, float, float], int]
"""Adds an integral column with this name, seconds and joules."""


class MemoryRows:
    """The rows of a model that keep pools within their capacity while certain operators run.

    `place[i][d]`: the column that is 1 if operator `i` runs on device `d`.
    """

    def __init__(
        self,
        model: LinearModel,
        place: Sequence[Mapping[int, int]],
        costs: Sequence[Sequence[OpCost | None]],
        memory: DeviceMemory,
        tight: frozenset[tuple[int, int]],
        column: Column,
    ) -> None:
        self.model, self.place, self.costs, self.memory = model, place, costs, memory
        self.pages: dict[DevicePage, int] = {}
        self._copied: dict[tuple[int, int], int] = {}
        """Lasting storage and target -> the column of its copy there."""
        self._define_pages(tight, column)
        for pool, i in sorted(tight):
            self._row(pool, i)

    def chosen(self, values: npt.NDArray[np.float64]) -> tuple[DevicePage, ...]:
        """Return the pages of a solution."""
        return tuple(page for page, column in self.pages.items() if values[column] > 0.5)

    def _define_pages(self, tight: frozenset[tuple[int, int]], column: Column) -> None:
        memory = self.memory
        for t, target in enumerate(memory.targets):
            full = [i for p, i in tight if target.memory in memory.pools[p].memories]
            for h, held in enumerate(memory.held):
                for gap in held.gaps(len(self.place)):
                    if any(map(gap.covers, full)):
                        page = DevicePage(h, gap, t)
                        name = f"({h},{gap.after},{gap.before},{t})"
                        self.pages[page] = made = column(f"w{name}", *paging_costs(held, gap, target.flash))
                        at_home, fixed = self._at_home(held, target.memory)
                        self.model.row(f"pages_at_home{name}", [(made, 1.0), *_negative(at_home)], -np.inf, fixed)
                        if held.lasting and target.into is not None:
                            self._copy(h, t, made)
        once: dict[tuple[int, IdleSpan], list[int]] = {}
        for page, made in self.pages.items():
            once.setdefault((page.held, page.gap), []).append(made)
        for (h, gap), columns in once.items():
            if len(columns) > 1:
                self.model.row(f"one_target({h},{gap.after})", [(c, 1.0) for c in columns], -np.inf, 1.0)

    def _copy(self, h: int, target: int, page: int) -> None:
        if (h, target) not in self._copied:
            self._copied[h, target] = self.model.column(f"copied({h},{target})")
        self.model.row(f"copied({h},{target},{page})", [(self._copied[h, target], 1.0), (page, -1.0)], 0.0, np.inf)

    def _on(self, i: int, memory: int) -> Terms:
        """Return terms and a constant whose sum is 1 if a storage is in this memory."""
        return [(column, 1.0) for d, column in self.place[i].items() if self.memory.memory_of[d] == memory]

    def _at_home(self, held: HeldStorage, memory: int) -> tuple[Terms, float]:
        """Return terms and a constant whose sum is 1 if a storage lies in this memory."""
        if held.owner is not None:
            return self._on(held.owner, memory), 0.0
        return [], float(held.home == memory)

    def _row(self, pool: int, i: int) -> None:
        memories, free = self.memory.pools[pool].memories, self.memory.pools[pool].free_bytes
        unit = max(free, 1)
        terms, fixed = Terms(), 0.0
        for d, column in self.place[i].items():
            cost = self.costs[i][d]
            if cost is not None and self.memory.memory_of[d] in memories:
                terms.append((column, cost.workspace_bytes / unit))
        for h, held in enumerate(self.memory.held):
            share = held.nbytes / unit
            for memory in memories:
                found, constant = self._present(h, held, memory, i)
                terms += [(column, factor * share) for column, factor in found]
                fixed += constant * share
        for (h, t), column in self._copied.items():
            if self.memory.targets[t].into in memories:
                terms.append((column, self.memory.held[h].nbytes / unit))
        for page, column in self.pages.items():
            held, into = self.memory.held[page.held], self.memory.targets[page.target].into
            if into in memories and not held.lasting and page.gap.covers(i):
                terms.append((column, held.nbytes / unit))
        self.model.row(f"memory({pool},{i})", terms, -np.inf, (free - int(_MARGIN * free)) / unit - fixed)

    def _present(self, h: int, held: HeldStorage, memory: int, i: int) -> tuple[Terms, float]:
        """Return terms and a constant that bound from below how often a storage is in this
        memory while operator `i` runs.
        """
        home, fixed = self._at_home(held, memory)
        away = [
            (column, -1.0)
            for page, column in self.pages.items()
            if page.held == h and page.gap.covers(i) and self.memory.targets[page.target].memory == memory
        ]
        terms = Terms()
        if held.lasting:
            terms += home + away
        elif i < held.uses[0] or (i > held.uses[-1] and not held.kept) or not (home or fixed):
            fixed = 0.0
        elif self._surely_needed(held, i):
            terms += home + away
        else:
            needed = self.model.column(f"held({h},{memory},{i})")
            self._need(needed, held, memory, i, [*_negative(home), *_negative(away)], fixed)
            terms.append((needed, 1.0))
            fixed = 0.0
        for n, segment in enumerate(held.segments):
            before, after = [r for r in segment if r <= i], [r for r in segment if r >= i]
            if held.copies_last:
                before = after = list(segment)
            if before and after:
                copy = self._copy_of(held, memory, before, after, f"({h},{n},{memory},{i})")
                terms += copy
        return terms, fixed

    def _surely_needed(self, held: HeldStorage, i: int) -> bool:
        """Return whether a storage is certainly at home then, wherever operators run.

        That is so if it is kept, or if it is created, changed or first read at `i` or later.
        """
        if held.kept:
            return True
        later = set(held.uses) - {r for r in held.uses if r < i}
        straddling = {r for segment in held.segments if segment[0] < i for r in segment}
        return bool(later - straddling)

    def _need(self, needed: int, held: HeldStorage, memory: int, i: int, less: Terms, fixed: float) -> None:
        """Make `needed` 1 if a storage in this memory is used there at `i` or later, or is
        first copied from there then.
        """
        segment = next(segment for segment in held.segments if segment[0] < i <= segment[-1])
        earlier = [r for r in segment if r < i]
        for later in (r for r in segment if r >= i):
            for other in sorted(set(self.memory.memory_of)):
                there = self._on(later, other)
                if not there:
                    continue
                seen = [] if other == memory else [term for r in earlier for term in self._on(r, other)]
                row = [(needed, 1.0), *_negative(there), *less, *seen]
                self.model.row(f"needed({needed},{later},{other})", row, fixed - 1.0, np.inf)

    def _copy_of(self, held: HeldStorage, memory: int, before: Sequence[int], after: Sequence[int], name: str) -> Terms:
        """Return a column that is 1 if a storage from elsewhere is read in this memory both by a reader in
        `before` and by one in `after`.
        """
        home, fixed = self._at_home(held, memory)
        if fixed:
            return []
        pairs = [(a, b) for a in before for b in after if self._on(a, memory) and self._on(b, memory)]
        if not pairs:
            return []
        copy = self.model.column(f"copy{name}")
        for a, b in pairs:
            there = self._on(a, memory) + (self._on(b, memory) if a != b else [])
            least = 0.0 if a == b else -1.0
            self.model.row(f"copy{name},({a},{b})", [(copy, 1.0), *_negative(there), *home], least, np.inf)
        return [(copy, 1.0)]


def _negative(terms: Sequence[tuple[int, float]]) -> Terms:
    return [(column, -factor) for column, factor in terms]
