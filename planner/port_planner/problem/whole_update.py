"""One graph of a whole update: all micro-batches pass one segment of the model before the next segment.

What is recorded are single micro-batches, whose gradients are summed from one to the next. Run one after the other,
each needs every weight. Segment by segment, a weight is loaded once for all of them, and a gradient is summed and used
up within the step (GreedySnake, arXiv:2512.17570, does so on one GPU). The operators are the recorded ones and every
sum keeps its order, so every number stays the same to the bit; if that is impossible, no such graph is made.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from port_planner.ir.allowed_operators import draws_by_shape
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import (
    NamedArgument,
    Op,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Value,
    operands,
    verify_graph,
    with_operands,
)
from port_planner.ir.lowering.rematerialize import effective_operands, pure_arguments
from port_planner.problem.remade import RepeatedOperators
from port_planner.problem.reorder import dependencies

_FREE_SHARE = 0.5
"""Share of the memory for tensors that a segment's weights and one micro-batch's own tensors may take; the
rest is for waiting tensors.
"""

_SHARED = frozenset({Role.PARAMETER, Role.BUFFER, Role.STATE, Role.CONSTANT})
"""Roles of storages that all micro-batches share; gradients are summed in storages of the update itself."""

_OWN = frozenset({Role.TEMPORARY, Role.BATCH})
"""Roles of storages that each micro-batch has separately."""

_CONTIGUOUS = (("memory_format", NamedArgument("memory_format", "contiguous_format")),)

_BATCH_NORM_BACKWARD, _RUNNING, _TRAINING = "aten::native_batch_norm_backward", slice(3, 5), 7
"""Positions of the arguments of batch norm's backward pass: its running statistics, which the next micro-batch has
changed by then, and its training flag.
"""

_BOTH_WAYS = 2
"""Transfers of a waiting sum, and of a tensor between two segments: it is written and read."""


@dataclass(frozen=True, slots=True)
class WholeUpdate:
    """The graph of an update; `origin`: each operator's micro-batch, and its place in that micro-batch's graph.

    The loss is the last micro-batch's; `aux` are those of the others, in order. `batch`: the
    first one's, then the next.
    """

    graph: StepGraph
    origin: tuple[tuple[int, int], ...]


def whole_update(graphs: Sequence[StepGraph], free_bytes: int, *, remake: bool) -> WholeUpdate | None:
    """Return the update of micro-batches with these graphs, within `free_bytes` for tensors.

    `remake`: what the backward pass needs of the forward pass is recomputed in each segment, whatever else is planned.
    Random operators draw their numbers in the order in which they were recorded. None if the numbers would differ:
    tensors that one micro-batch changes and the next reads in an earlier segment; random operators whose draws depend
    on values; graphs that differ in more than how they sum.
    """
    if any(op.random and not draws_by_shape(op.name) for graph in graphs for op in graph.ops):
        return None
    if any(graph.device != CPU for graph in graphs):
        return None
    graphs = [_without_running_statistics(graph) for graph in graphs]
    if len({tuple(_names(graph)) for graph in graphs}) > 1:
        return None
    places = [_places(graph) for graph in graphs]
    order = _late(graphs[-1], places[-1])
    segments = _Segments(graphs[-1], places[-1], order, len(graphs), free_bytes).of_places()
    segment_of = [[segments[p] for p in place] for place in places]
    rank = {p: k for k, p in enumerate(order)}
    ranks = [[rank[p] for p in place] for place in places]
    sequence = sorted(
        ((m, i) for m, graph in enumerate(graphs) for i in range(len(graph.ops))),
        key=lambda at: (segment_of[at[0]][at[1]], at[0], ranks[at[0]][at[1]], at[1]),
    )
    again: list[Mapping[int, Sequence[int]]] = [{} for _ in graphs]
    if remake:
        updated = _updated_after(graphs[-1], ranks[-1])
        again = [RepeatedOperators(*found, updated).before() for found in zip(graphs, segment_of, ranks, strict=True)]
    update = _GraphMerger(graphs).merged(sequence, segment_of, again)
    return update if _reads_the_same(graphs, update) else None


def _updated_after(graph: StepGraph, ranks: Sequence[int]) -> dict[str, int]:
    """Return, by key, the place after which the last micro-batch changes a shared storage."""
    found: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for s in op.writes:
            if graph.storages[s].role is Role.PARAMETER:
                found[graph.storages[s].key] = min(found.get(graph.storages[s].key, ranks[i]), ranks[i])
    return found


def _reads_the_same(graphs: Sequence[StepGraph], update: WholeUpdate) -> bool:
    """Return whether every operator, recomputed or not, reads shared storages as it would in separate micro-batches.

    This is judged by how often each storage was changed before. The copies with which sums begin
    are left out on both sides.
    """
    changes: Counter[str] = Counter()
    expected: dict[tuple[int, int], dict[str, int]] = {}

    def seen(m: int, i: int) -> dict[str, int]:
        graph = graphs[m]
        keys = (graph.storages[s].key for s in effective_operands(graph, i) if graph.storages[s].role not in _OWN)
        return {key: changes[key] for key in keys}

    def change(m: int, i: int) -> None:
        op = graphs[m].ops[i]
        if m or not _sums(graphs[m], op):
            changes.update(graphs[m].storages[s].key for s in op.writes if graphs[m].storages[s].role not in _OWN)

    for m, graph in enumerate(graphs):
        for i in range(len(graph.ops)):
            expected[m, i] = seen(m, i)
            change(m, i)
    changes.clear()
    done: set[tuple[int, int]] = set()
    for m, i in update.origin:
        if seen(m, i) != expected[m, i]:
            return False
        if (m, i) not in done:
            done.add((m, i))
            change(m, i)
    return True


def _without_running_statistics(graph: StepGraph) -> StepGraph:
    """Return the same step without statistics for batch norm's backward pass in training mode,
    which does not read them.
    """
    ops = tuple(
        replace(op, args=(*op.args[: _RUNNING.start], None, None, *op.args[_RUNNING.stop :]))
        if op.name == _BATCH_NORM_BACKWARD and op.args[_TRAINING] is True
        else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


def _names(graph: StepGraph) -> Iterator[str]:
    """Yield the names of every micro-batch's operators; a sum of gradients begins with a copy."""
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            yield "sum" if _sums(graph, op) else op.name


