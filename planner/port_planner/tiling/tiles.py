"""Rewrites chains into tiles: the result is an ordinary graph, whose tiles a plan keeps, pages and recomputes.

Tensors that only tiled operators touch exist as tiles in separate storages. Tensors that others need whole are
assembled by copies. Random masks are drawn whole, in the recorded order, as bytes. For a loss, the labels'
log-probabilities are gathered.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from port_planner.ir.graph import ITEM_BYTES, NamedArgument, Op, Ref, StepGraph, Tile, Value, operands, with_operands
from port_planner.operators import base_name
from port_planner.tiling.algebra import leading
from port_planner.tiling.chains import Chain, min_rows, units_of
from port_planner.tiling.rewriting import GraphBuilder, Replacement, RewrittenGraph, row_major
from port_planner.tiling.sums import sums_of

Bounds: TypeAlias = tuple[tuple[int, int], ...]

SPLIT_BYTES = 1 << 20
"""Bytes below which tensors are assembled, because as tiles they would only lengthen the plan."""


def even_bounds(units: int, count: int, multiple: int) -> Bounds:
    """Return bounds of at most `count` tiles: multiples of `multiple`, as even as possible, none shorter."""
    steps = units // multiple
    count = max(1, min(count, steps))
    edges = [steps * k // count * multiple for k in range(count)] + [units]
    return tuple(itertools.pairwise(edges))


def tile_chains(graph: StepGraph, chains: Sequence[Chain], count: int) -> RewrittenGraph:
    """Return the graph with these chains in at most `count` tiles each; chains that share
    tiles have the same number.
    """
    return tile_each(graph, [(chain, count) for chain in chains])


def tile_each(graph: StepGraph, counted: Sequence[tuple[Chain, int]]) -> RewrittenGraph:
    """Return the graph with each chain in at most that many tiles; for chains that share tiles
    the lowest number counts.
    """
    chains = [chain for chain, _ in counted]
    tile_bounds: dict[int, TileBounds] = {}
    for group in linked_chains(graph, chains):
        units = units_of(graph, [chains[n] for n in group])
        count = min(counted[n][1] for n in group)
        bounds = even_bounds(units, count, max(min_rows(graph, chains[n], units) for n in group))
        tile_bounds.update(dict.fromkeys(group, TileBounds(units, bounds)))
    chosen = [n for n in range(len(chains)) if len(tile_bounds[n].bounds) > 1]
    return _TileRewriter(graph, [chains[n] for n in chosen], [tile_bounds[n] for n in chosen]).run()


def linked_chains(graph: StepGraph, chains: Sequence[Chain]) -> list[set[int]]:
    """Return groups of chain numbers: chains in one group touch the same large storage tile by tile."""
    groups: list[set[int]] = [{n} for n in range(len(chains))]
    for s, storage in enumerate(graph.storages):
        if storage.nbytes < SPLIT_BYTES or storage.persistent:
            continue
        uses = set(graph.uses[s])
        joined = {n for n, c in enumerate(chains) if uses & {*c.cut, *c.drawn, c.loss}}
        if len(joined) > 1 and any(s in graph.creates[i] for n in joined for i in chains[n].cut):
            merged = set().union(*(g for g in groups if g & joined))
            groups = [g for g in groups if not g & joined] + [merged]
    return groups


@dataclass(frozen=True, slots=True)
class TileBounds:
    """Bounds of tiles, in units of which every cut dimension has the same number."""

    units: int
    bounds: Bounds


class _TileRewriter:
    """Rewrites the chains of one graph, each at the bounds of its grid."""

    def __init__(self, graph: StepGraph, chains: Sequence[Chain], tile_bounds: Sequence[TileBounds]) -> None:
        self.graph, self.chains, self.tile_bounds = graph, chains, tile_bounds
        self.units = 1
        self.bounds: Bounds = ()
        self.builder = GraphBuilder(graph)
        self.split = self._find_split()
        self.parts: dict[tuple[int, int], int] = {}
        """(storage, tile) -> the storage of that tile."""
        self.masks: dict[int, Value] = {}
        """Storage of a random mask -> the same mask in bytes, whole."""
        self.summing: set[int] = set()
        """Ops of the draft that belong to a sum over tiles."""
        self.new_ops: list[list[int]] = [[] for _ in chains]
        self.earlier = 1 + max((op.tile.chain for op in graph.ops if op.tile is not None), default=-1)
        """The first chain number that the graph does not use yet."""

    def _find_split(self) -> set[int]:
        """Return the storages that never need to exist whole: only tiled ops touch them."""
        graph = self.graph
        cut_at = {i for c in self.chains for i in (*c.cut, *c.drawn)}
        losses = {c.loss for c in self.chains if c.loss is not None}
        found = set()
        for i in sorted(cut_at):
            for s in graph.creates[i]:
                own = {k for c in self.chains if i in c.cut for k in c.ops}
                takers = set(graph.uses[s])
                inside = (
                    takers <= own or graph.storages[s].nbytes >= SPLIT_BYTES
                )  # tiles of other chains share the grid
                if (
                    s not in graph.kept
                    and inside
                    and takers <= cut_at | losses
                    and self._tiled_everywhere(s, takers - losses)
                ):
                    found.add(s)
        return found

    def _tiled_everywhere(self, s: int, takers: Iterable[int]) -> bool:
        dims = {i: d for c in self.chains for i, d in c.cut.items()}
        values = self.graph.values
        return all(
            i not in dims or (v in dims[i] and leading(self.graph, v) is not None)
            for i in takers
            for v in (*operands(self.graph.ops[i]), *(o for o in self.graph.ops[i].outputs if o is not None))
            if values[v].storage == s
        )

    def run(self) -> RewrittenGraph:
        first = {c.ops[0]: n for n, c in enumerate(self.chains)}
        inside = {i for c in self.chains for i in c.ops}
        for i, op in enumerate(self.graph.ops):
            if i in first:
                self._chain(first[i])
            elif i not in inside:
                self.builder.add(op)
        return RewrittenGraph(self.builder.graph(), self._replacements())

    def _replacements(self) -> tuple[Replacement, ...]:
        """Return one replacement for each set of chains that share tiles."""
        groups: list[set[int]] = [{n} for n in range(len(self.chains))]
        for s in self.split:
            joined = {n for n, c in enumerate(self.chains) if set(c.ops) & set(self.graph.uses[s])}
            merged = set().union(*(g for g in groups if g & joined))
            groups = [g for g in groups if not g & joined] + [merged]
        found = []
        for group in sorted(groups, key=min):
            old = sorted(i for n in group for i in self.chains[n].ops)
            new = sorted(i for n in group for i in self.new_ops[n])
            names = [base_name(self.graph.ops[i].name) for i in old]
            tiles = len(self.tile_bounds[min(group)].bounds)
            what = f"{names[0]} to {names[-1]} ({len(names)} operators) in {tiles} tiles"
            sums = {s for n in group for s in self._sums(self.chains[n])}
            found.append(Replacement(tuple(old), tuple(new), what, tuple(sorted(sums))))
        return tuple(found)

    def _sums(self, chain: Chain) -> set[int]:
        """Return the storages that a chain sums tile by tile."""
        ops, values = self.graph.ops, self.graph.values
        return {values[v].storage for i, dims in chain.cut.items() for v in sums_of(ops[i], dims)}

    # -- one chain

    def _chain(self, n: int) -> None:
        chain, graph, begin = self.chains[n], self.graph, len(self.builder.ops)
        self.units, self.bounds = self.tile_bounds[n].units, self.tile_bounds[n].bounds
        for i in chain.before:
            self.builder.add(graph.ops[i])
        for i in chain.drawn:
            self._draw(graph.ops[i])
        sums = self._sums(chain)
        for i in chain.cut:
            for v in (v for v in graph.ops[i].outputs if v is not None):
                s = graph.values[v].storage
                if s in graph.creates[i] and s not in self.split | sums:
                    self._reserve(s, graph.values[v].dtype, graph.ops[i])
        chosen = self._chosen(chain)
        what = self._what(chain)
        for tile in range(len(self.bounds)):
            first = len(self.builder.ops)
            for i in sorted({*chain.cut, *chain.drawn}):
                self._add_tile(graph.ops[i], chain.cut.get(i), i, tile)
            if chosen is not None and chain.loss is not None:
                self._gather(graph.ops[chain.loss], chosen, tile)
            self.builder.mark(first, Tile(self.earlier + n, what, tile, len(self.bounds)), self.summing)
        if chosen is not None and chain.loss is not None:
            self._loss(graph.ops[chain.loss], chosen)
        self.new_ops[n] = list(range(begin, len(self.builder.ops)))

    def _what(self, chain: Chain) -> str:
        """Describe a chain: its first and last operator, and the cut dimension of its largest tensor."""
        names = [base_name(self.graph.ops[i].name) for i in chain.ops]
        run = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} operators)"
        values = self.graph.values
        v, d = max(
            ((v, d) for dims in chain.cut.values() for v, d in dims.items()),
            key=lambda cut: _count(values[cut[0]].shape),
        )
        return f"{run} along dimension {d} of {list(values[v].shape)}"

    def _reserve(self, s: int, dtype: str, like: Op) -> None:
        """Create a storage whole, to be filled by tiles."""
        count = self.graph.storages[s].nbytes // ITEM_BYTES[dtype]
        self.builder.reserve(Value(s, dtype, (count,), (1,), 0), like.phase)

    def _draw(self, op: Op) -> None:
        """Draw a mask whole, as bytes: the same numbers from the same stream."""
        (out,) = (self.graph.values[v] for v in op.outputs if v is not None)
        s = self.builder.storage(_count(out.shape))
        mask = Value(s, "bool", out.shape, row_major(out.shape), 0)
        self.masks[out.storage] = mask
        self.builder.reserve(mask, op.phase)
        v = self.builder.value(mask)
        self.builder.add(Op(op.name, (Ref(v), *op.args[1:]), op.kwargs, (v,), (s,), op.phase, random=True))

    def _add_tile(self, op: Op, dims: dict[int, int] | None, i: int, tile: int) -> None:
        """Add one tile of an op; results that must be whole are copied to their place."""
        graph = self.graph
        if dims is None:  # a mask that was drawn: its tile, as numbers
            self._unpack_mask(op, tile)
            return
        if base_name(op.name) == "empty_like" and any(graph.values[v].storage in self.masks for v in dims):
            return  # the memory of a mask, which comes with its tile
        sums = {graph.values[v].storage for v in sums_of(op, dims)}
        cut = [s for s in graph.creates[i] if s not in self.split and s not in sums]
        loose = {s: self.builder.storage(self._tile_bytes(s, tile)) for s in cut}
        inputs = {v: self.builder.value(self._cut(graph.values[v], d, tile)) for v, d in dims.items()}
        results: list[int | None] = []
        copies: list[tuple[int, int, int]] = []
        parts: list[tuple[int, int]] = []
        for v in op.outputs:
            if v is None:
                results.append(None)
                continue
            s = graph.values[v].storage
            if s in sums:
                parts.append((v, self._tile_of_sum(v, tile)))
                results.append(parts[-1][1])
            elif s in loose:
                made = self.builder.value(self._cut(graph.values[v], dims[v], tile, loose[s]))
                copies.append((inputs[v], made, s))
                results.append(made)
            else:
                results.append(inputs[v])
        writes = tuple(self._tile(s, tile) if s in self.split else s for s in op.writes)
        called = self.builder.add(
            replace(with_operands(op, lambda v: inputs.get(v, v)), outputs=tuple(results), writes=writes)
        )
        for place, made, s in copies:
            self.builder.add(Op("aten::copy_", (Ref(place), Ref(made)), (), (place,), (s,), op.phase))
        if parts:
            self.summing.add(called)
        for total, part in parts if tile else ():
            whole = graph.values[total].storage
            added = Op("aten::add_.Tensor", (Ref(total), Ref(part)), (), (total,), (whole,), op.phase)
            self.summing.add(self.builder.add(added))

    def _tile_of_sum(self, v: int, tile: int) -> int:
        """Return the value of a tile's sum: the first becomes the whole, the others are added to it."""
        value = self.graph.values[v]
        return (
            self.builder.value(replace(value, storage=self.builder.storage(self.graph.storages[value.storage].nbytes)))
            if tile
            else v
        )

    def _unpack_mask(self, op: Op, tile: int) -> None:
        (v,) = (v for v in op.outputs if v is not None)
        value = self.graph.values[v]
        mask = self.masks[value.storage]
        d = next(k for k, n in enumerate(value.shape) if n > 1)
        taken = self.builder.value(self._cut(mask, d, tile))
        kwargs = (("dtype", NamedArgument("dtype", value.dtype)),)
        whole = value.storage not in self.split
        s = self.builder.storage(self._tile_bytes(value.storage, tile)) if whole else None
        made = self.builder.value(self._cut(value, d, tile, s))
        self.builder.add(Op("aten::_to_copy", (Ref(taken),), kwargs, (made,), (), op.phase))
        if whole:
            place = self.builder.value(self._cut(value, d, tile))
            self.builder.add(Op("aten::copy_", (Ref(place), Ref(made)), (), (place,), (value.storage,), op.phase))

    def _tile(self, s: int, tile: int) -> int:
        if (s, tile) not in self.parts:
            self.parts[s, tile] = self.builder.storage(self._tile_bytes(s, tile))
        return self.parts[s, tile]

    def _tile_bytes(self, s: int, tile: int) -> int:
        begin, end = self.bounds[tile]
        return self.graph.storages[s].nbytes * (end - begin) // self.units

    def _cut(self, value: Value, d: int, tile: int, s: int | None = None) -> Value:
        """Return the tile of a value along dimension `d`: a view of the whole, or all of its own storage.

        Results inherit the operands' strides, even for dimensions of one element, so these
        strides are those of the tile.
        """
        begin, end = self.bounds[tile]
        per_unit = value.shape[d] // self.units
        shape = (*value.shape[:d], (end - begin) * per_unit, *value.shape[d + 1 :])
        around, within = value.stride[d] * value.shape[d], value.stride[d] * shape[d]
        stride = tuple(within if n == 1 and k == around else k for n, k in zip(value.shape, value.stride, strict=True))
        if s is None and value.storage not in self.split:
            return replace(value, shape=shape, stride=stride, offset=value.offset + begin * per_unit * value.stride[d])
        return replace(value, storage=self._tile(value.storage, tile) if s is None else s, shape=shape, stride=stride)

    # -- a loss

    def _chosen(self, chain: Chain) -> Value | None:
        """Reserve memory for the log-probability of each row's label."""
        if chain.loss is None or not isinstance(rows := self.graph.ops[chain.loss].args[0], Ref):
            return None
        log_probs = self.graph.values[rows.value]
        n = log_probs.shape[0]
        s = self.builder.storage(n * ITEM_BYTES[log_probs.dtype])
        chosen = Value(s, log_probs.dtype, (n, 1), (1, 1), 0)
        self.builder.reserve(chosen, self.graph.ops[chain.loss].phase)
        return chosen

    def _gather(self, op: Op, chosen: Value, tile: int) -> None:
        """Gather each row's label log-probability from a tile; for a row without a label, gather any."""
        rows, labels = (self.graph.values[a.value] for a in op.args[:2] if isinstance(a, Ref))
        labels = self._cut(labels, 0, tile)
        n = labels.shape[0]
        s = self.builder.storage(n * ITEM_BYTES[labels.dtype])
        known = self.builder.value(Value(s, labels.dtype, (n,), (1,), 0))
        self.builder.add(Op("aten::clamp_min", (Ref(self.builder.value(labels)), 0), (), (known,), (), op.phase))
        column = self.builder.value(Value(s, labels.dtype, (n, 1), (1, 1), 0))
        taken = self.builder.value(
            Value(self.builder.storage(n * ITEM_BYTES[chosen.dtype]), chosen.dtype, (n, 1), (1, 1), 0)
        )
        source = self.builder.value(self._cut(rows, 0, tile))
        self.builder.add(Op("aten::gather", (Ref(source), 1, Ref(column)), (), (taken,), (), op.phase))
        place = self.builder.value(self._cut(chosen, 0, tile))
        self.builder.add(Op("aten::copy_", (Ref(place), Ref(taken)), (), (place,), (chosen.storage,), op.phase))

    def _loss(self, op: Op, chosen: Value) -> None:
        """Add the loss of the chosen log-probabilities. Every label is class 0 of one class, except ignored ones."""
        (labels,) = (self.graph.values[a.value] for a in op.args[1:2] if isinstance(a, Ref))
        s = self.builder.storage(labels.shape[0] * ITEM_BYTES[labels.dtype])
        first = self.builder.value(Value(s, labels.dtype, labels.shape, (1,), 0))
        source = op.args[1]
        self.builder.add(Op("aten::clamp_max", (source, 0), (), (first,), (), op.phase))
        self.builder.add(replace(op, args=(Ref(self.builder.value(chosen)), Ref(first), *op.args[2:])))


def _count(shape: Iterable[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
