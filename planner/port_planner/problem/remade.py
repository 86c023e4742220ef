"""Which operators of a forward pass run again in a backward pass that is divided into segments, as
in gradient checkpointing.

A segment begins with the tensors that were kept at a cut of the forward pass, and recomputes what
its operators need beyond.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from port_planner.ir.graph import Phase, Role, StepGraph
from port_planner.ir.lowering.rematerialize import effective_operands, rematerializable

_AS_THEY_WERE = frozenset({Role.PARAMETER, Role.CONSTANT, Role.BATCH})
"""Roles of storages that no forward pass changes."""

_INDICES = frozenset({"int32", "int64"})
"""Types of possible indices: an operator that trusts its index needs the tensor that another operator has checked."""

_NEVER: Mapping[str, int] = {}


class RepeatedOperators:
    """The operators of one micro-batch that run again, and where."""

    def __init__(
        self, graph: StepGraph, segment_of: Sequence[int], rank_of: Sequence[int], updated: Mapping[str, int] = _NEVER
    ) -> None:
        """`segment_of`, `rank_of`: the segment of every operator, and its place in the sequence.

        `updated`: after which place a parameter, by its key, has its new value.
        """
        self._graph, self._segment_of, self._rank_of, self._updated = graph, segment_of, rank_of, updated
        backward = (i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD)
        self._backward = sorted(backward, key=lambda i: rank_of[i])
        self._valid_until = [self._last_place(s) for s in range(len(graph.storages))]
        self._indices = {value.storage for value in graph.values if value.dtype in _INDICES}
        self._can = [self._again_possible(s) for s in range(len(graph.storages))]
        self._boundaries = self._find_boundaries()

    def before(self) -> dict[int, tuple[int, ...]]:
        """Return, for each operator of the backward pass, the forward operators that run again before it, ascending."""
        found: dict[int, tuple[int, ...]] = {}
        done: dict[int, set[int]] = {}
        for i in self._backward:
            segment = self._segment_of[i]
            there = done.setdefault(segment, set())
            again = self._needed_by(i, there)
            if again:
                found[i] = tuple(sorted(again))
        return found

    def _needed_by(self, op: int, there: set[int]) -> set[int]:
        """Return what must run again before `op`; `there`: tensors that are already recomputed in its
        segment, which this extends.
        """
        again: set[int] = set()
        waiting = [s for s in self._graph.reads[op] if self._missing(s, op)]
        while waiting:
            s = waiting.pop()
            if s in there:
                continue
            there.add(s)
            for writer in self._graph.writers[s]:
                again.add(writer)
                there |= {u for u in self._graph.creates[writer] if self._graph.writers[u] == (writer,)}
                waiting += [u for u in effective_operands(self._graph, writer) if u != s and self._missing(u, op)]
        return again

    def _missing(self, s: int, op: int) -> bool:
        """Return whether a tensor of another segment's forward pass is recomputed for `op` rather than kept."""
        if not self._can[s] or self._segment_of[self._graph.uses[s][0]] == self._segment_of[op]:
            return False
        return self._rank_of[op] <= self._valid_until[s] and not self._waits(s, self._boundaries)

    def _last_place(self, s: int) -> float:
        """Return the last place before which running the writers of a storage again restores its contents."""
        read = (self._graph.storages[u] for w in self._graph.writers[s] for u in effective_operands(self._graph, w))
        return min((self._updated.get(storage.key, math.inf) for storage in read), default=math.inf)

    def _waits(self, s: int, boundaries: Sequence[int]) -> bool:
        """Return whether the forward pass itself uses a tensor on both sides of a cut."""
        first = self._graph.uses[s][0]
        last = max(u for u in self._graph.uses[s] if self._graph.ops[u].phase is Phase.FORWARD)
        return bisect_right(boundaries, first) < bisect_right(boundaries, last)

    def _find_boundaries(self) -> list[int]:
        """Return the forward operators before which tensors are kept, which are the boundaries of segments.

        The operators that a segment of the backward pass needs begin at some place. Among the places before it, back to
        where the next segment's operators begin, the one with the fewest kept bytes is chosen.
        """
        graph = self._graph
        waiting = self._waiting_bytes()
        begins: dict[int, int] = {}
        for i in self._backward:
            for s in graph.reads[i]:
                first, segment = graph.uses[s][0], self._segment_of[i]
                if self._can[s] and self._segment_of[first] != segment:
                    begins[segment] = min(begins.get(segment, first), first)
        boundaries, lowest = set[int](), 1
        for first in sorted(set(begins.values()) - {0}):
            boundaries.add(min(range(lowest, first + 1), key=lambda i: (waiting[i], -i)))
            lowest = first + 1
        forward = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
        boundaries |= {b for a, b in itertools.pairwise(forward) if self._segment_of[a] != self._segment_of[b]}
        return sorted(boundaries)

    def _waiting_bytes(self) -> list[int]:
        """Return, before every operator, the bytes that the forward pass has computed and will still use."""
        graph = self._graph
        change = [0] * (len(graph.ops) + 1)
        for s, storage in enumerate(graph.storages):
            uses = [u for u in graph.uses[s] if graph.ops[u].phase is Phase.FORWARD]
            if storage.role is Role.TEMPORARY and uses:
                change[uses[0] + 1] += storage.nbytes
                change[uses[-1] + 1] -= storage.nbytes
        return list(itertools.accumulate(change))

    def _again_possible(self, s: int) -> bool:
        graph = self._graph
        writers = graph.writers[s]
        if not writers or s in self._indices or any(graph.ops[w].phase is not Phase.FORWARD for w in writers):
            return False
        if not rematerializable(graph, s, writers[-1]) or not self._settled(s):
            return False
        needed = {u for w in writers for u in effective_operands(graph, w)} - {s}
        return all(graph.storages[u].role in _AS_THEY_WERE or self._settled(u) for u in needed)

    def _settled(self, s: int) -> bool:
        """Return whether all readers of a temporary, except its writers, read its final contents."""
        graph = self._graph
        if graph.storages[s].role is not Role.TEMPORARY or s in graph.kept:
            return False
        writers = graph.writers[s]
        forward = all(graph.ops[w].phase is Phase.FORWARD for w in writers)
        return forward and all(u > writers[-1] or u in writers for u in graph.uses[s])
