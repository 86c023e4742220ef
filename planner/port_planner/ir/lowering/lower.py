"""Lower a plan into a Program, the linear sequence of instructions that the executor follows.

Memory and time are computed on the way.

The lowering decides what the plan leaves open: when a read is issued (early enough to hide behind compute, late enough
to fit) and when a finished write is waited for. It knows the resident bytes at every instruction, so the peak is a fact
about the program, not an estimate. The module is pure and does not import torch.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from port_planner.ir.costs import CostTable, by_version
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.emit import READ_MARGIN, emit
from port_planner.ir.lowering.host_pages import place_host_pages
from port_planner.ir.lowering.min_cost import min_joules
from port_planner.ir.lowering.packables import read_packed
from port_planner.ir.lowering.placement import Due, Placement, Position, SlicedUpdates
from port_planner.ir.lowering.residency import ResidencyWalk
from port_planner.ir.lowering.update_slices import update_groups
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import CostlyPlanError, PlanError, Program

_ROUNDING = 1e-9
"""Relative rounding error of sums in different orders."""


def lower(
    graph: StepGraph, costs: CostTable, plan: Plan, *, check_budget: bool = True, max_joules: float = math.inf
) -> Program:
    """Return the program of `plan`.

    `graph` and `costs` are in recorded order; `plan.order` is applied here. Raises PlanError for a plan that is wrong
    for any budget. Raises BudgetError if it needs more than `plan.ram_bytes` (0 or `check_budget=False`: no limit), and
    CostlyPlanError if it certainly costs more than `max_joules` in energy and wear.
    """
    if len(costs.ops) != len(graph.ops):
        raise PlanError(f"the cost table has {len(costs.ops)} ops, the graph {len(graph.ops)}; profile it again")
    if plan.order:
        if sorted(plan.order) != list(range(len(graph.ops))):
            raise PlanError(f"the plan orders {len(plan.order)} ops, the graph has {len(graph.ops)}; plan it again")
        graph = graph.reordered(plan.order)
        costs = costs.reordered(plan.order)
    limit = plan.ram_bytes - costs.device.base_bytes if plan.ram_bytes and check_budget else None
    placement = _PlanLowering(graph, costs, plan, limit).placement()
    if max_joules < math.inf and (least := min_joules(placement)) > max_joules * (1 + _ROUNDING):
        raise CostlyPlanError(f"the step costs at least {least:.6g} J, more than {max_joules:.6g} J")
    return emit(placement)


class _PlanLowering:
    """Puts a plan's decisions and then its reads into their places.

    The time of a read depends on how long everything else takes.
    """

    def __init__(self, graph: StepGraph, costs: CostTable, plan: Plan, limit: int | None) -> None:
        self.graph, self.costs, self.plan, self.limit = graph, costs, plan, limit
        self.size = graph.sizes
        self.packing = by_version(costs.packings)
        self.staying: set[int] = set()
        """Storages that are read packed from some op on."""
        self.groups = update_groups(graph)
        self.sliced = {g: k for g, k in plan.sliced if k > 1}
        self.updates = SlicedUpdates(self.groups, self.sliced, self.size)
        for g in self.sliced:
            if not 0 <= g < len(self.groups):
                raise PlanError(f"the plan slices update group {g}, the graph has {len(self.groups)}")
            inside = range(self.groups[g].first, self.groups[g].last + 1)
            self.updates.group_at.update(dict.fromkeys(inside, g))
            self.updates.changed[g] = {s for i in inside for s in graph.ops[i].writes}
            self.updates.touched[g] = self.updates.changed[g] | {
                s for i in inside for s in (*graph.reads[i], *graph.creates[i])
            }
            self.updates.streamed[g], self.updates.written[g] = set(), set()
        self.at = [Position() for _ in graph.ops]
        self.homes: dict[int, int] = {}
        """Persistent storage that is paged -> the target of its pages."""
        self.starts_away: set[int] = set()
        self.reads: list[Due] = []

    def placement(self) -> Placement:
        """Return the places of all decisions; raise PlanError or BudgetError if there are none."""
        self._place()
        self._find_streamed()
        residency = ResidencyWalk(self.graph, self.costs, self.updates, self.at, self.starts_away)
        if self.limit is not None:
            residency.check(self.limit)
        starts = self._place_reads(residency.reruns)
        memory = {d: t.capacity_bytes for d, t in enumerate(self.costs.device.targets) if t.capacity_bytes is not None}
        bounds = memory if self.limit is not None else dict.fromkeys(memory)
        host = place_host_pages(self.graph, self.at, self.homes, bounds)
        return Placement(
            self.graph, self.costs, self.limit, self.size, self.updates, self.at, self.homes, self.starts_away,
            residency.reruns, self.reads, residency.need, residency.after_need, host, starts,
        )  # fmt: skip

    # -- pass 1: where each decision acts

    def _edge(self, op: int, *, start: bool) -> int:
        """Return an op index, moved to the first or last op of the sliced group that contains it."""
        g = self.updates.group_at.get(op)
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
                self.starts_away.add(s)
            elif following is None or d.before > following:
                raise PlanError(f"{d}: storage {s} is used at op {following}, before it returns")
            elif before <= after:
                raise PlanError(f"{d}: the gap is inside a sliced update group")
            if d.action is Action.PAGE:
                if storage.role in (Role.BATCH, Role.CONSTANT) and wraps:
                    raise PlanError(f"{d}: batch and constants cannot start a step on flash")
                self._check_target(d)
                self.at[after].writes.append(s)
                self.at[after].targets[s] = d.target
                self.at[before].returns.append(s)
            elif d.action in (Action.PACK, Action.PACK_PAGE):
                moves_later = any(
                    other.after > d.after and other.action not in (Action.PACK, Action.INTERMEDIATE)
                    for other in decisions
                )
                self._place_packing(d, after, before, moves_later=moves_later)
            else:
                if storage.persistent or storage.role is not Role.TEMPORARY:
                    raise PlanError(f"{d}: storage {s} ({storage.role.name.lower()}) cannot be recomputed")
                self.at[after].frees.append(s)
                self.at[before].rematerializations.append(d)
        if storage.role is Role.TEMPORARY and s not in self.graph.kept:
            self.at[self._edge(last, start=False)].frees.append(s)

    def _check_target(self, d: Decision) -> None:
        storage, targets = self.graph.storages[d.storage], self.costs.device.targets
        there = 0 <= d.target < len(targets)
        in_memory = there and targets[d.target].capacity_bytes is not None
        if not there or (storage.persistent and d.target and not in_memory):
            raise PlanError(
                f"{d}: storage {d.storage} ({storage.role.name.lower()}) cannot be paged there; the device has "
                f"{len(targets)} paging targets, and what is persistent belongs on number 0 or in the host's memory"
            )
        if in_memory and storage.device != self.graph.device:
            raise PlanError(f"{d}: storage {d.storage} ({storage.role.name.lower()}) is already in the host's memory")
        if storage.persistent and self.homes.setdefault(d.storage, d.target) != d.target:
            raise PlanError(
                f"{d}: storage {d.storage} ({storage.role.name.lower()}) is paged to number {self.homes[d.storage]} "
                "too; what is persistent has one place"
            )

    def _place_packing(self, d: Decision, after: int, before: int, *, moves_later: bool) -> None:
        """Place the packing and unpacking of a storage, unless all later readers can read it packed.

        `moves_later`: whether it is elsewhere in a later gap, so that it must be restored before, if possible.
        """
        version = sum(w <= d.after for w in self.graph.writers[d.storage])
        cost = self.packing.get((d.storage, version))
        if cost is None:
            raise PlanError(
                f"{d}: the cost of packing storage {d.storage} there was never measured; plan the job again"
            )
        if d.action is Action.PACK_PAGE:
            targets = self.costs.device.targets
            if (
                not cost.codec.comes_back
                or not 0 <= d.target < len(targets)
                or targets[d.target].capacity_bytes is not None
            ):
                raise PlanError(
                    f"{d}: packed as {cost.codec.value}, storage {d.storage} cannot be paged there; the device has "
                    f"{len(targets)} paging targets, and neither what does not come back nor the host's memory takes "
                    "part"
                )
            self.at[after].packed_targets[d.storage] = d.target
            self.at[before].unpacks.append(cost)
        elif read_packed(self.graph, d.storage, d.after, cost.codec) and not (moves_later and cost.codec.comes_back):
            if d.storage in self.staying:
                return
            self.staying.add(d.storage)
            self.at[after].stays_packed.add(d.storage)
        elif not cost.codec.comes_back:
            raise PlanError(
                f"{d}: more of storage {d.storage} is read later than packing it as {cost.codec.value} keeps; plan the "
                "job again"
            )
        else:
            self.at[before].unpacks.append(cost)
        self.at[after].packs.append(cost)

    def _find_streamed(self) -> None:
        for g in self.sliced:
            group = self.groups[g]
            first, last = self.at[group.first], self.at[group.last]
            in_memory = {s for s in group.storages if self._lies_in_memory(s)}  # the page thread does not read it there
            for s in group.storages:
                persistent = self.graph.storages[s].persistent
                if s in first.returns and s not in in_memory and (s in last.writes if persistent else s in last.frees):
                    self.updates.streamed[g].add(s)
                    first.returns.remove(s)
                    (last.writes if s in last.writes else last.frees).remove(s)
                elif s in group.temporaries:
                    self.updates.streamed[g].add(s)
                    last.frees.remove(s)
                elif persistent and s in last.writes and s in self.updates.changed[g]:
                    self.updates.written[g].add(s)
                    last.writes.remove(s)
                    last.frees.append(s)

    def _lies_in_memory(self, s: int) -> bool:
        """Return whether a storage that lives within the step is ever paged to a target that is memory."""
        targets = self.costs.device.targets
        return not self.graph.storages[s].persistent and any(
            d.storage == s and d.action is Action.PAGE and targets[d.target].capacity_bytes is not None
            for d in self.plan.decisions
        )

    # -- pass 2: when reads are due

    def _place_reads(self, reruns: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]) -> npt.NDArray[np.float64]:
        """Record every read in order of use, with the latest time at which it must be done so that all
        later ones can be in time.
        """
        targets = self.costs.device.targets
        seconds = np.array([c.seconds for c in self.costs.ops])
        for i, ops in reruns.items():
            seconds[i] += sum(self.costs.ops[r].seconds for r, _ in ops)
        for i, position in enumerate(self.at):
            seconds[i] += sum(c.pack_seconds for c in position.packs) + sum(c.unpack_seconds for c in position.unpacks)
        starts = np.concatenate(([0.0], np.cumsum(seconds)))
        written: dict[int, int] = {}
        lies_on = dict(self.homes)
        packed_on: dict[int, tuple[int, int]] = {}
        spans: list[float] = []
        links: list[int] = []
        for i, position in enumerate(self.at):
            for s in position.returns:
                self.reads.append(Due(i, s, written.get(s, -1) + 1, float(starts[i])))
                spans.append(targets[lies_on.get(s, 0)].read_seconds(self.size[s]))
                links.append(targets[lies_on.get(s, 0)].link)
            for cost in position.unpacks:
                if cost.storage in packed_on:
                    since, d = packed_on.pop(cost.storage)
                    self.reads.append(Due(i, cost.storage, since + 1, float(starts[i]), cost))
                    spans.append(targets[d].read_seconds(cost.reserved_bytes))
                    links.append(targets[d].link)
            packed_on.update({s: (i, d) for s, d in position.packed_targets.items()})
            written.update(dict.fromkeys(position.writes, i))
            lies_on.update(position.targets)
            g = self.updates.ends(i)
            if g is not None:
                written.update(dict.fromkeys(self.updates.streamed[g] | self.updates.written[g], i))
        following: dict[int, float] = {}
        for k in range(len(self.reads) - 1, -1, -1):
            due, link = self.reads[k], links[k]
            due.moment = min(due.moment, following.get(link, due.moment))
            following[link] = due.moment - (1 + READ_MARGIN) * spans[k]
        return starts