def _sums(graph: StepGraph, op: Op) -> bool:
    return any(graph.storages[s].role is Role.GRADIENT for s in op.writes)


def _places(graph: StepGraph) -> list[int]:
    """Return each operator's place in the forward and backward pass; update operators follow
    those for which they wait.
    """
    place, found = -1, []
    for op in graph.ops:
        place += op.phase is not Phase.UPDATE
        found.append(max(place, 0))
    return found


def _late(graph: StepGraph, places: Sequence[int]) -> list[int]:
    """Return the places in an order in which operators that enlarge their data run just before its first use.

    A tied weight's first gradient waits for the second through the whole backward pass; the tensors it is
    computed from are smaller.
    """
    ready_for: list[int] = [len(graph.ops)] * len(graph.ops)
    for i, before in enumerate(dependencies(graph)):
        for j in before:
            ready_for[j] = min(ready_for[j], i)
    alone = {p for p, count in Counter(places).items() if count == 1}
    moved: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        target = ready_for[i]
        if op.phase is not Phase.BACKWARD or places[i] not in alone or op.writes or not i + 1 < target < len(graph.ops):
            continue
        made = sum(graph.storages[s].nbytes for s in graph.creates[i])
        waiting = sum(
            graph.storages[s].nbytes
            for s in graph.reads[i]
            if graph.storages[s].role is Role.TEMPORARY and graph.uses[s][-1] == i
        )
        if made > waiting and places[target] != places[i] + 1:
            moved.setdefault(places[target], []).append(places[i])
    away = {p for group in moved.values() for p in group}
    order: list[int] = []
    for p in range(places[-1] + 1):
        order += moved.get(p, ())
        if p not in away:
            order.append(p)
    return order


@dataclass(slots=True)
class _Span:
    """The storages that the places of one growing segment use: weights, sums, and one micro-batch's own tensors.

    `waiting`: its own tensors that are used again; `live_bytes`: the most of them at once.
    """

    seen: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    weights_bytes: int = 0
    sums_bytes: int = 0
    saved_bytes: int = 0
    waiting_bytes: int = 0
    live_bytes: int = 0


