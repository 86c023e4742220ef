"""Expand a plan into a Program: the straight line of instructions that the executor follows, with its memory and time.

The expansion decides what the plan leaves open: when a read is issued (early enough to hide behind compute, late enough
to fit) and when a finished write is waited for. It knows the resident bytes at every instruction, so the peak is a
statement about the program, not an estimate. Pure; no torch.
"""

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from planner.costs import CostTable
from planner.errors import PortError
from planner.graph import Role, StepGraph, operands
from planner.plan import Action, Decision, Plan
from planner.rebuild import effective_operands, rebuild_ops
from planner.slices import UpdateGroup, slice_bounds, update_groups

READ_MARGIN = 0.1
"""A read is asked for earlier by this share of its own time than the measured bandwidth needs."""


class PlanError(PortError):
    """A plan that does not fit its graph: a read of a freed tensor, an op that cannot be run again, ..."""

    exit_code = 2


class BudgetError(PlanError):
    """The step needs more memory than its budget at one op.

    Attributes: `op` (index), `needed_bytes`, `limit_bytes`, `holders`: (storage, bytes) that are resident there.
    """

    def __init__(self, op: int, name: str, needed: int, limit: int, holders: tuple[tuple[int, int], ...]) -> None:
        self.op, self.needed_bytes, self.limit_bytes, self.holders = op, needed, limit, holders
        super().__init__(
            f"the step needs {needed / 2**20:.1f} MiB at op {op} ({name}), the budget is {limit / 2**20:.1f} MiB; "
            f"raise the budget to at least {needed / 2**20:.1f} MiB or use a smaller batch"
        )


class Code(enum.IntEnum):
    """What an instruction does."""

    RUN = 0
    RERUN = 1
    FREE = 2
    WRITE = 3
    WAIT_WRITE = 4
    READ = 5
    WAIT_READ = 6
    SLICED = 7
    WAIT_SLICED = 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `index` is an op for RUN and RERUN, an update group for SLICED and WAIT_SLICED, else a storage.

    SLICED starts a group's update, which goes on beside the instructions that follow until WAIT_SLICED.

    `resident_bytes`: what is resident while it runs, landing buffers and unfinished writes included, the worker's own
    base not. `phase`: what its time is booked on.
    """

    code: Code
    index: int
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one step and what the expansion knows about them.

    `starts_on_flash`: persistent storages that are on flash, not in RAM, when the step starts and ends.
    `replayed`: random ops whose generator state must be kept because they run again. `slice_written`: update group ->
    storages that are resident whole when it starts and are on flash when it ends, written slice by slice.
    `carried`: persistent storages whose write may still be under way when the step ends; the next one waits for it.
    `seconds`, `stall_seconds`: of a step among others like it, with the writes of the one before it still under way.
    """

    graph: StepGraph
    instructions: tuple[Instruction, ...]
    groups: tuple[UpdateGroup, ...]
    slice_counts: tuple[tuple[int, int], ...]
    slice_written: tuple[tuple[int, tuple[int, ...]], ...]
    starts_on_flash: frozenset[int]
    carried: frozenset[int]
    replayed: frozenset[int]
    peak_bytes: int
    peak_op: int
    seconds: float
    compute_seconds: float
    stall_seconds: float
    joules: float
    recompute_seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def paged_storages(self) -> frozenset[int]:
        """Storages that are on flash at some moment of the step."""
        moved = {i.index for i in self.instructions if i.code in (Code.READ, Code.WRITE)}
        written = {s for _, storages in self.slice_written for s in storages}
        return frozenset(moved | written | self.starts_on_flash)

    timeline: tuple[int, ...] = field(repr=False, default=())
    """Resident bytes (base included) while each op runs."""


@dataclass(slots=True)
class _Position:
    """What happens around one op: filled from the plan, emitted in order."""

    returns: list[int] = field(default_factory=list)
    rebuilds: list[Decision] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Due:
    """A read: `storage` must be there before op `use`; it can be asked for from op `earliest` on.

    `moment`: seconds, if nothing ever waited, by which it must be done.
    """

    use: int
    storage: int
    earliest: int
    moment: float


