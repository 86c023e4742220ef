"""Chains of a graph as groups of stages with alternatives: the cost of each kind of chain by number of tiles.

Costs are estimates (`tile_costs`); bytes follow from which storages exist as tiles, are filled by tiles, or exist while
a chain runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from port_planner.ir.graph import StepGraph
from port_planner.problem.coarsen import Coarse
from port_planner.problem.problem import Alternative, StageChange, StageGroup, TileSaving
from port_planner.tiling.chains import Chain
from port_planner.tiling.rewriting import RewrittenGraph
from port_planner.tiling.tile_costs import tile_costs
from port_planner.tiling.tiles import linked_chains
from port_planner.tiling.tilings import Tiling, kinds

COUNTS = (2, 4, 8, 16)
"""Numbers of tiles offered for a chain, besides whole."""


@dataclass(frozen=True, slots=True)
class ChainGroups:
    """Groups of stages, one per kind of chain, and the meaning of their alternatives."""

    groups: tuple[StageGroup, ...]
    ops: tuple[frozenset[int], ...]
    """Ops of all chains of each group."""
    counts: tuple[tuple[int, ...], ...]
    """Number of tiles of each group and alternative."""

    def chosen(self, cut: Tiling, variants: Mapping[int, int]) -> Tiling:
        """Return the tiling in which each kind of chain uses its group's chosen alternative; the first means whole."""
        for group, (ops, counts) in enumerate(zip(self.ops, self.counts, strict=True)):
            cut = cut.changed(ops, counts[variants.get(group, 0)])
        return cut


def chain_groups(coarse: Coarse, cut: Tiling) -> ChainGroups:
    """Return a group for each kind of chain of a cut; `coarse` is the graph's with every chain
    whole, in the recorded order.
    """
    graph = coarse.graph
    tiled = {count: cut.changed_all(count).applied(graph) for count in COUNTS}
    found = list[tuple[StageGroup, frozenset[int], tuple[int, ...]]]()
    for ops in _tied(graph, cut, kinds(graph, tiled[COUNTS[0]])):
        chains = [chain for chain, _ in cut.counted if not ops.isdisjoint(chain.ops)]
        alternatives, counts = [Alternative("whole")], [1]
        for count, rewritten in tiled.items():
            tiles = _tiles(rewritten, ops)
            if tiles > counts[-1]:
                alternatives.append(_TileGroups(coarse, rewritten, ops, tiles).alternative(chains))
                counts.append(count)
        found.append((StageGroup(f"{len(chains)} chains", tuple(alternatives)), ops, tuple(counts)))
    return ChainGroups(tuple(g for g, _, _ in found), tuple(o for _, o, _ in found), tuple(c for _, _, c in found))


