"""The memory that training needs for any set of trained parameters.

It is computed from one capture that trains them all.

For a parameter that is not trained, its optimizer's ops, the ops that only its gradient needs, their results and its
optimizer state are removed. The resident bytes of the remaining graph are counted op by op, as
`port_planner.ir.lowering.lower` counts a plan that keeps everything. A set that fits by this count fits. A capture of
the smaller set may save slightly more, because an operator of several gradients then computes fewer, but never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from port_planner.capture.masked_gradients import BACKWARD, INPUT, MASK, is_plain
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import PERSISTENT, Op, Phase, Ref, Role, StepGraph, operands, references

_UPDATED = PERSISTENT - {Role.BUFFER}


class GraphBytes:
    """The keep-everything peak of one graph for sets of trained parameters, in microseconds per set."""

    def __init__(self, graph: StepGraph, costs: CostTable) -> None:
        self.base_bytes = costs.device.base_bytes
        self._workspace = np.array([op.workspace_bytes for op in costs.ops], np.int64)
        self._seconds = np.array([op.seconds for op in costs.ops])
        self._joules = np.array([op.joules for op in costs.ops]) + costs.device.static_watts * self._seconds
        self._size = np.array([storage.nbytes for storage in graph.storages], np.int64)
        self._lasting = np.array([storage.role is not Role.TEMPORARY for storage in graph.storages], bool)
        self._always, self._needed = _needed_ops(graph)
        kept = graph.kept
        events = [(s, i) for s, uses in enumerate(graph.uses) for i in uses]
        self._event_storage = np.array([s for s, _ in events], np.int64)
        self._event_op = np.array([i for _, i in events], np.int64)
        self._weight_gradients = _weight_gradients(graph, events)
        used = sorted({s for s, _ in events})
        self._used = np.array(used, np.int64)
        self._starts = np.searchsorted(self._event_storage, self._used)
        self._kept = np.array([s in kept for s in used], bool)
        self._creator = np.array([graph.uses[s][0] if not self._lasting[s] else -1 for s in used], np.int64)

    def peak(self, trained: Iterable[str]) -> int:
        """Return the resident bytes of the fullest op if only `trained` is updated.

        The process itself is included.
        """
        needed = self._running(trained)
        ops = len(needed)
        alive = needed[self._event_op]
        for event, readers in self._weight_gradients:
            alive[event] = needed[readers].any()
        last = np.maximum.reduceat(np.where(alive, self._event_op, -1), self._starts)
        size, lasting = self._size[self._used], self._lasting[self._used]
        constant = int(size[lasting & (last >= 0)].sum())
        # a result that nothing needed reads is not computed
        passing = ~lasting & (last >= 0) & needed[self._creator] & ((last > self._creator) | self._kept)
        end = np.where(self._kept, ops - 1, last)
        change = np.zeros(ops + 1, np.int64)
        np.add.at(change, self._creator[passing], size[passing])
        np.add.at(change, end[passing] + 1, -size[passing])
        resident = np.cumsum(change[:ops]) + self._workspace
        return self.base_bytes + constant + int(resident[needed].max(initial=0))

    def seconds(self, trained: Iterable[str]) -> float:
        """Return the seconds of the ops that run if only `trained` is updated."""
        return float(self._seconds[self._running(trained)].sum())

    def joules(self, trained: Iterable[str]) -> float:
        """Return the joules of these ops, including the device's idle power while they run."""
        return float(self._joules[self._running(trained)].sum())

    def _running(self, trained: Iterable[str]) -> NDArray[np.bool_]:
        needed = self._always.copy()
        for name in trained:
            if name in self._needed:
                needed |= self._needed[name]
        return needed


class TrainedBytes:
    """Measures the largest of all graphs that a job runs: `bytes_of` of
    `port_planner.sparse.choose.choose_trainable`.
    """

    def __init__(self, graphs: Mapping[str, StepGraph], costs: Mapping[str, CostTable]) -> None:
        self._graphs = [GraphBytes(graph, costs[name]) for name, graph in graphs.items()]

    def __call__(self, trained: frozenset[str]) -> int:
        return max(graph.peak(trained) for graph in self._graphs)

    def step_seconds(self, trained: frozenset[str]) -> float:
        """Return the seconds of the first step of the job's main graph, without paging."""
        return self._graphs[0].seconds(trained)

    def step_joules(self, trained: frozenset[str]) -> float:
        """Return the joules of the same step."""
        return self._graphs[0].joules(trained)


