"""From a step graph and its costs to an abstract problem of a few hundred stages, and back to a plan.

The coarsening is exact about memory. Small storages are always kept, and their bytes are counted as they are. Storages
that live inside one stage count as its workspace. A stage holds at most one operator that touches large storages
(except update groups, which run as one).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from port_planner.ir.costs import CostTable, Flash, PackingCost, by_version
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Role, StepGraph, Storage
from port_planner.ir.lowering.rematerialize import effective_operands, rematerializable
from port_planner.ir.lowering.update_slices import SLICE_BYTES, slice_bounds, update_groups
from port_planner.ir.plan import MIN_DECIDED_BYTES, Action, Decision, Plan
from port_planner.ir.program import UpdateGroup
from port_planner.problem.problem import (
    GapDecision,
    Packing,
    Paging,
    Problem,
    Rematerialization,
    Schedule,
    Semantics,
    Slicing,
    Stage,
    Tensor,
)

MAX_REMATERIALIZATION_OPS = 8
"""Largest number of writers of a storage for which rematerialization is worthwhile; an
accumulated gradient has more.
"""

PLANNED_SHARE = 15 / 16
"""Share of the host's memory for pages that plans may use; the rest may be lost between pages (`host_pages`)."""

Counts = npt.NDArray[np.int64]

_ACTIONS = {
    GapDecision.PAGE: Action.PAGE,
    GapDecision.RECOMPUTE: Action.RECOMPUTE,
    GapDecision.PACK: Action.PACK,
    GapDecision.PACK_PAGE: Action.PACK_PAGE,
}


@dataclass(frozen=True)
class Coarse:
    """A problem, and the origin of its stages and tensors.

    `graph`, `costs`: in plan order. `ranges`: first and last op of each stage. `storages`: storage of each tensor.
    """

    graph: StepGraph
    costs: CostTable
    order: tuple[int, ...]
    problem: Problem
    ranges: tuple[tuple[int, int], ...]
    storages: tuple[int, ...]
    slice_groups: tuple[tuple[int, int], ...]

    def plan(self, schedule: Schedule, ram_bytes: int, strategy: str) -> Plan:
        """Return the op-level plan of `schedule`, without its figures."""
        decisions = [*self._choice_decisions(schedule), *self._intermediate_decisions(schedule)]
        sliced = tuple(self.slice_groups[k] for k in schedule.sliced)
        return Plan(tuple(sorted(decisions)), self.order, sliced, ram_bytes=ram_bytes, strategy=strategy)

    def _choice_decisions(self, schedule: Schedule) -> list[Decision]:
        found = []
        for choice in schedule.choices:
            if choice.decision is GapDecision.KEEP:
                continue
            gap = self.problem.gaps[choice.gap]
            storage = self.storages[gap.tensor]
            before = self.ranges[choice.stage % self.problem.size][0]
            after = self._last_use(storage, gap.after)
            found.append(Decision(storage, after, before, _ACTIONS[choice.decision], choice.target))
        return found

    def _intermediate_decisions(self, schedule: Schedule) -> list[Decision]:
        found = []
        for tensor, stage in schedule.intermediates:
            storage, before = self.storages[tensor], self.ranges[stage][0]
            after = max(u for u in self.graph.uses[storage] if u < before)
            found.append(Decision(storage, after, before, Action.INTERMEDIATE))
        return found

    def _last_use(self, storage: int, stage: int) -> int:
        last = self.ranges[stage][1]
        return max(u for u in self.graph.uses[storage] if u <= last)


def coarsen(
    graph: StepGraph,
    costs: CostTable,
    *,
    ram_bytes: int | None,
    deadline_s: float | None = None,
    order: tuple[int, ...] = (),
    min_bytes: int = MIN_DECIDED_BYTES,
    write_limit_bytes: float | None = None,
) -> Coarse:
    """Return the problem of planning `graph` within `ram_bytes`, which includes the worker's base.

    `order`: the order in which its ops run.
    """
    if order:
        graph = graph.reordered(order)
        costs = costs.reordered(order)
    return _CoarseBuilder(graph, costs, order, min_bytes).run(ram_bytes, deadline_s, write_limit_bytes)


def _round_trip(d: int, target: Flash, nbytes: int) -> Paging:
    return Paging(
        d,
        target.write_seconds(nbytes),
        target.read_seconds(nbytes),
        nbytes * target.written_cost_joules_per_byte,
        nbytes * target.read_joules_per_byte,
    )


