"""Reorder a step before it is planned: updates as early as possible, and the branch that frees most first.

Only operators that do not depend on each other change places, so every number stays the same to the bit. Reads wait for
the last write of what they read, writes for all reads of what they change, and random operators keep their sequence.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable

from port_planner.ir.graph import Phase, Role, StepGraph, operands
from port_planner.ir.lowering.update_slices import update_groups


def dependencies(graph: StepGraph) -> list[set[int]]:
    """Return, for each op, the ops that must have run before it.

    If random ops draw in a separate order, the first of them runs first, because it determines where the others begin.
    """
    before: list[set[int]] = [set() for _ in graph.ops]
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    last_random: int | None = None
    for i, op in enumerate(graph.ops):
        written = {*op.writes, *graph.creates[i]}
        written |= {graph.values[v].storage for v in op.outputs if v is not None} & {
            graph.values[v].storage for v in operands(op)
        }
        for s in {*graph.reads[i], *written}:
            if s in writer:
                before[i].add(writer[s])
        for s in written:
            before[i].update(readers[s])
            readers[s] = []
            writer[s] = i
        for s in graph.reads[i]:
            if s not in written:
                readers[s].append(i)
        if op.random:
            if last_random is not None:
                before[i].add(last_random)
            last_random = last_random if graph.draws and last_random is not None else i
        before[i].discard(i)
    return before


def respects(graph: StepGraph, order: tuple[int, ...]) -> bool:
    """Return whether `order` is a permutation of the ops in which nothing runs before its dependencies."""
    return sorted(order) == list(range(len(graph.ops))) and _follows(order, dependencies(graph))


def _follows(order: tuple[int, ...], dependent: list[set[int]]) -> bool:
    place = {op: k for k, op in enumerate(order)}
    return all(place[j] < place[i] for i, before in enumerate(dependent) for j in before)


def peak_bytes(graph: StepGraph) -> int:
    """Return the most bytes resident while an op runs, if everything is kept until its last use."""
    return graph.once(_recorded_peak)


def _recorded_peak(graph: StepGraph) -> int:
    return _peak(graph, range(len(graph.ops)))


def reorder(graph: StepGraph) -> tuple[int, ...]:
    """Return an order with a lower peak than the recorded one; empty if this search finds none.

    This is list scheduling: of the ops that are ready, the one that frees the most bytes net runs first. The
    forward phase stays as recorded, because everything it computes waits for the backward phase anyway.
    Update groups move as a whole.
    """
    return graph.once(_reorder)


def _reorder(graph: StepGraph) -> tuple[int, ...]:
    groups, dependent = _groups(graph), dependencies(graph)
    flat = tuple(i for group in _schedule(graph, groups, dependent) for i in group)
    recorded = range(len(graph.ops))
    if flat == tuple(recorded) or sorted(flat) != [*recorded] or not _follows(flat, dependent):
        return ()
    return flat if _peak(graph, flat) < peak_bytes(graph) else ()


def _groups(graph: StepGraph) -> list[list[int]]:
    """Return the ops in groups that must stay together: update groups, and every other op alone."""
    group_of = {i: g for g, group in enumerate(update_groups(graph)) for i in range(group.first, group.last + 1)}
    groups: list[list[int]] = []
    for i in range(len(graph.ops)):
        g = group_of.get(i)
        if groups and g is not None and group_of.get(groups[-1][-1]) == g:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _schedule(graph: StepGraph, groups: list[list[int]], before: list[set[int]]) -> list[list[int]]:
    number_of = {i: p for p, group in enumerate(groups) for i in group}
    needs = [{number_of[j] for i in group for j in before[i]} - {p} for p, group in enumerate(groups)]
    forward = [p for p, group in enumerate(groups) if graph.ops[group[0]].phase is Phase.FORWARD]
    for a, b in itertools.pairwise(forward):
        needs[b].add(a)
    followers: list[list[int]] = [[] for _ in groups]
    for p, found in enumerate(needs):
        for q in found:
            followers[q].append(p)
    waiting = [len(found) for found in needs]
    left = _use_counts(graph, groups)
    ready = [(_net(graph, groups[p], left), p) for p, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    done: list[list[int]] = []
    while ready:
        key, p = heapq.heappop(ready)
        now = _net(graph, groups[p], left)
        if now != key:  # other ops have run since and changed what this one frees
            heapq.heappush(ready, (now, p))
            continue
        done.append(groups[p])
        for s in _touched(graph, groups[p]):
            left[s] -= 1
        for q in followers[p]:
            waiting[q] -= 1
            if not waiting[q]:
                heapq.heappush(ready, (_net(graph, groups[q], left), q))
    return done


def _touched(graph: StepGraph, group: list[int]) -> set[int]:
    return {s for i in group for s in (*graph.reads[i], *graph.creates[i])}


def _use_counts(graph: StepGraph, groups: list[list[int]]) -> dict[int, int]:
    counts: dict[int, int] = defaultdict(int)
    for group in groups:
        for s in _touched(graph, group):
            counts[s] += 1
    return counts


def _net(graph: StepGraph, group: list[int], left: dict[int, int]) -> int:
    """Return the bytes that running `group` adds to the resident ones; negative if it frees more."""
    fresh = {s for i in group for s in graph.creates[i]}
    added = sum(graph.storages[s].nbytes for s in fresh)
    for s in _touched(graph, group):
        if left[s] == 1 and graph.storages[s].role is Role.TEMPORARY and s not in graph.kept:
            added -= graph.storages[s].nbytes
    return added


def _peak(graph: StepGraph, order: Iterable[int]) -> int:
    """Return the most bytes that are resident while the ops run in this order."""
    storages, kept = graph.storages, graph.kept
    left = [len(uses) for uses in graph.uses]
    leaves = [storage.role is Role.TEMPORARY and s not in kept for s, storage in enumerate(storages)]
    peak = level = sum(s.nbytes for k, s in enumerate(storages) if s.role is not Role.TEMPORARY and graph.uses[k])
    for i in order:
        for s in graph.creates[i]:
            level += storages[s].nbytes
        peak = max(peak, level)
        for s in (*graph.reads[i], *graph.creates[i]):
            left[s] -= 1
            if not left[s] and leaves[s]:
                level -= storages[s].nbytes
    return peak
