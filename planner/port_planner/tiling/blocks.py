"""Weights that are too large to be resident whole, read in blocks: each block is a separate
storage, which a plan pages.

An embedding, and a product with the transposed weight, use blocks of rows; a product with the weight itself uses blocks
of columns. So every number of a result is still computed by one operator, and nothing is summed in another order. A
frozen weight that is read both ways is on flash twice. For a trained weight, gradient and optimizer state exist in the
same blocks of rows. The gradient of each block, from an embedding, a product or the sum of both, is computed for its
update, so the whole never exists. If such a weight is also read by columns, each block of columns is assembled from the
blocks of rows. Embeddings and heads of language models, tied or not, are such weights.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from port_planner.ir.graph import (
    ITEM_BYTES,
    GraphError,
    Op,
    Ref,
    Role,
    StepGraph,
    Tile,
    Value,
    operands,
    storage_key,
    with_operands,
)
from port_planner.ir.lowering.update_slices import update_groups
from port_planner.ir.program import UpdateGroup
from port_planner.operators import base_name, operator_of
from port_planner.operators.row import PRODUCT_ROWS, VECTOR
from port_planner.tiling.rewriting import GraphBuilder, Replacement, RewrittenGraph, row_major
from port_planner.tiling.tiles import even_bounds

ROWS, COLUMNS = 0, 1
_LAYOUTS = ("rows", "columns")
_SEPARATOR = "#"
"""Separator between the name of a whole tensor and that of its block, which names of parameters do not have."""
_PRODUCT = "aten::mm"
_EMBEDDED = "aten::embedding_dense_backward"


@dataclass(frozen=True, slots=True)
class LargeWeight:
    """A matrix that all steps can use in blocks; `dimensions`: the dimensions along which they do.

    `states`: names of equally large optimizer states, if it is `trained`.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    dimensions: frozenset[int]
    states: tuple[str, ...] = ()
    trained: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * ITEM_BYTES[self.dtype]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the weight and of its state."""
        return storage_key(Role.PARAMETER, self.name), *(storage_key(Role.STATE, name) for name in self.states)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows or columns `begin` to `end` of a weight; `suffix`: the suffix of its storage names after those of the whole.

    `stored`: whether it is on flash; if not, it is assembled from the blocks of rows at each use.
    """

    suffix: str
    dimension: int
    begin: int
    end: int
    stored: bool = True


Blocks: TypeAlias = Mapping[int, tuple[Block, ...]]
"""Blocks by dimension."""


def large_weights(graphs: Iterable[StepGraph], least_bytes: int) -> tuple[LargeWeight, ...]:
    """Return the weights of at least that many bytes that every graph can use in blocks."""
    found: dict[str, LargeWeight] = {}
    others: set[str] = set()
    for graph in graphs:
        groups = {group.parameter: group for group in update_groups(graph)}
        for s, storage in enumerate(graph.storages):
            if storage.role is not Role.PARAMETER or storage.nbytes < least_bytes or not graph.uses[s]:
                continue
            weight = _weight(graph, s, groups.get(s))
            if weight is None:
                others.add(storage.name)
                continue
            before = found.setdefault(storage.name, weight)
            states, trained = weight.states or before.states, weight.trained or before.trained
            found[storage.name] = replace(
                weight, dimensions=weight.dimensions | before.dimensions, states=states, trained=trained
            )
    return tuple(
        replace(w, dimensions=w.dimensions | {ROWS}) if w.trained else w
        for name, w in found.items()
        if name not in others
    )