class _CoarseBuilder:
    """Builds one Coarse: stages, the choice of tensors, their rematerializations, and the fixed load."""

    def __init__(self, graph: StepGraph, costs: CostTable, order: tuple[int, ...], min_bytes: int) -> None:
        self.graph, self.costs, self.order = graph, costs, order
        self.packing = by_version(costs.packings if graph.device == CPU else ())  # codecs run on the CPU alone
        self.large = [nbytes >= max(min_bytes, 1) for nbytes in graph.sizes]
        self.groups = update_groups(graph)
        self.ranges = self._find_stages()
        self.stage_of = np.zeros(len(graph.ops), dtype=np.int64)
        for t, (first, last) in enumerate(self.ranges):
            self.stage_of[first : last + 1] = t
        self.created = {s: i for i, fresh in enumerate(graph.creates) for s in fresh}
        self.loads: tuple[Counts, Counts] | None = None
        self.tensor_of: dict[int, int] = {}
        self.storages: list[int] = []
        self._choose_tensors()

    def _find_stages(self) -> list[tuple[int, int]]:
        graph = self.graph
        group_of = {i: g for g, group in enumerate(self.groups) for i in range(group.first, group.last + 1)}
        large = [any(self.large[s] for s in (*graph.reads[i], *graph.creates[i])) for i in range(len(graph.ops))]
        starts, anchored = [0], large[0]
        for i in range(1, len(graph.ops)):
            here, before = group_of.get(i), group_of.get(i - 1)
            edge = here != before
            if (edge and anchored and (large[i] or here is not None)) or (here is None and large[i] and anchored):
                starts.append(i)
                anchored = False
            anchored = anchored or large[i]
        return list(zip(starts, [s - 1 for s in starts[1:]] + [len(graph.ops) - 1], strict=True))

    def _add(self, s: int) -> None:
        if s not in self.tensor_of:
            self.tensor_of[s] = len(self.storages)
            self.storages.append(s)

    def _choose_tensors(self) -> None:
        """Choose large storages that live through more than one stage, and the inputs of their rematerializations."""
        graph = self.graph
        for s, uses in enumerate(graph.uses):
            if uses and self.large[s] and not self._inside_one_stage(s):
                self._add(s)
        self.remats: dict[int, list[list[int] | None]] = {}
        k = 0
        while k < len(self.storages):
            s = self.storages[k]
            self.remats[s] = [self._remat(s, t) for t in self._write_stages(s)]
            for remat in self.remats[s]:
                for u in {u for r in remat or () for u in effective_operands(graph, r)}:
                    if u != s and graph.storages[u].role is not Role.CONSTANT:
                        self._add(u)
            k += 1

    def _inside_one_stage(self, s: int) -> bool:
        uses = self.graph.uses[s]
        temporary = self.graph.storages[s].role is Role.TEMPORARY and s not in self.graph.kept
        return temporary and bool(self.stage_of[uses[0]] == self.stage_of[uses[-1]])

    def _write_stages(self, s: int) -> list[int]:
        return sorted({int(self.stage_of[w]) for w in self.graph.writers[s]})

    def _remat(self, s: int, stage: int) -> list[int] | None:
        """Return the ops that rematerialize `s` with its contents after `stage`; None if that is impossible."""
        after = self.ranges[stage][1]
        if not rematerializable(self.graph, s, after):
            return None
        ops = [w for w in self.graph.writers[s] if w <= after]
        return ops if len(ops) <= MAX_REMATERIALIZATION_OPS else None

    def run(self, ram_bytes: int | None, deadline_s: float | None, write_limit_bytes: float | None) -> Coarse:
        tensors = [self._tensor(s) for s in self.storages]
        slicings, slice_groups = self._slicings()
        device = self.costs.device
        problem = Problem(
            tuple(self._stages()),
            tuple(tensors),
            None if ram_bytes is None else ram_bytes - device.base_bytes,
            deadline_s,
            Semantics.ELASTIC,
            device.static_watts,
            tuple(t.name for t in device.targets),
            write_limit_bytes,
            slicings,
            name="captured step",
            target_bytes=tuple(
                None if t.capacity_bytes is None else int(PLANNED_SHARE * t.capacity_bytes) for t in device.targets
            ),
            links=tuple(t.link for t in device.targets),
        )
        return Coarse(
            self.graph, self.costs, self.order, problem, tuple(self.ranges), tuple(self.storages), slice_groups
        )

    def _tensor(self, s: int) -> Tensor:
        graph, storage = self.graph, self.graph.storages[s]
        accesses = tuple(sorted({int(self.stage_of[u]) for u in graph.uses[s]}))
        writes = tuple(self._write_stages(s))
        if not storage.persistent and (not writes or writes[0] != accesses[0]):
            writes = (accesses[0], *writes)  # batch and constants: their contents count as written at first sight
        rematerializations: list[Rematerialization | None] = [self._rematerialize(s, remat) for remat in self.remats[s]]
        unknown: list[Rematerialization | None] = [None] * (len(writes) - len(rematerializations))
        return Tensor(
            graph.label(s),
            graph.sizes[s],
            accesses,
            writes,
            storage.persistent,
            tuple(unknown + rematerializations),
            self._pagings(storage) if self.large[s] else (),
            self._packings(s, writes),
            pinned=not self.large[s],
        )

    def _pagings(self, storage: Storage) -> tuple[Paging, ...]:
        """Return the cost of a round trip to each target that may hold the storage."""
        targets = self.costs.device.targets
        return tuple(
            _round_trip(d, target, storage.nbytes)
            for d, target in enumerate(targets)
            if d == 0 or target.capacity_bytes is not None or not storage.persistent
        )

    def _packings(self, s: int, writes: tuple[int, ...]) -> tuple[Packing | None, ...]:
        """Return the cost of packing the contents after each stage that writes `s`; empty if nothing was measured."""
        watts = self.costs.device.static_watts
        counts = [sum(w <= self.ranges[stage][1] for w in self.graph.writers[s]) for stage in writes]
        found = [self.packing.get((s, count)) for count in counts]
        if not any(found):
            return ()
        return tuple(
            None
            if c is None
            else Packing(c.reserved_bytes, c.seconds, c.joules + watts * c.seconds, self._packed_pagings(c))
            for c in found
        )

    def _packed_pagings(self, cost: PackingCost) -> tuple[Paging, ...]:
        """Return the cost of a packed form's round trip to each medium; contents that cannot be
        restored are read in packed form.
        """
        if not cost.codec.comes_back:
            return ()
        media = ((d, t) for d, t in enumerate(self.costs.device.targets) if t.capacity_bytes is None)
        return tuple(_round_trip(d, target, cost.reserved_bytes) for d, target in media)

    def _rematerialize(self, s: int, remat: list[int] | None) -> Rematerialization | None:
        if remat is None:
            return None
        graph, work = self.graph, 0
        inputs: set[tuple[int, int]] = set()
        made: set[int] = set()
        for r in remat:
            for u in effective_operands(graph, r):
                if u in made or u == s or u not in self.tensor_of:
                    continue
                version = self._version_read(u, r)
                if version is None:
                    return None
                inputs.add((self.tensor_of[u], version))
            fresh = [u for u in graph.creates[r] if u != s]
            made.update(graph.creates[r])
            work = max(work, self.costs.ops[r].workspace_bytes + sum(graph.storages[u].nbytes for u in fresh))
        if len({u for u, _ in inputs}) < len(inputs):
            return None
        joules = self._joules(remat)
        own = sum(self._joules((r,)) / self._rematerialized_by(r) for r in remat)
        return Rematerialization(
            sum(self.costs.ops[r].seconds for r in remat),
            joules,
            tuple(sorted(inputs)),
            work,
            own / joules if joules > 0 else 1.0,
        )

    def _rematerialized_by(self, op: int) -> int:
        """Return how many tensors that are idle at some time could use a second run of `op`
        for their rematerialization.
        """
        touched = {*self.graph.creates[op], *self.graph.ops[op].writes}
        return max(sum(s in self.tensor_of and self._lies_idle(s) for s in touched), 1)

    def _lies_idle(self, s: int) -> bool:
        """Return whether a plan may decide about `s` between two of its uses."""
        stages = sorted({int(self.stage_of[u]) for u in self.graph.uses[s]})
        return self.large[s] and any(b > a + 1 for a, b in itertools.pairwise(stages))

    def _joules(self, ops: Iterable[int]) -> float:
        """Return the joules of running `ops`, including static power meanwhile."""
        watts = self.costs.device.static_watts
        return sum(self.costs.ops[i].joules + watts * self.costs.ops[i].seconds for i in ops)

    def _version_read(self, u: int, op: int) -> int | None:
        """Return the stage-level version of storage `u` that `op` reads; None if no stage ends with it."""
        graph = self.graph
        count = sum(w < op for w in graph.writers[u])
        offset = 0
        if not graph.storages[u].persistent and graph.storages[u].role is not Role.TEMPORARY:
            if graph.storages[u].role is Role.BATCH:
                return 0
            offset = 1
        if count == 0:
            return -1 + offset
        for v, stage in enumerate(self._write_stages(u)):
            if sum(w <= self.ranges[stage][1] for w in graph.writers[u]) == count:
                return v + offset
        return None

    def _stages(self) -> list[Stage]:
        held, inside = self._fixed_load()
        ops, costs = self.graph.ops, self.costs.ops
        sizes = [s.nbytes for s in self.graph.storages]
        found = []
        for t, (first, last) in enumerate(self.ranges):
            here = range(first, last + 1)
            fixed = int(held[first : last + 1].max())
            needs = [int(held[i] + inside[i]) + costs[i].workspace_bytes for i in here]
            work = max(max(needs) - fixed, 0)
            touched = self._touched(t)
            least = max(
                need + sum(sizes[s] for s, (a, b) in touched.items() if a <= i <= b)
                for i, need in zip(here, needs, strict=True)
            )
            found.append(
                Stage(
                    f"{first}:{ops[first].name}",
                    sum(costs[i].seconds for i in here),
                    self._joules(here),
                    work,
                    fixed,
                    fixed + work + sum(sizes[s] for s in touched) - least,
                )
            )
        return found

    def _touched(self, stage: int) -> dict[int, tuple[int, int]]:
        """Return the tensors' storages used in `stage`, with the first and last op there at which they are resident.

        A storage that is older than the stage is resident when its first op runs, and may be
        evicted after its last use.
        """
        first, last = self.ranges[stage]
        found: dict[int, tuple[int, int]] = {}
        for i in range(first, last + 1):
            for s in (*self.graph.reads[i], *self.graph.creates[i]):
                if s in self.tensor_of:
                    begin = i if s in self.graph.creates[i] else first
                    found[s] = (found.get(s, (begin, i))[0], i)
        return found

    def _fixed_load(self) -> tuple[Counts, Counts]:
        """Return the bytes per op that no decision changes: storages held across stages, and those
        that live inside one stage.
        """
        if self.loads is None:
            self.loads = self._count_fixed_load()
        return self.loads

    def _count_fixed_load(self) -> tuple[Counts, Counts]:
        graph, n = self.graph, len(self.graph.ops)
        held, inside = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
        for s, uses in enumerate(graph.uses):
            if not uses:
                continue
            storage = graph.storages[s]
            start, stop = self._lifetime(s)
            if s in self.tensor_of:
                self._outside(s, start, stop, held)
                continue
            into = inside if self._inside_one_stage(s) else held
            into[start] += storage.nbytes
            into[stop] -= storage.nbytes
        return np.cumsum(held)[:n], np.cumsum(inside)[:n]

    def _lifetime(self, s: int) -> tuple[int, int]:
        uses, n = self.graph.uses[s], len(self.graph.ops)
        if self.graph.storages[s].role is not Role.TEMPORARY:
            return 0, n
        return uses[0], n if s in self.graph.kept else uses[-1] + 1

    def _outside(self, s: int, start: int, stop: int, held: Counts) -> None:
        """Count a tensor that outlives its accesses (batch, constants, the loss) before and after them."""
        storage, uses = self.graph.storages[s], self.graph.uses[s]
        if storage.persistent:
            return
        first = self.ranges[self.stage_of[uses[0]]][0]
        last = self.ranges[self.stage_of[uses[-1]]][1] + 1
        for a, b in ((start, first), (last, stop)):
            if a < b:
                held[a] += storage.nbytes
                held[b] -= storage.nbytes

    def _slicings(self) -> tuple[tuple[Slicing, ...], tuple[tuple[int, int], ...]]:
        """Return the updates that may be sliced, with (group, number of slices) of each."""
        found, groups = [], []
        for g, group in enumerate(self.groups):
            stage = int(self.stage_of[group.first])
            members = tuple(
                self.tensor_of[s]
                for s in group.storages
                if s in self.tensor_of
                and self.graph.storages[s].persistent
                and self.large[s]
                and not any(
                    self.stage_of[u] == stage - 1 for u in self.graph.uses[s]
                )  # a sum of gradients, just added to
            )
            size = self.graph.storages[group.parameter].nbytes
            if not members or size < 2 * SLICE_BYTES:
                continue
            count = -(-size // SLICE_BYTES)
            tile = max(stop - start for start, stop in slice_bounds(group.nbytes, count))
            saved = self._sliced_savings(group)
            buffers = tile * (2 * len(members) + len(group.temporaries))
            others = sum(self.graph.storages[s].nbytes for s in group.storages if s in self.tensor_of)
            others -= sum(self.graph.storages[self.storages[m]].nbytes for m in members)
            found.append(Slicing(stage, members, saved, buffers, others))
            groups.append((g, count))
        return tuple(found), tuple(groups)

    def _sliced_savings(self, group: UpdateGroup) -> int:
        """Return by how much the workspace of a group's stage shrinks when its temporaries are streamed in slices."""
        held, inside = self._fixed_load()
        n = len(self.graph.ops)
        streamed = np.zeros(n + 1, dtype=np.int64)
        for s in group.temporaries:
            if s not in self.tensor_of:
                uses = self.graph.uses[s]
                streamed[uses[0]] += self.graph.storages[s].nbytes
                streamed[uses[-1] + 1] -= self.graph.storages[s].nbytes
        first, last = self.ranges[self.stage_of[group.first]]
        here = slice(first, last + 1)
        work = np.array([c.workspace_bytes for c in self.costs.ops[here]])
        whole = (held + inside)[here] + work
        rest = (held + inside - np.cumsum(streamed)[:n])[here]
        return max(int(whole.max() - rest.max()), 0)