def _tied(graph: StepGraph, cut: Tiling, alike: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return kinds of chains, merged if they need the same number of tiles because they touch the same storage in
    tiles.
    """
    chains = [chain for chain, _ in cut.counted]
    found = list(alike)
    for group in linked_chains(graph, chains):
        ops = {i for n in group for i in chains[n].ops}
        touched = [kind for kind in found if not kind.isdisjoint(ops)]
        if len(touched) > 1:
            merged = frozenset[int]().union(*touched)
            found = [merged if kind is touched[0] else kind for kind in found if kind not in touched[1:]]
    return found


def _tiles(rewritten: RewrittenGraph, ops: frozenset[int]) -> int:
    """Return the number of tiles of the chains of a kind; 1 if one of them is whole."""
    replaced = {i for r in rewritten.replacements for i in r.old}
    counts = [
        tile.count
        for r in rewritten.replacements
        if not ops.isdisjoint(r.old)
        for i in r.new
        if (tile := rewritten.graph.ops[i].tile) is not None
    ]
    return min(counts, default=1) if ops <= replaced else 1


class _TileGroups:
    """The cost of the chains of one kind for a number of tiles."""

    def __init__(self, coarse: Coarse, rewritten: RewrittenGraph, ops: frozenset[int], count: int) -> None:
        self.coarse, self.graph, self.rewritten, self.ops, self.count = coarse, coarse.graph, rewritten, ops, count
        self.stage_of = [t for t, (first, last) in enumerate(coarse.ranges) for _ in range(first, last + 1)]
        self.tensor_of = {s: k for k, s in enumerate(coarse.storages)}
        self.costs = tile_costs(coarse.graph, coarse.costs.ops, rewritten)

    def alternative(self, chains: Sequence[Chain]) -> Alternative:
        """Return these chains in tiles."""
        changes: dict[int, StageChange] = {}
        savings: dict[tuple[int, tuple[int, ...]], TileSaving] = {}
        for change in (*self._costs(), *(one for chain in chains for one in self._loads(chain))):
            known = changes.get(change.stage, StageChange(change.stage))
            changes[change.stage] = StageChange(
                change.stage,
                known.seconds + change.seconds,
                known.joules + change.joules,
                known.workspace_bytes + change.workspace_bytes,
                known.fixed_bytes + change.fixed_bytes,
            )
        for chain in chains:
            savings |= {(one.tensor, one.stages): one for one in self._savings(chain)}
        return Alternative(f"{self.count} tiles", tuple(changes.values()), tuple(savings.values()))

    def _costs(self) -> Iterator[StageChange]:
        """Yield the extra cost of each replacement's tiles over its operators, at the stage of the first."""
        watts = self.coarse.costs.device.static_watts
        for r in self.rewritten.replacements:
            if not self.ops.isdisjoint(r.old):
                old, new = (self.coarse.costs.ops[i] for i in r.old), (self.costs[i] for i in r.new)
                seconds, joules = 0.0, 0.0
                for sign, costs in ((-1.0, old), (1.0, new)):
                    for cost in costs:
                        seconds += sign * cost.seconds
                        joules += sign * cost.joules
                seconds = max(seconds, 0.0)
                yield StageChange(self.stage_of[r.old[0]], seconds, joules + watts * seconds)

    def _loads(self, chain: Chain) -> Iterator[StageChange]:
        """Yield the extra memory while the chain runs, and the savings of its kernels."""
        graph = self.graph
        stages = sorted({self.stage_of[i] for i in chain.ops})
        for s in {s for i in chain.cut for s in (*graph.reads[i], *graph.creates[i])}:
            if s not in self.tensor_of or graph.storages[s].persistent or not self.rewritten.graph.uses[s]:
                continue
            uses = sorted({self.stage_of[u] for u in graph.uses[s]})
            nbytes = graph.storages[s].nbytes
            if uses[0] in stages:  # filled by tiles, with one tile besides it
                yield StageChange(uses[0], fixed_bytes=nbytes // self.count)
                yield from (StageChange(t, fixed_bytes=nbytes) for t in stages if t < uses[0])
        for t in stages:
            first, last = self.coarse.ranges[t]
            if all(i in chain.cut for i in range(first, last + 1)):
                workspace = self.coarse.problem.stages[t].workspace_bytes
                yield StageChange(t, workspace_bytes=workspace // self.count - workspace)

    def _savings(self, chain: Chain) -> Iterator[TileSaving]:
        """Yield the live part of storages that exist only as tiles."""
        graph, problem = self.graph, self.coarse.problem
        for s in {s for i in chain.cut for s in (*graph.reads[i], *graph.creates[i])}:
            i = self.tensor_of.get(s)
            if i is None or graph.storages[s].persistent or self.rewritten.graph.uses[s]:
                continue
            inside = {self.stage_of[u] for u in graph.uses[s] if u in chain.cut or u in chain.drawn}
            stages = tuple(t for t in problem.tensors[i].accesses if t in inside)
            gaps = tuple(
                g
                for g in problem.gaps_of[i]
                if not problem.gaps[g].dead and (problem.gaps[g].after in inside) != (problem.gaps[g].before in inside)
            )
            if stages:
                yield TileSaving(i, problem.tensors[i].nbytes * (self.count - 1) // self.count, stages, gaps)
