"""Sequences of operators along one dimension of a graph, within which tensors never need to exist whole."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from port_planner.ir.graph import Op, Phase, Ref, StepGraph, operands
from port_planner.tiling.algebra import DRAW, LOSS, leading, multiple_of, rows_of
from port_planner.tiling.sums import dimensions, rule_of, sums_of

THIN_BYTES = 1 << 20
"""Bytes below which an operator runs whole between those of a chain, if it can run before them."""

MAX_LATER = 64
"""Largest number of operators, such as updates between gradients, that a chain skips; their inputs then live longer."""

MAX_THIN = 16
"""Largest number of operators between two large ones; a longer path would needlessly read weights once per tile."""

MIN_FAT = 2
"""Least number of large operators on each side of a split; a single one has nothing inside."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops that run tile by tile, before those in between that do not belong to it.

    `cut`: op -> dimension of each value that is cut. `before`: ops among them that run first, whole. `drawn`: random
    ops, which draw whole, first, in their order. `loss`: the op, the last one, that takes chosen log-probabilities.
    """

    ops: tuple[int, ...]
    cut: dict[int, dict[int, int]]
    before: tuple[int, ...]
    drawn: tuple[int, ...]
    loss: int | None


def touched_bytes(graph: StepGraph, i: int) -> int:
    """Return how many bytes an op touches when it runs whole."""
    return sum(graph.storages[s].nbytes for s in {*graph.reads[i], *graph.creates[i]})


def find_chains(graph: StepGraph, fat_bytes: int, apart: Set[str] = frozenset(), *, sums: bool = False) -> list[Chain]:
    """Return the chains whose operators touch more than `fat_bytes` whole, in order.

    `apart`: keys of storages whose readers stay out of chains, because each tile would read them whole again. `sums`:
    include operators whose results are then summed in another order.
    """
    chains: list[Chain] = []
    alone = {i for s, storage in enumerate(graph.storages) if storage.key in apart for i in graph.uses[s]}
    i = 0
    while i < len(graph.ops):
        chain = None if i in alone else _longest(graph, i, fat_bytes, alone, sums=sums)
        if chain is None:
            i += 1
        else:
            chains.append(chain)
            i = chain.ops[-1] + 1
    return chains


def split_chains(graph: StepGraph, chains: Iterable[Chain], fat_bytes: int) -> list[Chain]:
    """Return the chains split where they are narrow: where at most `fat_bytes` of their results are used later.

    Tensors that others read whole are filled by tiles while the chain runs: in a long chain, many at once.
    """
    return [part for chain in chains for part in _tiles(graph, chain, fat_bytes)]


def split_at(graph: StepGraph, chain: Chain, op: int) -> list[Chain]:
    """Return the parts of a chain before and after `op` that are chains; the chain itself if
    it does not contain the op.

    Empty if the op lies between a mask and its random draw, which belong together.
    """
    if op not in chain.ops:
        return [chain]
    makers = {s: i for i in chain.ops for s in graph.creates[i]}
    if any(makers.get(s, drawn) <= op <= drawn for drawn in chain.drawn for s in graph.ops[drawn].writes):
        return []
    inside = sorted({*chain.cut, *chain.drawn, *(() if chain.loss is None else (chain.loss,))} - {op})
    sides = [i for i in inside if i < op], [i for i in inside if i > op]
    return [_tile(chain, side) for side in sides if len(side) > 1]


def _tiles(graph: StepGraph, chain: Chain, fat_bytes: int) -> list[Chain]:
    """Return the chain in parts, each from its first fat operator to its last."""
    before = set(chain.before)
    inside = [i for i in chain.ops if i not in before]
    fat = [i for i in chain.ops if i == chain.loss or (i in chain.cut and touched_bytes(graph, i) > fat_bytes)]
    passing = _passing_bytes(graph, inside, {s: i for i in chain.drawn for s in graph.ops[i].writes})
    edges, end = [chain.ops[0]], chain.ops[-1] + 1
    for narrow, run in itertools.groupby(range(1, len(inside)), key=lambda k: passing[k] <= fat_bytes):
        place = inside[min(run, key=passing.__getitem__)]
        sides = (edges[-1], place), (place, end)
        if narrow and all(sum(a <= i < b for i in fat) >= MIN_FAT for a, b in sides):
            edges.append(place)
    if len(edges) == 1:
        return [chain]
    return [_tile(chain, [i for i in fat if a <= i < b]) for a, b in itertools.pairwise([*edges, end])]


def _passing_bytes(graph: StepGraph, inside: Sequence[int], drawn: Mapping[int, int]) -> list[float]:
    """Return, for each of the ops `inside`, the bytes created before it and used from it on.

    Infinite between a mask's creation and its random draw (`drawn`): both belong together.
    """
    passing = [0.0] * len(inside)
    place = {i: k for k, i in enumerate(inside)}
    for k, i in enumerate(inside):
        for s in graph.creates[i]:
            last, mask = max(place[u] for u in graph.uses[s] if u in place), place.get(drawn.get(s, i), k)
            for between in range(k + 1, last + 1):
                passing[between] += math.inf if between <= mask else graph.storages[s].nbytes
    return passing


def _tile(chain: Chain, fat: Sequence[int]) -> Chain:
    first, last = fat[0], fat[-1]

    def within(ops: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for i in ops if first <= i <= last)

    cut = {i: dims for i, dims in chain.cut.items() if first <= i <= last}
    loss = chain.loss if chain.loss is not None and chain.loss <= last else None
    return Chain(within(chain.ops), cut, within(chain.before), within(chain.drawn), loss)


def units_of(graph: StepGraph, chains: Iterable[Chain]) -> int:
    """Return the number of equal parts that every cut dimension can be divided into."""
    return math.gcd(*(graph.values[v].shape[d] for c in chains for dims in c.cut.values() for v, d in dims.items()))


def _longest(graph: StepGraph, start: int, fat_bytes: int, alone: Set[int], *, sums: bool) -> Chain | None:
    """Return the longest chain that starts with op `start`, up to its last large operator."""
    if touched_bytes(graph, start) <= fat_bytes or graph.ops[start].phase is Phase.UPDATE:
        return None
    walk = _Walk(graph, fat_bytes, sums=sums)
    for i in range(start, len(graph.ops)):
        if i in alone:
            break
        if graph.ops[i].phase not in (graph.ops[start].phase, Phase.UPDATE) or not walk.take(i):
            break
        if walk.loss is not None:
            break
    return walk.chain()


class _Walk:
    """Walks along the ops of one chain; tracks which storages are tiled and which were changed."""

    def __init__(self, graph: StepGraph, fat_bytes: int, *, sums: bool) -> None:
        self.graph, self.fat_bytes, self.sums = graph, fat_bytes, sums
        self.thin_bytes = min(THIN_BYTES, fat_bytes // 4)
        self.taken: list[int] = []
        self.cut: dict[int, dict[int, int]] = {}
        self.before: list[int] = []
        self.drawn: list[int] = []
        self.loss: int | None = None
        self.tiles: set[int] = set()
        """Storages created or changed tile by tile."""
        self.whole: set[int] = set()
        """Storages that a tile's op reads whole."""
        self.summed: set[int] = set()
        """Storages that are summed tile by tile, complete only after the chain."""
        self.reached = 0
        self.thin = 0
        """Ops since the last fat one."""
        self.later = 0
        """Ops that run after the chain."""
        self.later_reads: set[int] = set()
        self.later_changes: set[int] = set()

    def take(self, i: int) -> bool:
        """Add op `i` to the chain, or skip it if the whole chain can run before it; return False if neither is
        possible.
        """
        op = self.graph.ops[i]
        changed = {*self.graph.creates[i], *op.writes}
        bound = self.later_changes & {*self.graph.reads[i], *changed} or self.later_reads & changed
        if op.phase is Phase.UPDATE or bound or not self._join(i, op):
            return self._pass_over(i, op)
        self.thin = 0 if self.reached == i else self.thin + 1
        return self.thin <= MAX_THIN

    def _pass_over(self, i: int, op: Op) -> bool:
        if not self.taken or op.random or self.later == MAX_LATER:
            return False
        self.later += 1
        self.later_reads.update(self.graph.reads[i])
        self.later_changes.update(self.graph.creates[i], op.writes)
        return True

    def _join(self, i: int, op: Op) -> bool:
        if op.name == LOSS and self._is_loss(op):
            self.loss = i
        elif op.name == DRAW and self._draws_a_tile(op):
            self.drawn.append(i)
        elif self._can_run_before(i, op):
            self.before.append(i)
            return True
        elif (dims := dimensions(self.graph, op, sums=self.sums)) is not None and self._joins(i, op, dims):
            self.cut[i] = dims
            self._note(i, op, dims)
        else:
            return False
        self.taken.append(i)
        if touched_bytes(self.graph, i) > self.fat_bytes or self.loss == i:
            self.reached = i
        return True

    def _note(self, i: int, op: Op, dims: dict[int, int]) -> None:
        values = self.graph.values
        added = {values[v].storage for v in sums_of(op, dims)}
        self.summed |= added
        self.tiles |= {*self.graph.creates[i], *op.writes} - added
        self.whole |= {values[v].storage for v in operands(op) if v not in dims}

    def _joins(self, i: int, op: Op, dims: dict[int, int]) -> bool:
        """Return whether the op's cut matches the chain's: tiled storages are cut, and
        nothing read whole is changed.
        """
        values = self.graph.values
        touched = {*operands(op), *(v for v in op.outputs if v is not None)}
        changed = {*self.graph.creates[i], *op.writes}
        cut = {values[v].storage for v in dims}
        added = {values[v].storage for v in sums_of(op, dims)}
        wholes = {values[v].storage for v in touched if v not in dims} - added
        parts = {values[v].storage for v in dims if leading(self.graph, v) is None}
        big = {s for s in changed - added if self.graph.storages[s].nbytes > 0}
        if not added <= set(self.graph.creates[i]) or self.summed & {*self.graph.reads[i], *changed}:
            return False
        return big <= cut and not (wholes | parts) & self.tiles and not changed & self.whole and not cut & wholes

    def _draws_a_tile(self, op: Op) -> bool:
        return set(op.writes) <= self.tiles and len(op.outputs) == 1

    def _is_loss(self, op: Op) -> bool:
        log_probs, target, weight, _, ignored = op.args
        if not isinstance(log_probs, Ref) or not isinstance(target, Ref) or weight is not None:
            return False
        shape = self.graph.values[log_probs.value].shape
        return (
            len(shape) == 2
            and isinstance(ignored, int)
            and ignored < 0
            and self.graph.values[log_probs.value].storage in self.tiles
        )

    def _can_run_before(self, i: int, op: Op) -> bool:
        """Return whether an op depends on nothing of the chain and may run ahead of it."""
        reads = set(self.graph.reads[i])
        if op.random or touched_bytes(self.graph, i) > self.thin_bytes or reads & (self.tiles | self.summed):
            return False
        used = {s for k in self.taken for s in self.graph.reads[k]}
        return not set(op.writes) & used

    def chain(self) -> Chain | None:
        """Return the ops taken up to the last large op; None if that is at most one op that needs no chain."""
        ops = [i for i in sorted({*self.taken, *self.before}) if i <= self.reached]
        cut = {i: dims for i, dims in self.cut.items() if i <= self.reached}
        drawn = tuple(i for i in self.drawn if i <= self.reached)
        loss = self.loss if self.loss is not None and self.loss <= self.reached else None
        if not cut or (loss is None and len(cut) == 1):
            return None
        return Chain(tuple(ops), cut, tuple(i for i in self.before if i <= self.reached), drawn, loss)


def min_rows(graph: StepGraph, chain: Chain, units: int) -> int:
    """Return the minimum number of units in a tile of the chain such that every operator keeps its bits."""
    least = 1
    for i, dims in chain.cut.items():
        op = graph.ops[i]
        rule = rule_of(op, dims)
        multiple = multiple_of(graph, op, rule)
        for v, d in dims.items():
            rows = rows_of(rule, graph.values[v], d) // units
            per_unit = math.prod(graph.values[v].shape) // units
            least = max(least, -(-rule.least // max(rows, 1)))
            if per_unit % multiple:
                least = max(least, math.lcm(per_unit, multiple) // max(per_unit, 1))
    return least
