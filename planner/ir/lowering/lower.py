"""Lower a plan into a Program, the straight line of instructions that the executor follows, with its memory and time.

The lowering decides what the plan leaves open: when a read is issued (early enough to hide behind compute, late enough
to fit) and when a finished write is waited for. It knows the resident bytes at every instruction, so the peak is a
statement about the program, not an estimate. Pure; no torch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.ir.costs import CostTable
from planner.ir.graph import Role, StepGraph, operands
from planner.ir.lowering.emit import READ_MARGIN, Emitter
from planner.ir.lowering.rematerialize import effective_operands, rematerialization_ops
from planner.ir.lowering.update_slices import slice_bounds, update_groups
from planner.ir.plan import Action, Decision, Plan
from planner.ir.program import BudgetError, PlanError, Program


@dataclass(slots=True)
class _Position:
    """What happens around one op: filled from the plan, emitted in order."""

    returns: list[int] = field(default_factory=list)
    rematerializations: list[Decision] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Due:
    """A read: `storage` must be there before op `use`; it can be asked for from op `earliest` on.

    `moment`: seconds, if nothing ever waited, by which it must be done.
    """

    use: int
    storage: int
    earliest: int
    moment: float


def lower(graph: StepGraph, costs: CostTable, plan: Plan, *, check_budget: bool = True) -> Program:
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
    return Lowering(graph, costs, plan, limit).run()


class Lowering:
    """The state of one lowering. Three passes: place decisions, profile memory, emit instructions."""

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
        self.reads: list[Due] = []
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
            if d.action is Action.INTERMEDIATE:
                self.at[self._edge(d.before, start=True)].rematerializations.append(d)
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
                self.at[before].rematerializations.append(d)
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
            if position.rematerializations:
                current, rematerialization_peak = self._rematerialize(
                    i, position.rematerializations, resident, current, version
                )
                peak = max(peak, rematerialization_peak)
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

    def _rematerialize(
        self, at: int, decisions: Sequence[Decision], resident: set[int], current: int, version: list[int]
    ) -> tuple[int, int]:
        """Check and charge the rematerializations before op `at`; return resident bytes afterwards and their peak."""
        graph = self.graph
        wanted = {d.storage for d in decisions}
        back = {d.storage for d in decisions if d.action is Action.RECOMPUTE}
        if wanted & resident:
            raise PlanError(
                f"storages {sorted(wanted & resident)} are rematerialized at op {at} although they are resident"
            )
        ops = rematerialization_ops(graph, [(d.storage, d.after) for d in decisions])
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
                    raise PlanError(
                        f"rematerializing at op {at} runs op {r} ({graph.ops[r].name}), but storage {s} is gone"
                    )
                then = sum(1 for w in graph.writers[s] if w < r)
                if version[s] != then and graph.storages[s].role is not Role.BATCH:
                    raise PlanError(
                        f"rematerializing at op {at} runs op {r} ({graph.ops[r].name}), but storage {s} has changed since"
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
            raise PlanError(f"storages {sorted(back - live)} cannot be rematerialized at op {at}: nothing writes them")
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
                self.reads.append(Due(i, s, written.get(s, -1) + 1, float(self.starts[i])))
            written.update(dict.fromkeys(position.writes, i))
            g = self.group_at.get(i)
            if g is not None and i == self.groups[g].last:
                written.update(dict.fromkeys(self.streamed[g] | self.slice_written[g], i))
        for following, due in zip(reversed(self.reads), reversed(self.reads[:-1]), strict=False):
            begins = following.moment - (1 + READ_MARGIN) * flash.read_seconds(self.size[following.storage])
            due.moment = min(due.moment, begins)

    # -- pass 4: instructions, with a clock for writes

    def _emit(self) -> Program:
        alone = Emitter(self, ())
        alone.emit()
        left = alone.left_under_way()
        if not left:
            return alone.program()
        following = Emitter(self, left)
        following.emit()
        return following.program()
