"""Which chains of a graph run in tiles, and in how many: initial tilings and possible changes.

Equal chains (the same operators, shapes and layouts, as in the layers of a transformer) are one kind, and one choice.
"""

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from port_planner.ir.graph import StepGraph
from port_planner.tiling.chains import Chain, find_chains, split_at, split_chains, touched_bytes
from port_planner.tiling.rewriting import RewrittenGraph, form_of
from port_planner.tiling.tiles import tile_each

OF_THE_BUDGET = ((1 / 3, 4), (1 / 6, 8), (1 / 12, 16))
"""Shares of a step's budget: operators that touch more are cut into that many tiles, because
little else fits beside them.
"""

OF_THE_FATTEST = ((1 / 6, 2), (1 / 6, 4))
"""The same shares relative to the largest operator, for budgets above the least memory, where tiles save paging."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Chains of a graph, each with its number of tiles."""

    counted: tuple[tuple[Chain, int], ...]

    def applied(self, graph: StepGraph) -> RewrittenGraph:
        """Return the graph with these chains in tiles."""
        return tile_each(graph, self.counted)

    def count(self, ops: Iterable[int]) -> int:
        """Return the number of tiles of the chains that contain any of `ops`; 1 means whole."""
        those = set(ops)
        return max((n for chain, n in self.counted if not those.isdisjoint(chain.ops)), default=1)

    def changed(self, ops: Iterable[int], count: int) -> "Tiling":
        """Return a tiling with the chains that contain any of `ops` in that many tiles; 1 means whole."""
        those = set(ops)
        return Tiling(tuple((c, n if those.isdisjoint(c.ops) else count) for c, n in self.counted))

    def split(self, graph: StepGraph, op: int) -> "Tiling":
        """Return a tiling with `op` whole, and the parts of its chain before and after it
        in as many tiles as before.
        """
        parts = [(part, n) for chain, n in self.counted for part in split_at(graph, chain, op)]
        return Tiling(tuple(parts))

    def changed_all(self, count: int) -> "Tiling":
        """Return a tiling with all chains in that many tiles."""
        return Tiling(tuple((chain, count) for chain, _ in self.counted))


def other_counts(count: int) -> tuple[int, ...]:
    """Return other numbers of tiles to try: whole, half, double."""
    return (2,) if count == 1 else tuple(dict.fromkeys((1, count // 2, 2 * count)))


def first_tilings(graph: StepGraph, free_bytes: int) -> list[tuple[int, int]]:
    """Return the initial tilings for a step with `free_bytes`: the size from which an op is
    cut, and the number of tiles.
    """
    fattest = max((touched_bytes(graph, i) for i in range(len(graph.ops))), default=0)
    found = [(int(share * free_bytes), n) for share, n in OF_THE_BUDGET]
    found += [(int(share * fattest), n) for share, n in OF_THE_FATTEST]
    return [(fat_bytes, n) for fat_bytes, n in dict.fromkeys(found) if fat_bytes < fattest]


def tile_fat(
    graph: StepGraph, fat_bytes: int, count: int, apart: Set[str] = frozenset(), *, sums: bool = False
) -> Tiling:
    """Return the tiling of every chain whose operators touch more than `fat_bytes`, each as short as possible.

    `apart`: keys of weights whose readers are in no chain. `sums`: whether results may be summed in another order.
    """
    chains = split_chains(graph, find_chains(graph, fat_bytes, apart, sums=sums), fat_bytes)
    return Tiling(tuple((chain, count) for chain in chains))


def kinds(graph: StepGraph, rewritten: RewrittenGraph) -> list[frozenset[int]]:
    """Return the ops of all tiled chains of each kind, the kind that touches most bytes first."""
    found: dict[Any, set[int]] = defaultdict(set)
    for replacement in rewritten.replacements:
        found[form_of(graph, rewritten, replacement)].update(replacement.old)
    return sorted(map(frozenset, found.values()), key=lambda ops: -sum(touched_bytes(graph, i) for i in ops))
