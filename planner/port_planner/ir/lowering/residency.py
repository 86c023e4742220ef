"""The storages resident while each op runs, if writes took no time and reads completed on demand."""

from collections.abc import Sequence, Set

import numpy as np

from port_planner.ir.costs import CostTable
from port_planner.ir.graph import Role, StepGraph
from port_planner.ir.lowering.placement import Position, SlicedUpdates
from port_planner.ir.lowering.rematerialize import effective_operands, rematerialization_ops
from port_planner.ir.plan import Action, Decision
from port_planner.ir.program import BudgetError, PlanError


class ResidencyWalk:
    """Walks a placed plan op by op.

    Raises PlanError if a storage is missing or present twice.
    """

    def __init__(
        self, graph: StepGraph, costs: CostTable, updates: SlicedUpdates, at: Sequence[Position], starts_away: Set[int]
    ) -> None:
        self.graph, self.costs, self.updates, self.size = graph, costs, updates, updates.size
        self.resident = {
            s for s, storage in enumerate(graph.storages) if storage.role is not Role.TEMPORARY and graph.uses[s]
        } - starts_away
        self.packed: set[int] = set()
        self.packed_away: set[int] = set()
        """Packed storages whose packed form is on a paging target."""
        self.read_packed: dict[int, int] = {}
        """Storages of which only the packed form remains, and its bytes."""
        self.current = sum(self.size[s] for s in self.resident)
        self.version = [0] * len(graph.storages)
        self.need = np.zeros(len(graph.ops), dtype=np.int64)
        """For each op, the resident bytes at the fullest moment of its position."""
        self.after_need = np.zeros(len(graph.ops), dtype=np.int64)
        self.reruns: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        """Op -> what runs again before it: (op, storages to free afterwards)."""
        self.fullest: tuple[int, frozenset[int]] = (0, frozenset())
        """The op with the highest memory need, and the storages resident there."""
        highest = 0
        for i, position in enumerate(at):
            self.need[i] = self._step(i, position)
            if self.need[i] >= highest:
                highest, self.fullest = int(self.need[i]), (i, frozenset(self.resident))
            packing = self._leave(i, position)
            if packing > self.need[i]:
                self.need[i] = packing
                if packing >= highest:
                    highest, self.fullest = packing, (i, frozenset(self.resident))
            self.after_need[i] = self.current

    def check(self, limit: int) -> None:
        """Raise BudgetError if some op needs more than `limit` bytes."""
        if len(self.need) and self.need.max() > limit:
            op, who = self.fullest
            holders = tuple(sorted(((s, self.size[s]) for s in who), key=lambda h: -h[1])[:8])
            base = self.costs.device.base_bytes
            raise BudgetError(op, self.graph.ops[op].name, int(self.need.max()) + base, limit + base, holders)

    def _step(self, i: int, position: Position) -> int:
        """Make resident what op `i` needs and run it; return the bytes at the fullest moment."""
        graph, op = self.graph, self.graph.ops[i]
        for s in position.returns:
            if s in self.resident:
                raise PlanError(f"storage {s} is read from flash at op {i} although it is resident")
            self.resident.add(s)
            self.current += self.size[s]
        peak = max(self.current, self._unpack(i, position))
        if position.rematerializations:
            peak = max(peak, self._rematerialize(i, position.rematerializations))
        begun, g = self.updates.starts(i), self.updates.group_at.get(i)
        if begun is not None:
            self.current += self.updates.resident_bytes(begun)
        streamed: Set[int] = self.updates.streamed[g] if g is not None else frozenset()
        for s in graph.reads[i]:
            if s not in self.resident and s not in streamed and s not in self.read_packed:
                raise PlanError(f"op {i} ({op.name}) reads storage {s} ({graph.label(s)}), which is not resident there")
        for s in graph.creates[i]:
            if s not in streamed:
                self.resident.add(s)
                self.current += self.size[s]
        for s in (*graph.creates[i], *op.writes):
            self.version[s] += 1
        workspace = 0 if g is not None else self.costs.ops[i].workspace_bytes
        return max(peak, self.current + workspace)

    def _unpack(self, i: int, position: Position) -> int:
        """Unpack what op `i` needs; return the bytes at the fullest moment, with packed form and tensor together."""
        peak = 0
        for cost in position.unpacks:
            if cost.storage in self.resident or cost.storage not in self.packed:
                raise PlanError(f"storage {cost.storage} is unpacked at op {i}, but it is not packed there")
            self.packed.remove(cost.storage)
            if cost.storage in self.packed_away:
                self.packed_away.remove(cost.storage)
                self.current += cost.reserved_bytes
            self.resident.add(cost.storage)
            self.current += self.size[cost.storage]
            peak = max(peak, self.current)
            self.current -= cost.reserved_bytes
        return peak

    def _leave(self, i: int, position: Position) -> int:
        """Release what is freed, packed or written after op `i`; return the bytes while the largest is being packed."""
        ended = self.updates.ends(i)
        if ended is not None:
            self.current -= self.updates.resident_bytes(ended)
        for s in position.frees:
            if s in self.read_packed:
                self.current -= self.read_packed.pop(s)
            else:
                self._let_go(s, i)
        peak = 0
        for cost in position.packs:
            peak = max(peak, self.current + cost.reserved_bytes)
            self._let_go(cost.storage, i)
            if cost.storage in position.stays_packed:
                self.read_packed[cost.storage] = cost.reserved_bytes
            else:
                self.packed.add(cost.storage)
            if cost.storage in position.packed_targets:
                self.packed_away.add(cost.storage)
            else:
                self.current += cost.reserved_bytes
        for s in position.writes:
            self._let_go(s, i)
        return peak

    def _let_go(self, s: int, i: int) -> None:
        if s not in self.resident:
            raise PlanError(f"storage {s} is freed, packed or written at op {i}, but it is not resident there")
        self.resident.discard(s)
        self.current -= self.size[s]

    def _rematerialize(self, at: int, decisions: Sequence[Decision]) -> int:
        """Check the rematerializations before op `at`, and count their memory.

        Return resident bytes at their peak.
        """
        graph, resident, version, current = self.graph, self.resident, self.version, self.current
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
                        f"rematerializing at op {at} runs op {r} ({graph.ops[r].name}), but storage {s} has changed "
                        "since"
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
        self.current = current
        return peak