class _Segments:
    """Divides a micro-batch into segments so that few bytes move.

    A segment's weights move once if they fit; tensors that wait for a later segment move for each micro-batch.
    """

    def __init__(
        self, graph: StepGraph, places: Sequence[int], order: Sequence[int], count: int, free_bytes: int
    ) -> None:
        self._graph, self._order, self._count = graph, order, count
        self._free_bytes = int(_FREE_SHARE * free_bytes)
        rank = {p: k for k, p in enumerate(order)}
        self._touched: list[set[int]] = [set() for _ in order]
        self._turn = len(order)
        """The place where the backward pass begins."""
        for i, op in enumerate(graph.ops):
            if op.phase is not Phase.UPDATE:
                k = rank[places[i]]
                self._touched[k] |= {*graph.reads[i], *graph.creates[i], *op.writes}
                self._turn = min(self._turn, k) if op.phase is Phase.BACKWARD else self._turn
        self._again = self._used_again()

    def of_places(self) -> list[int]:
        """Return the segment of every place, counted from 0."""
        n = len(self._order)
        best: list[float] = [0.0] + [math.inf] * n
        begun = [0] * (n + 1)
        ends = [*self._boundaries(), n]
        for number, a in enumerate(ends[:-1]):
            span, k = _Span(), a
            for b in ends[number + 1 :]:
                while k < b:
                    self._grow(span, k)
                    k += 1
                if (cost := best[a] + self._moved(span)) < best[b]:
                    best[b], begun[b] = cost, a
        starts, end = [], n
        while end:
            starts.append(end := begun[end])
        starts.reverse()
        found = [0] * n
        for k, p in enumerate(self._order):
            found[p] = bisect_right(starts, k) - 1
        return found

    def _boundaries(self) -> list[int]:
        """Return where a segment may begin: where fewer bytes wait than around it.

        It is never where the backward pass begins, because all inputs of the loss would have to wait.
        """
        span = _Span()
        waiting = [0]
        for k in range(len(self._order)):
            self._grow(span, k)
            waiting.append(span.waiting_bytes)
        low = (
            c
            for c in range(1, len(self._order))
            if waiting[c] <= min(waiting[c - 1], waiting[c + 1]) and c != self._turn
        )
        return [0, *low]

    def _used_again(self) -> list[set[int]]:
        """Return, for each place, its micro-batch's own tensors that are used again in the same pass.

        What the backward pass needs of the forward pass is recomputed in its own segments, or kept by the plan.
        """
        later: dict[int, int] = {}
        again: list[set[int]] = []
        for k in range(len(self._touched) - 1, -1, -1):
            own = {s for s in self._touched[k] if self._graph.storages[s].role is Role.TEMPORARY}
            again.append({s for s in own if s in later and (later[s] < self._turn or k >= self._turn)})
            later |= dict.fromkeys(own, k)
        return again[::-1]

    def _grow(self, span: _Span, k: int) -> None:
        for s in self._touched[k]:
            storage = self._graph.storages[s]
            if storage.role is Role.TEMPORARY:
                waits = s in self._again[k]
                span.waiting_bytes += storage.nbytes * (waits - (s in span.waiting))
                (span.waiting.add if waits else span.waiting.discard)(s)
            if s in span.seen:
                continue
            span.seen.add(s)
            if storage.role is Role.GRADIENT:
                span.sums_bytes += storage.nbytes
            elif storage.persistent:
                span.weights_bytes += storage.nbytes
            elif k >= self._turn and self._graph.ops[self._graph.uses[s][0]].phase is Phase.FORWARD:
                span.saved_bytes += storage.nbytes
        span.live_bytes = max(span.live_bytes, span.waiting_bytes)

    def _moved(self, span: _Span) -> int:
        """Return approximately how many bytes a segment moves: its weights once if they fit beside a
        micro-batch, otherwise for each.
        """
        waiting = _BOTH_WAYS * self._count * span.waiting_bytes
        if span.weights_bytes + span.sums_bytes + span.live_bytes + span.saved_bytes <= self._free_bytes:
            return span.weights_bytes + waiting
        return self._count * (span.weights_bytes + _BOTH_WAYS * span.sums_bytes) + waiting