def blocks_of(weight: LargeWeight, count: int, columns: int | None = None) -> dict[int, tuple[Block, ...]]:
    """Return at most `count` blocks for each way in which a weight is read; for a trained one, at most
    `columns` blocks of columns.
    """
    row_multiple = math.lcm(PRODUCT_ROWS, VECTOR // math.gcd(VECTOR, weight.shape[1]))
    multiples = {ROWS: row_multiple, COLUMNS: PRODUCT_ROWS}
    counts = {ROWS: count, COLUMNS: columns if weight.trained and columns is not None else count}
    return {
        dimension: tuple(
            Block(
                f"{_SEPARATOR}{_LAYOUTS[dimension]}/{k}",
                dimension,
                begin,
                end,
                stored=dimension == ROWS or not weight.trained,
            )
            for k, (begin, end) in enumerate(
                even_bounds(weight.shape[dimension], counts[dimension], multiples[dimension])
            )
        )
        for dimension in sorted(weight.dimensions)
    }


def of_a_block(name: str) -> tuple[str, str]:
    """Return the whole tensor's name for a storage name, and its block direction: "rows", "columns", or ""."""
    whole, _, block = name.partition(_SEPARATOR)
    return whole, block.partition("/")[0]


def read_in_blocks(graph: StepGraph, weights: Mapping[str, Blocks]) -> RewrittenGraph:
    """Return the graph with the weights of these names in blocks; the whole ones are no longer used.

    Raises GraphError for a weight that the graph does not use this way.
    """
    made = _BlockRewriter(graph, weights)
    trained = _all_trained(graph, weights)
    elsewhere = {i for one in trained for i in one.ops}
    first = {one.group.first: one for one in trained}
    replacements = []
    for i, op in enumerate(graph.ops):
        begin = len(made.builder.ops)
        if i in first:
            what, old = made.train(first[i]), first[i].ops
        elif i in elsewhere:
            continue
        elif (s := made.weight_of(op)) is not None:
            what, old = made.read(op, s), (i,)
        else:
            made.builder.add(op)
            continue
        replacements.append(Replacement(old, tuple(range(begin, len(made.builder.ops))), what))
    return RewrittenGraph(made.builder.graph(), tuple(replacements), made.sources)


# -- which operators


@dataclass(frozen=True, slots=True)
class _TrainedWeight:
    """A weight that a graph trains: the ops that create its gradients, by result, and the update that sums them."""

    parameter: int
    makers: Mapping[int, int]
    group: UpdateGroup

    @property
    def inside(self) -> range:
        """The ops of the update."""
        return range(self.group.first, self.group.last + 1)

    @property
    def ops(self) -> tuple[int, ...]:
        return *sorted(self.makers.values()), *self.inside

    @property
    def lasting(self) -> frozenset[int]:
        """The weight and its optimizer state."""
        return frozenset(self.group.storages) - {*self.group.temporaries, *self.makers}


def _all_trained(graph: StepGraph, weights: Mapping[str, Blocks]) -> list[_TrainedWeight]:
    groups = [g for g in update_groups(graph) if graph.storages[g.parameter].name in weights]
    found = [_trained(graph, group) for group in groups]
    if None in found:
        raise GraphError("an update is not one of rows; plan the job again")
    return [trained for trained in found if trained is not None]


def _weight(graph: StepGraph, s: int, group: UpdateGroup | None) -> LargeWeight | None:
    """Return a storage as a weight that can be read in blocks, or None if some op uses or changes it otherwise."""
    trained = None if group is None else _trained(graph, group)
    inside = () if trained is None else trained.ops
    dimensions, shapes = set(), set()
    for i in graph.uses[s]:
        if i in inside:
            continue
        op = graph.ops[i]
        found = _dimension(graph, op, s) if s not in op.writes else None
        if found is None:
            return None
        dimension, value = found
        dimensions.add(dimension)
        rows, columns = value.shape if value.stride == row_major(value.shape) else value.shape[::-1]
        shapes.add((value.dtype, (rows, columns)))
    if len(shapes) != 1 or (group is not None and trained is None):
        return None
    ((dtype, shape),) = shapes
    if trained is not None and not _of_shape(graph, trained, shape):
        return None
    states = () if trained is None else tuple(graph.storages[k].name for k in sorted(trained.lasting - {s}))
    return LargeWeight(graph.storages[s].name, dtype, shape, frozenset(dimensions), states, trained is not None)


def _trained(graph: StepGraph, group: UpdateGroup) -> _TrainedWeight | None:
    """Return a parameter's update if it can use its gradients by rows."""
    streamed = set(group.storages) - set(group.temporaries)
    gradients = sorted(s for s in streamed if graph.storages[s].role is Role.TEMPORARY)
    found = _TrainedWeight(group.parameter, {s: graph.uses[s][0] for s in gradients}, group)
    states = found.lasting - {group.parameter}
    if not gradients or any(graph.storages[s].role is not Role.STATE for s in states):
        return None
    if not all(_is_by_rows(graph, s, found) for s in gradients):
        return None
    return found if all(i in found.inside for s in states for i in graph.uses[s]) else None


def _is_by_rows(graph: StepGraph, gradient: int, trained: _TrainedWeight) -> bool:
    """Return whether a gradient can be computed row by row when it is used: from unchanged inputs, and only for the
    update.
    """
    maker = trained.makers[gradient]
    op, reads = graph.ops[maker], graph.reads[maker]
    if (
        op.name not in (_EMBEDDED, _PRODUCT)  # whose rows, as a gradient of a weight, can be computed block by block
        or op.kwargs
        or gradient in graph.kept
        or not all(isinstance(a, Ref) for a in op.args[:2])
    ):
        return False
    unchanged = all(max(graph.writers[s], default=-1) < maker for s in reads)
    only_there = all(i in trained.inside or i == maker for i in graph.uses[gradient])
    return unchanged and only_there and trained.lasting.isdisjoint(reads)


def _of_shape(graph: StepGraph, trained: _TrainedWeight, shape: tuple[int, int]) -> bool:
    """Return whether gradients and update treat all operands as rows of a matrix of this shape."""
    for i in trained.ops:
        op = graph.ops[i]
        for v in (*operands(op), *(v for v in op.outputs if v is not None)):
            value = graph.values[v]
            if value.storage in trained.group.storages and (value.shape, value.stride) != (shape, row_major(shape)):
                return False
    makers = (graph.ops[i] for i in trained.makers.values())
    return all(op.name != _EMBEDDED or op.args[2] == shape[0] for op in makers)


def _dimension(graph: StepGraph, op: Op, s: int) -> tuple[int, Value] | None:
    """Return the dimension along which an op can use weight `s` in blocks, and the value that it uses."""
    name, place = base_name(op.name), operator_of(op.name).weight
    taken = [v for v in operands(op) if graph.values[v].storage == s]
    if place is None or place >= len(op.args) or len(taken) != 1 or op.args[place] != Ref(taken[0]):
        return None
    value = graph.values[taken[0]]
    out = graph.values[op.outputs[0]] if op.outputs[0] is not None else None
    whole = len(value.shape) == len(_LAYOUTS) and value.offset == 0 and _nbytes(value) == graph.storages[s].nbytes
    if not whole or out is None or out.stride != row_major(out.shape) or out.offset:
        return None
    straight = value.stride == row_major(value.shape)
    if name == "embedding":
        return (ROWS, value) if straight else None
    if not straight and value.stride != (1, value.shape[0]):
        return None
    if name == "addmm" and not (
        isinstance(op.args[0], Ref) and graph.values[op.args[0].value].shape == value.shape[1:]
    ):
        return None
    return (COLUMNS if straight else ROWS), value


def _nbytes(value: Value) -> int:
    return math.prod(value.shape) * ITEM_BYTES[value.dtype]


# -- what becomes of them


class _BlockRewriter:
    """Rewrites the operators of one graph that use weights in blocks."""

    def __init__(self, graph: StepGraph, weights: Mapping[str, Blocks]) -> None:
        self.graph, self.weights, self.builder = graph, weights, GraphBuilder(graph)
        self.storages: dict[tuple[int, str], int] = {}
        """(whole storage, suffix) -> the storage of that block."""
        self.sources: dict[int, Value] = {}
        self.chains = 1 + max((op.tile.chain for op in graph.ops if op.tile is not None), default=-1)

    def weight_of(self, op: Op) -> int | None:
        """Return the weight that an op must read in blocks."""
        place = operator_of(op.name).weight
        argument = op.args[place] if place is not None and place < len(op.args) else None
        if not isinstance(argument, Ref):
            return None
        s = self.graph.values[argument.value].storage
        storage = self.graph.storages[s]
        return s if storage.role is Role.PARAMETER and storage.name in self.weights else None

    def read(self, op: Op, s: int) -> str:
        """Add an op that uses weight `s` block by block; return its description. Raises GraphError if it cannot."""
        found, name = _dimension(self.graph, op, s), self.graph.storages[s].name
        if found is None:
            raise GraphError(f"{op.name} does not take {name} in blocks; plan the job again")
        dimension, value = found
        blocks = self.weights[name].get(dimension)
        if blocks is None:
            raise GraphError(
                f"{op.name} takes {name} by {_LAYOUTS[dimension]}, in which it does not lie; plan the job again"
            )
        what = f"{base_name(op.name)} with {name} by {_LAYOUTS[dimension]}"
        if base_name(op.name) == "embedding":
            self._embedding(op, value, blocks, what)
        else:
            self._product(op, value, blocks, what)
        self.chains += 1
        return f"{what} in {len(blocks)} blocks"

    def _block(self, block: Block, value: Value) -> Value:
        """Return a block as a separate matrix, in row-major order."""
        rows, columns = value.shape if value.stride == row_major(value.shape) else value.shape[::-1]
        width = block.end - block.begin
        shape = (width, columns) if block.dimension == ROWS else (rows, width)
        known = (value.storage, block.suffix)
        if known not in self.storages:
            whole = self.graph.storages[value.storage]
            s = self.builder.storage(math.prod(shape) * ITEM_BYTES[value.dtype], whole.role, whole.name + block.suffix)
            self.storages[known] = s
            step = (columns, 1)
            self.sources[s] = Value(value.storage, value.dtype, shape, step, block.begin * step[block.dimension])
        return Value(self.storages[known], value.dtype, shape, row_major(shape), 0)

    def _product(self, op: Op, value: Value, blocks: tuple[Block, ...], what: str) -> None:
        """Add the products of all blocks, each of which creates columns of the product that
        are copied to their place.
        """
        (out,) = (self.graph.values[v] for v in op.outputs if v is not None)
        place = operator_of(op.name).weight
        if place is None:
            raise GraphError(f"{op.name} takes no weight in blocks")
        self.builder.reserve(out, op.phase)
        for k, block in enumerate(blocks):
            first, width = len(self.builder.ops), block.end - block.begin
            part = self._block(block, value) if block.stored else self._put_together(op, block, value)
            if block.dimension == ROWS:
                part = replace(part, shape=part.shape[::-1], stride=part.stride[::-1])
            args = [*op.args]
            args[place] = Ref(self.builder.value(part))
            if place > 1 and isinstance(bias := args[0], Ref):
                whole = self.graph.values[bias.value]
                begin = whole.offset + block.begin * whole.stride[0]
                args[0] = Ref(self.builder.value(replace(whole, shape=(width,), offset=begin)))
            result = self._like(replace(out, shape=(out.shape[0], width), stride=(width, 1)))
            self.builder.add(replace(op, args=tuple(args), outputs=(result,)))
            target = self.builder.value(replace(out, shape=(out.shape[0], width), offset=block.begin))
            self.builder.add(Op("aten::copy_", (Ref(target), Ref(result)), (), (target,), (out.storage,), op.phase))
            self.builder.mark(first, Tile(self.chains, what, k, len(blocks)))

    def _put_together(self, op: Op, block: Block, value: Value) -> Value:
        """Add copies that assemble a block of columns from the blocks of rows; return it as a separate matrix."""
        shape = value.shape[0], block.end - block.begin
        made = Value(
            self.builder.storage(math.prod(shape) * ITEM_BYTES[value.dtype]), value.dtype, shape, row_major(shape), 0
        )
        self.builder.reserve(made, op.phase)
        for rows in self.weights[self.graph.storages[value.storage].name][ROWS]:
            part, height = self._block(rows, value), rows.end - rows.begin
            source = self.builder.value(replace(part, shape=(height, shape[1]), offset=block.begin))
            place = self.builder.value(replace(made, shape=(height, shape[1]), offset=rows.begin * shape[1]))
            self.builder.add(Op("aten::copy_", (Ref(place), Ref(source)), (), (place,), (made.storage,), op.phase))
        return made

    def _embedding(self, op: Op, value: Value, blocks: tuple[Block, ...], what: str) -> None:
        """Add the embeddings of all blocks. Each gives a row for each index, a wrong one if the index is elsewhere; the
        last matching block wins.

        Indices below the first row and beyond the last are not hidden: those blocks reject them.
        """
        indices, (out,) = op.args[1], op.outputs
        if not isinstance(indices, Ref) or out is None:
            raise GraphError(f"{op.name} is called without indices; plan the job again")
        made = self.graph.values[out]
        so_far: int | None = None
        for k, block in enumerate(blocks):
            first, last = len(self.builder.ops), k == len(blocks) - 1
            local = indices.value
            if k:
                local = self._number(op, "sub.Scalar", local, block.begin)
                local = self._number(op, "clamp_min", local, 0)
            if not last:
                local = self._number(op, "clamp_max", local, block.end - block.begin - 1)
            table = self.builder.value(self._block(block, value))
            rows = self._like(made)
            self.builder.add(replace(op, args=(Ref(table), Ref(local)), kwargs=(), outputs=(rows,)))
            if so_far is not None:
                reached = self._column(self._number(op, "ge.Scalar", indices.value, block.begin, "bool"))
                chosen = out if last else self._like(made)
                self.builder.add(
                    Op("aten::where.self", (Ref(reached), Ref(rows), Ref(so_far)), (), (chosen,), (), op.phase)
                )
                rows = chosen
            so_far = rows
            self.builder.mark(first, Tile(self.chains, what, k, len(blocks)))

    # -- training

    def train(self, trained: _TrainedWeight) -> str:
        """Add gradients and update of a weight, block after block; return their description."""
        name = self.graph.storages[trained.parameter].name
        blocks = self.weights[name][ROWS]
        what = f"gradient and update of {name} by rows"
        for i in trained.group.whole:
            self.builder.add(self.graph.ops[i])
        for k, block in enumerate(blocks):
            first = len(self.builder.ops)
            parts = {s: self._rows_of_gradient(self.graph.ops[i], block) for s, i in trained.makers.items()}
            for i in trained.inside:
                if i not in trained.group.whole:
                    self._updated(self.graph.ops[i], trained, block, parts)
            self.builder.mark(first, Tile(self.chains, what, k, len(blocks)))
        self.chains += 1
        return f"{what} in {len(blocks)} blocks"

    def _rows_of_gradient(self, op: Op, block: Block) -> int:
        """Add the gradient of a block's rows; return its storage."""
        made = self._rows_of_product(op, block) if op.name == _PRODUCT else self._rows_of_embedded(op, block)
        return self.builder.known(made).storage

    def _rows_of_product(self, op: Op, block: Block) -> int:
        left, right = op.args
        if not isinstance(left, Ref) or op.outputs[0] is None:
            raise GraphError(f"{op.name} is called without a tensor; plan the job again")
        whole, out, height = self.graph.values[left.value], self.graph.values[op.outputs[0]], block.end - block.begin
        rows = replace(whole, shape=(height, whole.shape[1]), offset=whole.offset + block.begin * whole.stride[0])
        made = self._like(replace(out, shape=(height, out.shape[1])))
        self.builder.add(replace(op, args=(Ref(self.builder.value(rows)), right), outputs=(made,)))
        return made

    def _rows_of_embedded(self, op: Op, block: Block) -> int:
        """Add the gradient of embedded rows.

        Rows before and after the block are summed in one extra row at each end, and dropped.
        """
        gradient, indices, _, padding, *rest = op.args
        if not isinstance(indices, Ref) or not isinstance(padding, int) or op.outputs[0] is None:
            raise GraphError(f"{op.name} is called without indices; plan the job again")
        rows = block.end - block.begin
        local = self._number(op, "sub.Scalar", indices.value, block.begin - 1)
        local = self._number(op, "clamp_min", local, 0)
        local = self._number(op, "clamp_max", local, rows + 1)
        out = self.graph.values[op.outputs[0]]
        more = self._like(replace(out, shape=(rows + 2, out.shape[1])))
        ignored = padding - block.begin + 1 if block.begin <= padding < block.end else -1
        self.builder.add(replace(op, args=(gradient, Ref(local), rows + 2, ignored, *rest), outputs=(more,)))
        inner = self.builder.value(replace(self.builder.known(more), shape=(rows, out.shape[1]), offset=out.shape[1]))
        made = self._like(replace(out, shape=(rows, out.shape[1])))
        self.builder.add(Op("aten::clone", (Ref(inner),), (), (made,), (), op.phase))
        return made

    def _updated(self, op: Op, trained: _TrainedWeight, block: Block, parts: dict[int, int]) -> None:
        """Add one op of an update for a block; `parts`: the block's own temporaries, by the whole one."""
        values: dict[int, int] = {}
        for v in (*operands(op), *(v for v in op.outputs if v is not None)):
            value = self.graph.values[v]
            if value.storage in trained.lasting:
                values[v] = self.builder.value(self._block(block, value))
            elif value.storage in trained.group.storages:
                part = replace(value, shape=(block.end - block.begin, value.shape[1]))
                if value.storage not in parts:
                    parts[value.storage] = self.builder.storage(_nbytes(part))
                values[v] = self.builder.value(replace(part, storage=parts[value.storage]))
        storages = {self.graph.values[v].storage: self.builder.known(made).storage for v, made in values.items()}
        self.builder.add(
            replace(
                with_operands(op, lambda v: values.get(v, v)),
                outputs=tuple(None if v is None else values.get(v, v) for v in op.outputs),
                writes=tuple(storages.get(s, s) for s in op.writes),
            )
        )

    # -- parts of an operator

    def _number(self, op: Op, name: str, v: int, number: int, dtype: str | None = None) -> int:
        """Add an operator that combines each index with a number."""
        index = self.builder.known(v)
        result = self._like(replace(index, dtype=dtype or index.dtype, stride=row_major(index.shape), offset=0))
        self.builder.add(Op(f"aten::{name}", (Ref(v), number), (), (result,), (), op.phase))
        return result

    def _like(self, value: Value) -> int:
        """Return a new value of this shape in a new storage."""
        return self.builder.value(replace(value, storage=self.builder.storage(_nbytes(value))))

    def _column(self, v: int) -> int:
        """Return a value with one more dimension, of size 1, at its end."""
        value = self.builder.known(v)
        return self.builder.value(replace(value, shape=(*value.shape, 1), stride=(*value.stride, 1)))