def trained_parameters(graph: StepGraph) -> tuple[str, ...]:
    """Return the names of the parameters that the graph updates, in the order in which the forward pass reads them."""
    updated = {_owner(graph, op) for op in graph.ops} - {None}
    first = {
        storage.name: graph.uses[s][0]
        for s, storage in enumerate(graph.storages)
        if storage.role is Role.PARAMETER and storage.name in updated
    }
    return tuple(sorted(first, key=lambda name: first[name]))


def _owner(graph: StepGraph, op: Op) -> str | None:
    """Return the parameter that `op` updates, or whose state or gradient it changes; None for other ops."""
    if op.phase is Phase.FORWARD:
        return None
    for s in op.writes:
        storage = graph.storages[s]
        if storage.role in _UPDATED:
            return storage.name.partition("/")[0]
    return None


def _needed_ops(graph: StepGraph) -> tuple[NDArray[np.bool_], dict[str, NDArray[np.bool_]]]:
    """Return the ops that run for any set of trained parameters, and for each parameter those that its update needs."""
    always = np.array([op.phase is Phase.FORWARD or op.random for op in graph.ops], bool)
    sinks: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        owner = _owner(graph, op)
        if owner is not None:
            sinks.setdefault(owner, []).append(i)
    before = [_sources(graph, i) for i in range(len(graph.ops))]
    norms = [i for i, op in enumerate(graph.ops) if op.phase is Phase.UPDATE and not op.writes]
    needed = {}
    for name, ops in sinks.items():
        needed[name] = _closure(ops, before, len(graph.ops))
        for i in norms:  # of its gradient, which a clip stacks with all others
            reads = [w for w in before[i] if graph.ops[w].phase is Phase.BACKWARD]
            needed[name][i] |= bool(reads) and all(needed[name][w] for w in before[i])
    return always, needed


def _sources(graph: StepGraph, index: int) -> tuple[int, ...]:
    """Return the earlier ops whose results op `index` uses, except for the gradient norms that clipping stacks."""
    op = graph.ops[index]
    taken = {graph.values[a.value].storage for a in (*op.args, *(a for _, a in op.kwargs)) if isinstance(a, Ref)}
    if op.phase is not Phase.UPDATE:
        taken |= {graph.values[v].storage for a in op.args if isinstance(a, tuple) for v in references(a)}
    return tuple(sorted({w for s in taken for w in graph.writers[s] if w < index and not _foreign(graph, s, w)}))


def _foreign(graph: StepGraph, storage: int, writer: int) -> bool:
    """Return whether the writer belongs to the previous step, because it updates a persistent
    tensor that is read before.
    """
    return graph.storages[storage].role in _UPDATED and graph.ops[writer].phase is Phase.UPDATE


def _weight_gradients(graph: StepGraph, events: Sequence[tuple[int, int]]) -> list[tuple[int, NDArray[np.int64]]]:
    """Return each backward convolution's use of its input, with the ops that read the resulting weight gradient."""
    places = {event: place for place, event in enumerate(events)}
    found = []
    for i, op in enumerate(graph.ops):
        if op.name != BACKWARD:
            continue
        source, mask = op.args[INPUT], op.args[MASK]
        if not isinstance(source, Ref) or not isinstance(mask, tuple) or not mask[1]:
            continue
        gradient, value = op.outputs[int(bool(mask[0]))], graph.values[source.value]
        alone = sum(graph.values[v].storage == value.storage for v in operands(op)) == 1
        if gradient is not None and alone and is_plain(value):
            made = graph.values[gradient].storage
            readers = np.array([u for u in graph.uses[made] if u != i], np.int64)
            found.append((places[(value.storage, i)], readers))
    return found


def _closure(ops: Iterable[int], before: list[tuple[int, ...]], count: int) -> NDArray[np.bool_]:
    needed = np.zeros(count, bool)
    stack = list(ops)
    while stack:
        i = stack.pop()
        if not needed[i]:
            needed[i] = True
            stack.extend(before[i])
    return needed