class _GraphMerger:
    """Merges the operators of micro-batches into one graph, in any sequence in which none depends on a later one."""

    def __init__(self, graphs: Sequence[StepGraph]) -> None:
        self._graphs = graphs
        self._storages: list[Storage] = []
        self._values: list[Value] = []
        self._shared: dict[str, int] = {}
        self._interned: dict[Value, int] = {}
        self._storage_of: list[dict[int, int]] = [{} for _ in graphs]
        self._value_of: list[dict[int, int]] = [{} for _ in graphs]
        self._becomes = _summed_where_made(graphs[0])
        """Gradient in which the first micro-batch's sum continues, by the sum's storage."""
        self._anew: dict[int, int] = {}
        """Storages of a micro-batch that were recomputed in the current segment, by their originals."""

    def merged(
        self,
        sequence: Sequence[tuple[int, int]],
        segment_of: Sequence[Sequence[int]],
        again: Sequence[Mapping[int, Sequence[int]]],
    ) -> WholeUpdate:
        """Return the graph; `again`: operators that run again before an operator of a micro-batch.

        Raises GraphError if the sequence is invalid.
        """
        batch = tuple(self._value(m, v) for m, graph in enumerate(self._graphs) for v in graph.batch)
        ops: list[Op] = []
        origin: list[tuple[int, int]] = []
        here = (-1, -1)
        for m, i in sequence:
            if (m, segment_of[m][i]) != here:
                here = (m, segment_of[m][i])
                self._anew.clear()
            made = [(r, self._once_more(m, r)) for r in again[m].get(i, ())]
            for place, op in (*made, (i, self._summed(m, self._graphs[m].ops[i]))):
                if op is not None:
                    ops.append(op)
                    origin.append((m, place))
        self._anew.clear()
        *others, loss = (self._value(m, graph.loss) for m, graph in enumerate(self._graphs))
        graph = StepGraph(
            tuple(self._storages),
            tuple(self._values),
            tuple(ops),
            batch,
            loss,
            tuple(others),
            self._graphs[-1].scalars,
            _draws(ops, origin),
        )
        verify_graph(graph)
        return WholeUpdate(graph, tuple(origin))

    def _once_more(self, m: int, i: int) -> Op:
        """Return forward operator `i` for its second run: into new storages, without its side effects."""
        graph = self._graphs[m]
        op = graph.ops[i]
        for s in graph.creates[i]:
            self._anew[s] = self._added(graph.storages[s])
        writes = tuple(s for s in op.writes if s in self._anew)
        return replace(self._op(m, replace(op, args=pure_arguments(op), writes=writes)), phase=Phase.BACKWARD)

    def _summed(self, m: int, op: Op) -> Op | None:
        """Return an operator of one micro-batch. The first one's sums begin with their addend, or with a copy of it."""
        graph = self._graphs[m]
        if m or not _sums(graph, op):
            return self._op(m, op)
        total, gradient = operands(op)
        new = self._value(m, total)
        if graph.values[total].storage in self._becomes:
            return None
        return Op("aten::clone", (Ref(self._value(m, gradient)),), _CONTIGUOUS, (new,), (), op.phase)

    def _op(self, m: int, op: Op) -> Op:
        """Return an operator of one micro-batch on the update's values."""
        return replace(
            with_operands(op, lambda v: self._value(m, v)),
            outputs=tuple(None if v is None else self._value(m, v) for v in op.outputs),
            writes=tuple(sorted(self._storage(m, s) for s in op.writes)),
        )

    def _value(self, m: int, v: int) -> int:
        value = self._graphs[m].values[v]
        if value.storage in self._anew:
            return self._intern(replace(value, storage=self._anew[value.storage]))
        known = self._value_of[m]
        if v not in known:
            known[v] = self._intern(replace(value, storage=self._storage(m, value.storage)))
        return known[v]

    def _intern(self, value: Value) -> int:
        if value not in self._interned:
            self._interned[value] = len(self._values)
            self._values.append(value)
        return self._interned[value]

    def _storage(self, m: int, s: int) -> int:
        if s in self._anew:
            return self._anew[s]
        known = self._storage_of[m]
        if s not in known:
            known[s] = self._new(m, s)
        return known[s]

    def _new(self, m: int, s: int) -> int:
        storage = self._graphs[m].storages[s]
        if storage.role not in _SHARED and storage.role is not Role.GRADIENT:
            return self._added(storage)
        if storage.key not in self._shared:
            if storage.role is not Role.GRADIENT:
                self._shared[storage.key] = self._added(storage)
            elif m == 0 and s in self._becomes:
                self._shared[storage.key] = self._storage(0, self._becomes[s])
            else:
                self._shared[storage.key] = self._added(replace(storage, role=Role.TEMPORARY, name=""))
        return self._shared[storage.key]

    def _added(self, storage: Storage) -> int:
        self._storages.append(storage)
        return len(self._storages) - 1


def _draws(ops: Sequence[Op], origin: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the random operators that draw the same numbers, in the order in which micro-batches draw them."""
    together: dict[tuple[int, int], list[int]] = {}
    for k, (op, recorded) in enumerate(zip(ops, origin, strict=True)):
        if op.random:
            together.setdefault(recorded, []).append(k)
    return tuple(tuple(together[recorded]) for recorded in sorted(together))


def _summed_where_made(graph: StepGraph) -> dict[int, int]:
    """Return, by storage of a sum, the gradient's own storage, if it has the same layout and
    nothing needs it afterwards.
    """
    found = {}
    for i, op in enumerate(graph.ops):
        if not _sums(graph, op):
            continue
        total, gradient = (graph.values[v] for v in operands(op))
        made = graph.storages[gradient.storage]
        alike = (
            replace(gradient, storage=total.storage) == total and made.nbytes == graph.storages[total.storage].nbytes
        )
        last = graph.uses[gradient.storage][-1] == i and gradient.storage not in graph.kept
        if alike and last and made.role is Role.TEMPORARY:
            found[total.storage] = gradient.storage
    return found