def expand(graph: StepGraph, costs: CostTable, plan: Plan, *, check_budget: bool = True) -> Program:
    """Return the program of `plan`.

    `graph` and `costs` are in recorded order; `plan.order` is applied here. Raises PlanError for a plan that is wrong
    whatever the budget, BudgetError where it needs more than `plan.ram_bytes` (0: no limit, or `check_budget=False`).
    """
    if len(costs.ops) != len(graph.ops):
        raise PlanError(f"the cost table has {len(costs.ops)} ops, the graph {len(graph.ops)}; profile it again")
    if plan.order:
        if sorted(plan.order) != list(range(len(graph.ops))):
            raise PlanError(f"the plan orders {len(plan.order)} ops, the graph has {len(graph.ops)}; plan it again")
        graph = graph.reordered(plan.order)
        costs = CostTable(costs.device, tuple(costs.ops[i] for i in plan.order))
    limit = plan.ram_bytes - costs.device.base_bytes if plan.ram_bytes and check_budget else None
    return _Expansion(graph, costs, plan, limit).run()


class _Expansion:
    """The state of one expansion. Three passes: place decisions, profile memory, emit instructions."""

    def __init__(self, graph: StepGraph, costs: CostTable, plan: Plan, limit: int | None) -> None:
        self.graph, self.costs, self.plan, self.limit = graph, costs, plan, limit
        self.size = [s.nbytes for s in graph.storages]
        self.groups = update_groups(graph)
        self.sliced = {g: k for g, k in plan.sliced if k > 1}
        self.group_at: dict[int, int] = {}
        """Op -> sliced group it belongs to."""
        self.changed: dict[int, set[int]] = {}
        """Sliced group -> storages that it changes."""
        self.touched: dict[int, set[int]] = {}
        """Sliced group -> storages that it reads, creates or changes."""
        for g in self.sliced:
            if not 0 <= g < len(self.groups):
                raise PlanError(f"the plan slices update group {g}, the graph has {len(self.groups)}")
            inside = range(self.groups[g].first, self.groups[g].last + 1)
            self.group_at.update(dict.fromkeys(inside, g))
            self.changed[g] = {s for i in inside for s in graph.ops[i].writes}
            self.touched[g] = self.changed[g] | {s for i in inside for s in (*graph.reads[i], *graph.creates[i])}
        self.at = [_Position() for _ in graph.ops]
        self.start_flash: set[int] = set()
        self.reruns: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        """Op -> what runs again before it: (op, storages to free afterwards)."""
        self.reads: list[_Due] = []
        self.streamed: dict[int, set[int]] = defaultdict(set)
        """Sliced group -> storages that pass through it slice by slice and are never resident whole."""
        self.slice_written: dict[int, set[int]] = defaultdict(set)
        """Sliced group -> storages that are resident whole before it and on flash after it."""

    def run(self) -> Program:
        self._place()
        self._find_streamed()
        self._simulate_residency()
        self._place_reads()
        return self._emit()

    # -- pass 1: where each decision acts

    def _edge(self, op: int, *, start: bool) -> int:
        """An op index, moved to the first or last op of the sliced group it lies in."""
        g = self.group_at.get(op)
        if g is None:
            return op
        return self.groups[g].first if start else self.groups[g].last

    def _place(self) -> None:
        graph, n = self.graph, len(self.graph.ops)
        gaps: dict[int, list[Decision]] = defaultdict(list)
        for d in self.plan.decisions:
            if not (0 <= d.storage < len(graph.storages) and 0 <= d.after < n and 0 <= d.before < n):
                raise PlanError(f"decision {d} names a storage or an op that the graph does not have")
            gaps[d.storage].append(d)
        for s, uses in enumerate(graph.uses):
            if uses:
                self._place_storage(s, uses, gaps.get(s, []))
            elif gaps.get(s):
                raise PlanError(f"storage {s} is never used, yet the plan decides about it")

    def _place_storage(self, s: int, uses: tuple[int, ...], decisions: list[Decision]) -> None:
        storage = self.graph.storages[s]
        useset = set(uses)
        last = uses[-1]
        for d in sorted(decisions, key=lambda d: (d.before, d.after)):
            if d.after not in useset:
                raise PlanError(f"storage {s} is not used at op {d.after}, where the plan's idle gap starts")
            if d.action is Action.TRANSIENT:
                self.at[self._edge(d.before, start=True)].rebuilds.append(d)
                continue
            after, before = self._edge(d.after, start=False), self._edge(d.before, start=True)
            following = next((u for u in uses if u > d.after), None)
            wraps = d.before <= d.after
            if wraps:
                if d.action is not Action.PAGE or not storage.persistent or d.after != last or d.before > uses[0]:
                    raise PlanError(f"{d}: only a persistent storage may be paged around the end of the step")
                self.start_flash.add(s)
            elif following is None or d.before > following:
                raise PlanError(f"{d}: storage {s} is used at op {following}, before it returns")
            elif before <= after:
                raise PlanError(f"{d}: the gap lies inside a sliced update group")
            if d.action is Action.PAGE:
                if storage.role in (Role.BATCH, Role.CONSTANT) and wraps:
                    raise PlanError(f"{d}: batch and constants cannot start a step on flash")
                self.at[after].writes.append(s)
                self.at[before].returns.append(s)
            else:
                if storage.persistent or storage.role is not Role.TEMPORARY:
                    raise PlanError(f"{d}: storage {s} ({storage.role.name.lower()}) cannot be recomputed")
                self.at[after].frees.append(s)
                self.at[before].rebuilds.append(d)
        if storage.role is Role.TEMPORARY and s not in self.graph.kept:
            self.at[self._edge(last, start=False)].frees.append(s)

    def _find_streamed(self) -> None:
        for g in self.sliced:
            group = self.groups[g]
            first, last = self.at[group.first], self.at[group.last]
            for s in group.storages:
                persistent = self.graph.storages[s].persistent
                if s in first.returns and (s in last.writes if persistent else s in last.frees):
                    self.streamed[g].add(s)
                    first.returns.remove(s)
                    (last.writes if s in last.writes else last.frees).remove(s)
                elif s in group.temporaries:
                    self.streamed[g].add(s)
                    last.frees.remove(s)
                elif persistent and s in last.writes and s in self.changed[g]:
                    self.slice_written[g].add(s)
                    last.writes.remove(s)
                    last.frees.append(s)

    def slice_bytes(self, g: int) -> int:
        """Bytes that a sliced group holds besides whole storages: two buffers per streamed one, one per temporary."""
        group = self.groups[g]
        size = max(stop - start for start, stop in slice_bounds(group.nbytes, self.sliced[g]))
        streamed = len(self.streamed[g] - set(group.temporaries))
        return size * (2 * streamed + len(group.temporaries))

    # -- pass 2: who is resident while each op runs, if writes took no time and reads landed on demand

    def _simulate_residency(self) -> None:
        graph = self.graph
        resident = {
            s for s, storage in enumerate(graph.storages) if storage.role is not Role.TEMPORARY and graph.uses[s]
        } - self.start_flash
        streamed_now: set[int] = set()
        current = sum(self.size[s] for s in resident)
        self.need = np.zeros(len(graph.ops), dtype=np.int64)
        """Per op: resident bytes at the fullest moment of its position."""
        self.after_need = np.zeros(len(graph.ops), dtype=np.int64)
        self.holders: dict[int, set[int]] = {}
        version = [0] * len(graph.storages)
        for i, position in enumerate(self.at):
            peak = current
            for s in position.returns:
                if s in resident:
                    raise PlanError(f"storage {s} is read from flash at op {i} although it is resident")
                resident.add(s)
                current += self.size[s]
            peak = max(peak, current)
            if position.rebuilds:
                current, rebuild_peak = self._rebuild(i, position.rebuilds, resident, current, version)
                peak = max(peak, rebuild_peak)
            g = self.group_at.get(i)
            if g is not None and i == self.groups[g].first:
                streamed_now = self.streamed[g]
                current += self.slice_bytes(g)
            for v in operands(graph.ops[i]):
                s = graph.values[v].storage
                if s not in resident and s not in streamed_now:
                    raise PlanError(
                        f"op {i} ({graph.ops[i].name}) reads storage {s} ({graph.label(s)}), "
                        "which is not resident there"
                    )
            for s in graph.creates[i]:
                if s not in streamed_now:
                    resident.add(s)
                    current += self.size[s]
            for s in (*graph.creates[i], *graph.ops[i].writes):
                version[s] += 1
            workspace = 0 if g is not None else self.costs.ops[i].workspace_bytes
            peak = max(peak, current + workspace)
            self.need[i] = peak
            if peak == self.need.max():
                self.fullest = (i, frozenset(resident))
            if g is not None and i == self.groups[g].last:
                current -= self.slice_bytes(g)
                streamed_now = set()
            for s in (*position.frees, *position.writes):
                if s not in resident:
                    raise PlanError(f"storage {s} is freed or written at op {i}, but it is not resident there")
                resident.discard(s)
                current -= self.size[s]
            self.after_need[i] = current
        if self.limit is not None and len(self.need) and self.need.max() > self.limit:
            op, who = self.fullest
            holders = tuple(sorted(((s, self.size[s]) for s in who), key=lambda h: -h[1])[:8])
            base = self.costs.device.base_bytes
            raise BudgetError(op, graph.ops[op].name, int(self.need.max()) + base, self.limit + base, holders)

    def _rebuild(
        self, at: int, decisions: Sequence[Decision], resident: set[int], current: int, version: list[int]
    ) -> tuple[int, int]:
        """Check and charge the rebuilds before op `at`; return resident bytes afterwards and their peak."""
        graph = self.graph
        wanted = {d.storage for d in decisions}
        back = {d.storage for d in decisions if d.action is Action.RECOMPUTE}
        if wanted & resident:
            raise PlanError(f"storages {sorted(wanted & resident)} are rebuilt at op {at} although they are resident")
        ops = rebuild_ops(graph, [(d.storage, d.after) for d in decisions])
        last_use: dict[int, int] = {}
        for r in ops:
            for s in effective_operands(graph, r):
                last_use[s] = r
        live: set[int] = set()
        peak = current
        steps = []
        for r in ops:
            for s in effective_operands(graph, r):
                if s in live:
                    continue
                if s in wanted or s not in resident or s in graph.ops[r].writes:
                    raise PlanError(f"rebuilding at op {at} runs op {r} ({graph.ops[r].name}), but storage {s} is gone")
                then = sum(1 for w in graph.writers[s] if w < r)
                if version[s] != then and graph.storages[s].role is not Role.BATCH:
                    raise PlanError(
                        f"rebuilding at op {at} runs op {r} ({graph.ops[r].name}), but storage {s} has changed since"
                    )
            made = {graph.values[v].storage for v in graph.ops[r].outputs if v is not None}
            fresh = {s for s in made if s in graph.creates[r]}
            size = sum(self.size[s] for s in fresh)
            current += size
            peak = max(peak, current + self.costs.ops[r].workspace_bytes)
            live |= fresh
            done = {s for s in live if s not in back and (s not in wanted or last_use.get(s, -1) <= r)}
            live -= done
            current -= sum(self.size[s] for s in done)
            steps.append((r, tuple(sorted(done - resident))))
        if not back <= live:
            raise PlanError(f"storages {sorted(back - live)} cannot be rebuilt at op {at}: nothing writes them")
        resident |= back
        self.reruns[at] = steps
        return current, peak

    # -- pass 3: when reads are due

    def _place_reads(self) -> None:
        """Note every read, in order of use: when it must be done so that all that follow can be in time, too."""
        flash = self.costs.device.flash
        seconds = np.array([c.seconds for c in self.costs.ops])
        for i, ops in self.reruns.items():
            seconds[i] += sum(self.costs.ops[r].seconds for r, _ in ops)
        self.starts = np.concatenate(([0.0], np.cumsum(seconds)))
        self.held = self.need.copy()
        written: dict[int, int] = {}
        for i, position in enumerate(self.at):
            for s in position.returns:
                self.reads.append(_Due(i, s, written.get(s, -1) + 1, float(self.starts[i])))
            written.update(dict.fromkeys(position.writes, i))
            g = self.group_at.get(i)
            if g is not None and i == self.groups[g].last:
                written.update(dict.fromkeys(self.streamed[g] | self.slice_written[g], i))
        for following, due in zip(reversed(self.reads), reversed(self.reads[:-1]), strict=False):
            begins = following.moment - (1 + READ_MARGIN) * flash.read_seconds(self.size[following.storage])
            due.moment = min(due.moment, begins)

    # -- pass 4: instructions, with a clock for writes

    def _emit(self) -> Program:
        alone = _Emitter(self, ())
        alone.emit()
        left = alone.left_under_way()
        if not left:
            return alone.program()
        following = _Emitter(self, left)
        following.emit()
        return following.program()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A write or a sliced update under way. `nbytes` stay resident until `wait` ends, at `moment` at the earliest."""

    wait: Code
    index: int
    nbytes: int
    moment: float
    frees: tuple[int, ...] = ()


class _Emitter:
    """Writes the instruction list and simulates its time: one compute thread, one page thread with a FIFO queue.

    Sliced updates go on behind the compute thread; their compute is booked on it all the same. `carried`: writes of the
    step before that are still under way when this one starts, moments counted from there.
    """

    def __init__(self, expansion: _Expansion, carried: tuple[_Pending, ...]) -> None:
        self.x = expansion
        self.graph, self.costs, self.size = expansion.graph, expansion.costs, expansion.size
        self.flash = expansion.costs.device.flash
        self.instructions: list[Instruction] = []
        self.clock = self.stall = self.recompute = 0.0
        self.backlog = self.io_free = carried[-1].moment if carried else 0.0
        self.held = expansion.held.copy()
        self.carried = carried
        self.pending = list(carried)
        self.pending_bytes = sum(p.nbytes for p in carried)
        self.done: dict[int, float] = {}
        self.next_read = 0
        self.read_bytes = self.written_bytes = 0
        self.on_flash = set(expansion.start_flash)
        """Storages whose present contents are on flash already."""
        self.level = 0

    def emit(self) -> None:
        """Write the instructions of the step. At its end only writes that the next step can wait for are under way."""
        x = self.x
        self.timeline: list[int] = []
        for i, position in enumerate(x.at):
            fullest = self._read_ahead(i)
            for s in position.returns:
                self._wait_read(s)
            self._make_room()
            fullest = max(fullest, self.level + self.pending_bytes)
            self.timeline.append(fullest + self.costs.device.base_bytes)
            if i in x.reruns:
                self._rerun(i)
            self._run(i)
            self.level = int(x.after_need[i])
            g = x.group_at.get(i)
            later = self._stream(g, position.frees) if g is not None and i == x.groups[g].last else ()
            for s in position.frees:
                if s not in later:
                    self._free(s)
            for s in position.writes:
                self._write(s)
        known = {p.index for p in self.carried}
        while not all(self._may_outlast(p) and (not known or p.index in known) for p in self.pending):
            self._wait_oldest()
        self._stall_until(self.io_free - self.backlog if self.carried else self.clock)

    def _may_outlast(self, pending: _Pending) -> bool:
        return pending.wait is Code.WAIT_WRITE and pending.index in self.x.start_flash

    def left_under_way(self) -> tuple[_Pending, ...]:
        """Return the writes that are under way at the end, moments counted from there."""
        return tuple(replace(p, moment=p.moment - self.clock) for p in self.pending)

    def program(self) -> Program:
        """Return the instructions with what they take."""
        x, graph, timeline = self.x, self.graph, self.timeline
        groups = x.groups
        device = self.costs.device
        op_seconds = sum(c.seconds for c in self.costs.ops)
        recomputed = [r for ops in x.reruns.values() for r, _ in ops]
        joules = sum(c.joules for c in self.costs.ops) + sum(self.costs.ops[r].joules for r in recomputed)
        joules += self.read_bytes * self.flash.read_joules_per_byte
        joules += self.written_bytes * self.flash.write_joules_per_byte
        joules += device.static_watts * self.clock
        peak_op = int(np.argmax(timeline)) if timeline else 0
        return Program(
            graph=graph, instructions=tuple(self.instructions), groups=groups,
            slice_counts=tuple(sorted(x.sliced.items())),
            slice_written=tuple((g, tuple(sorted(s))) for g, s in sorted(x.slice_written.items())),
            starts_on_flash=frozenset(x.start_flash),
            carried=frozenset(p.index for p in self.carried),
            replayed=frozenset(r for r in recomputed if graph.ops[r].random),
            peak_bytes=max(timeline, default=device.base_bytes), peak_op=peak_op,
            seconds=self.clock, compute_seconds=op_seconds + self.recompute, stall_seconds=self.stall,
            joules=joules, recompute_seconds=self.recompute,
            read_bytes=self.read_bytes, written_bytes=self.written_bytes, timeline=tuple(timeline),
        )  # fmt: skip

    def _put(self, code: Code, index: int) -> None:
        self.instructions.append(Instruction(code, index, self.level + self.pending_bytes))

    def _make_room(self) -> None:
        limit = self.x.limit
        while self.pending and (
            (limit is not None and self.level + self.pending_bytes > limit) or self.pending[0].moment <= self.clock
        ):
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        oldest = self.pending.pop(0)
        self._put(oldest.wait, oldest.index)
        self._stall_until(oldest.moment)
        self.pending_bytes -= oldest.nbytes
        for s in oldest.frees:
            self._put(Code.FREE, s)

    def _settle(self, touched: Set[int], changed: Set[int]) -> None:
        """Wait for the updates under way that change what is about to be touched, or touch what is about to change."""
        while any(
            p.wait is Code.WAIT_SLICED
            and not (touched.isdisjoint(self.x.changed[p.index]) and changed.isdisjoint(self.x.touched[p.index]))
            for p in self.pending
        ):
            self._wait_oldest()

    def _free(self, s: int) -> None:
        self._settle(set(), {s})
        self._put(Code.FREE, s)

    def _stall_until(self, moment: float) -> None:
        if moment > self.clock:
            self.stall += moment - self.clock
            self.clock = moment

    def _transfer(self, seconds: float) -> float:
        self.io_free = max(self.io_free, self.clock) + seconds
        return self.io_free

    def _read_ahead(self, i: int) -> int:
        """Ask for the reads that cannot wait for the next op, if they fit, and for those that op `i` needs.

        One thread moves pages in the order in which they are asked for, so a read goes before the writes that would
        delay it. Returns the resident bytes at the fullest moment.
        """
        x = self.x
        self.level = int(self.held[i])
        fullest = 0
        while self.next_read < len(x.reads):
            due = x.reads[self.next_read]
            if due.use > i and not (due.earliest <= i and self._late(i, due) and self._fits(i, due)):
                break
            self.next_read += 1
            self.held[i : due.use] += self.size[due.storage]
            self.level = int(self.held[i])
            self._read(due.storage)
            fullest = max(fullest, self.level + self.pending_bytes)
        return fullest

    def _late(self, i: int, due: _Due) -> bool:
        """Say whether a read that is asked for only after op `i` and its writes would not be done in time."""
        x = self.x
        after = self.clock + float(x.starts[i + 1] - x.starts[i])
        free = max(self.io_free, after)
        free += sum(self.flash.write_seconds(self.size[s]) for s in x.at[i].writes if s not in self.on_flash)
        wanted = self.clock + due.moment - float(x.starts[i])
        return free + (1 + READ_MARGIN) * self.flash.read_seconds(self.size[due.storage]) > wanted

    def _fits(self, i: int, due: _Due) -> bool:
        """Say whether a read fits from op `i` to its use, beside the writes that are still under way."""
        x = self.x
        if x.limit is None:
            return True
        load = self.held[i : due.use] + self.size[due.storage]
        if self.pending:
            moments = self.clock + x.starts[i : due.use] - x.starts[i]
            done = np.array([p.moment for p in self.pending])
            left = np.cumsum([p.nbytes for p in reversed(self.pending)])[::-1]
            left = np.append(left, 0)
            load = load + left[np.searchsorted(done, moments, side="right")]
        return bool((load <= x.limit).all())

    def _read(self, s: int) -> None:
        limit = self.x.limit
        while self.pending and limit is not None and self.level + self.pending_bytes > limit:
            self._wait_oldest()
        self._settle(set(), {s})
        self._put(Code.READ, s)
        self.done[s] = self._transfer(self.flash.read_seconds(self.size[s]))
        self.read_bytes += self.size[s]

    def _wait_read(self, s: int) -> None:
        self._put(Code.WAIT_READ, s)
        self._stall_until(self.done.pop(s))

    def _write(self, s: int) -> None:
        if s in self.on_flash:
            self._free(s)
            return
        self._settle(set(), {s})
        self.on_flash.add(s)
        done = self._transfer(self.flash.write_seconds(self.size[s]))
        self.pending.append(_Pending(Code.WAIT_WRITE, s, self.size[s], done))
        self.pending_bytes += self.size[s]
        self.written_bytes += self.size[s]
        self._put(Code.WRITE, s)

    def _rerun(self, i: int) -> None:
        for r, done in self.x.reruns[i]:
            self._settle(set(effective_operands(self.graph, r)), set())
            self._put(Code.RERUN, r)
            seconds = self.costs.ops[r].seconds
            self.clock += seconds
            self.recompute += seconds
            for s in done:
                self._free(s)

    def _run(self, i: int) -> None:
        self.clock += self.costs.ops[i].seconds
        op = self.graph.ops[i]
        self.on_flash.difference_update(op.writes)
        g = self.x.group_at.get(i)
        if g is None:
            self._settle({*self.graph.reads[i], *self.graph.creates[i]}, set(op.writes))
            self._put(Code.RUN, i)
        elif i == self.x.groups[g].last:
            self._put(Code.SLICED, g)

    def _stream(self, g: int, frees: Sequence[int]) -> tuple[int, ...]:
        """Book the transfers of a sliced group that has started; return those of `frees` that must wait for its end."""
        x, group = self.x, self.x.groups[g]
        streamed = x.streamed[g] - set(group.temporaries)
        begin = self.clock - sum(self.costs.ops[i].seconds for i in range(group.first, group.last + 1))
        written = {s for s in x.changed[g] & streamed if self.graph.storages[s].persistent} | x.slice_written[g]
        self.io_free = max(self.io_free, begin)
        for s in streamed:
            self.io_free += self.flash.read_seconds(self.size[s])
            self.read_bytes += self.size[s]
        for s in written:
            self.io_free += self.flash.write_seconds(self.size[s])
            self.written_bytes += self.size[s]
            self.on_flash.add(s)
        later = tuple(s for s in frees if s in x.touched[g])
        nbytes = x.slice_bytes(g) + sum(self.size[s] for s in later)
        self.pending.append(_Pending(Code.WAIT_SLICED, g, nbytes, max(self.io_free, self.clock), later))
        self.pending_bytes += nbytes
        return later


def idle_gaps(graph: StepGraph, storage: int) -> Iterable[tuple[int, int]]:
    """Yield the (after, before) gaps of a storage between uses that are not neighbours, in graph order."""
    uses = graph.uses[storage]
    for a, b in itertools.pairwise(uses):
        if b > a + 1:
            yield a, b
