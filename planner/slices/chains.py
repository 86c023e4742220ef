"""Runs of operators along one dimension, found in a graph: what lies inside them never has to exist whole."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir.graph import Op, Phase, Ref, StepGraph, operands
from planner.slices.algebra import DRAW, LOSS, RULES, Carry, base_name, cut_dimensions

THIN_BYTES = 1 << 20
"""An operator that touches less runs whole between those of a chain, where it can run before them."""

MOST_THIN = 16
"""Operators between two fat ones: a longer way would have weights read once for each piece without need."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive ops that run piece by piece.

    `cut`: op -> dimension of each value that is cut. `before`: ops among them that run whole, first. `drawn`: random
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


def find_chains(graph: StepGraph, fat_bytes: int) -> list[Chain]:
    """Return the chains whose operators touch more than `fat_bytes` whole, in order."""
    chains: list[Chain] = []
    i = 0
    while i < len(graph.ops):
        chain = _longest(graph, i, fat_bytes)
        if chain is None:
            i += 1
        else:
            chains.append(chain)
            i = chain.ops[-1] + 1
    return chains


def units_of(graph: StepGraph, chains: Iterable[Chain]) -> int:
    """Return into how many equal parts every dimension that is cut can be taken."""
    return math.gcd(*(graph.values[v].shape[d] for c in chains for dims in c.cut.values() for v, d in dims.items()))


def _longest(graph: StepGraph, start: int, fat_bytes: int) -> Chain | None:
    """Return the longest chain that begins with op `start`, down to its last fat operator."""
    if touched_bytes(graph, start) <= fat_bytes:
        return None
    walk = _Walk(graph, fat_bytes, start)
    for i in range(start, len(graph.ops)):
        if graph.ops[i].phase is not graph.ops[start].phase or graph.ops[i].phase is Phase.UPDATE or not walk.take(i):
            break
        if walk.loss is not None:
            break
    return walk.chain()


class _Walk:
    """Goes along the ops of one chain; knows what is a piece by now and what was changed."""

    def __init__(self, graph: StepGraph, fat_bytes: int, first: int) -> None:
        self.graph, self.fat_bytes, self.first = graph, fat_bytes, first
        self.thin_bytes = min(THIN_BYTES, fat_bytes // 4)
        self.taken: list[int] = []
        self.cut: dict[int, dict[int, int]] = {}
        self.before: list[int] = []
        self.drawn: list[int] = []
        self.loss: int | None = None
        self.pieces: set[int] = set()
        """Storages made or changed piece by piece."""
        self.whole: set[int] = set()
        """Storages of which a piece's op reads all."""
        self.reached = 0

    def take(self, i: int) -> bool:
        """Take op `i` into the chain; False where it cannot be."""
        op = self.graph.ops[i]
        if i - max(self.reached, self.first) > MOST_THIN:
            return False
        if op.name == LOSS and self._is_loss(op):
            self.loss = i
        elif op.name == DRAW and self._draws_a_piece(op):
            self.drawn.append(i)
        elif self._can_run_before(i, op):
            self.before.append(i)
            return True
        elif (dims := cut_dimensions(self.graph, op)) is not None and self._joins(i, op, dims):
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
        self.pieces |= {*self.graph.creates[i], *op.writes}
        self.whole |= {values[v].storage for v in operands(op) if v not in dims}

    def _joins(self, i: int, op: Op, dims: dict[int, int]) -> bool:
        """Say whether what the op cuts fits what the chain has: pieces are cut, and nothing is changed that is read whole."""
        values = self.graph.values
        touched = {*operands(op), *(v for v in op.outputs if v is not None)}
        changed = {*self.graph.creates[i], *op.writes}
        cut = {values[v].storage for v in dims}
        wholes = {values[v].storage for v in touched if v not in dims}
        big = {s for s in changed if self.graph.storages[s].nbytes > 0}
        return big <= cut and not wholes & self.pieces and not changed & self.whole and not cut & wholes

    def _draws_a_piece(self, op: Op) -> bool:
        return set(op.writes) <= self.pieces and len(op.outputs) == 1

    def _is_loss(self, op: Op) -> bool:
        log_probs, target, weight, _, ignored = op.args
        if not isinstance(log_probs, Ref) or not isinstance(target, Ref) or weight is not None:
            return False
        shape = self.graph.values[log_probs.value].shape
        return (
            len(shape) == 2 and isinstance(ignored, int) and ignored < 0
            and self.graph.values[log_probs.value].storage in self.pieces
        )  # fmt: skip

    def _can_run_before(self, i: int, op: Op) -> bool:
        """Say whether an op depends on nothing of the chain and may run ahead of it."""
        reads = set(self.graph.reads[i])
        if op.random or touched_bytes(self.graph, i) > self.thin_bytes or reads & self.pieces:
            return False
        used = {s for k in self.taken for s in self.graph.reads[k]}
        return not set(op.writes) & used

    def chain(self) -> Chain | None:
        """Return what was taken up to the last fat op; None where that is no more than one op that costs no chain."""
        ops = [i for i in sorted({*self.taken, *self.before}) if i <= self.reached]
        cut = {i: dims for i, dims in self.cut.items() if i <= self.reached}
        drawn = tuple(i for i in self.drawn if i <= self.reached)
        loss = self.loss if self.loss is not None and self.loss <= self.reached else None
        if not cut or (loss is None and len(cut) == 1):
            return None
        return Chain(tuple(ops), cut, tuple(i for i in self.before if i <= self.reached), drawn, loss)


def least_rows(graph: StepGraph, chain: Chain, units: int) -> int:
    """Return the least number of units that a piece of the chain may have, so that every operator keeps its bits."""
    least = 1
    for i, dims in chain.cut.items():
        rule = RULES[base_name(graph.ops[i])]
        for v, d in dims.items():
            shape = graph.values[v].shape
            rows = (math.prod(shape[:-1]) if rule.carry is Carry.ROWS else shape[d]) // units
            per_unit = math.prod(graph.values[v].shape) // units
            least = max(least, -(-rule.least // max(rows, 1)))
            if per_unit % rule.multiple:
                least = max(least, math.lcm(per_unit, rule.multiple) // max(per_unit, 1))
    return least
