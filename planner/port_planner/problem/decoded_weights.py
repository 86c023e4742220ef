"""Steps whose frozen weights are stored in fewer bits and decoded before each use into temporaries
that live for one operator.

A quantized weight is a level times its block's scale in 32 bits, and every 16-bit number is also a 32-bit
number. So these operators return the weights' own bits. The stored form is treated like other weights: a plan
keeps it in RAM or on flash.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from port_planner.ir.graph import (
    ITEM_BYTES,
    Argument,
    GraphError,
    NamedArgument,
    Op,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Value,
    operands,
    with_operands,
)

PAIRS = "pairs of levels"
"""Name of the table in which a byte of two codes is looked up, shared by all weights of a graph."""
_PAIRS_SHAPE = (256, 2)
_PARTS = ("codes", "scales")
"""Suffixes of the storages that hold a quantized weight."""
_IN_16_BITS = " in 16 bits"
"""Suffix of the storage that holds a weight's numbers in 16 bits."""
_EMBEDDING = "aten::embedding"


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """How a frozen weight is stored. `dtype`: its own, bfloat16 or float32; `block`: items that share a scale.

    `paired`: each byte of its codes is two codes, looked up in `PAIRS`; otherwise each code is a byte.
    """

    name: str
    dtype: str
    items: int
    block: int
    paired: bool

    @property
    def codes_name(self) -> str:
        """The name of the storage of its codes."""
        return f"{self.name} {_PARTS[0]}"

    @property
    def scales_name(self) -> str:
        """The name of the storage of its scales."""
        return f"{self.name} {_PARTS[1]}"

    @property
    def codes_shape(self) -> tuple[int, int]:
        """The shape of its codes: a row for each block."""
        return self.items // self.block, self.block // 2 if self.paired else self.block


@dataclass(frozen=True, slots=True)
class ShortWeight:
    """A frozen 32-bit weight whose numbers all exist in `dtype`, bfloat16 or float16, in which they are stored."""

    name: str
    dtype: str
    items: int

    @property
    def short_name(self) -> str:
        """The name of the storage of its numbers in 16 bits."""
        return f"{self.name}{_IN_16_BITS}"


StoredWeight: TypeAlias = CodedWeight | ShortWeight


def with_decoded(graph: StepGraph, weights: Mapping[str, StoredWeight]) -> StepGraph:
    """Return the graph with these weights decoded; they are given by their storages' keys.

    All other storages, values and operators stay, except that of an embedding's table in 16 bits only the
    looked-up rows are widened.
    """
    made = _WeightDecoder(graph, weights)
    return made.graph()


def decoded_bytes(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """Return by name the weights that a graph decodes, with the bytes of each when decoded, and as codes and scales."""
    stored = {s.name: s.nbytes for s in graph.storages if s.role is Role.BUFFER}
    found = {}
    for storage in graph.storages:
        parts = [f"{storage.name} {part}" for part in _PARTS]
        if storage.role is Role.TEMPORARY and all(part in stored for part in parts):
            found[storage.name] = storage.nbytes, sum(stored[part] for part in parts)
    return found


def widened_bytes(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """Return by name the weights that a graph stores in 16 bits and widens, with the bytes of
    each in 32 and in 16 bits.
    """
    return {
        s.name.removesuffix(_IN_16_BITS): (2 * s.nbytes, s.nbytes)
        for s in graph.storages
        if s.role is Role.BUFFER and s.name.endswith(_IN_16_BITS)
    }


class _WeightDecoder:
    def __init__(self, graph: StepGraph, weights: Mapping[str, StoredWeight]) -> None:
        self.before, self.storages, self.values, self.ops = (
            graph,
            list(graph.storages),
            list(graph.values),
            list(graph.ops),
        )
        self.ahead: dict[int, list[Op]] = {}
        """Operator -> the operators that run before it."""
        self.behind: dict[int, Op] = {}
        """Embedding -> the operator that widens the rows that the embedding looked up."""
        self.pairs: int | None = None
        for s, storage in enumerate(graph.storages):
            if storage.persistent and graph.uses[s] and storage.key in weights:
                self._decode(s, weights[storage.key])

    def graph(self) -> StepGraph:
        ops: list[Op] = []
        place: list[int] = []
        for i, op in enumerate(self.ops):
            ops += self.ahead.get(i, [])
            place.append(len(ops))
            ops += [op, *([self.behind[i]] if i in self.behind else [])]
        draws = tuple(tuple(place[i] for i in together) for together in self.before.draws)
        return replace(
            self.before, storages=tuple(self.storages), values=tuple(self.values), ops=tuple(ops), draws=draws
        )

    def _decode(self, s: int, weight: StoredWeight) -> None:
        stored, nbytes, uses = self._parts(weight), self.storages[s].nbytes, self.before.uses[s]
        lookups = [use for use in uses if isinstance(weight, ShortWeight) and self._looks_up(use)]
        whole = [use for use in uses if use not in lookups]
        self.storages[s] = replace(self.storages[s], role=Role.TEMPORARY)
        for use in lookups:
            self._look_up(use, stored[0])
        for use in whole:
            target = s if use == whole[0] else self._storage(nbytes, Role.TEMPORARY, weight.name)
            if isinstance(weight, ShortWeight):
                self._add(use, "_to_copy", stored, self._value(target, "float32", (weight.items,)), to="float32")
            else:
                self._scale(use, target, weight, *stored)
            if target != s:
                self.ops[use] = self._reading(self.ops[use], s, target)

    def _parts(self, weight: StoredWeight) -> tuple[int, ...]:
        """Return the values as which a weight is stored: its numbers in 16 bits, or codes and scales."""
        if isinstance(weight, ShortWeight):
            return (self._stored(weight.short_name, weight.dtype, (weight.items,)),)
        rows, columns = weight.codes_shape
        codes = self._stored(weight.codes_name, "uint8" if weight.paired else "int8", (rows, columns))
        return codes, self._stored(weight.scales_name, "float32", (rows, 1))

    def _reading(self, op: Op, s: int, target: int) -> Op:
        """Return an operator with one storage in its operands replaced by another."""
        moved: dict[int, int] = {}
        for v in operands(op):
            if self.values[v].storage == s and v not in moved:
                self.values.append(replace(self.values[v], storage=target))
                moved[v] = len(self.values) - 1

        return with_operands(op, lambda v: moved.get(v, v))

    def _looks_up(self, use: int) -> bool:
        """Return whether an operator returns rows of a table in 32 bits."""
        op = self.before.ops[use]
        return (
            op.name == _EMBEDDING
            and isinstance(op.args[0], Ref)
            and self.before.values[op.args[0].value].dtype == "float32"
            and op.outputs[0] is not None
        )

    def _look_up(self, use: int, short: int) -> None:
        """Look rows up in 16 bits, and widen them after the operator."""
        op, stored = self.ops[use], self.values[short]
        (table, *_), (out,) = operands(op), op.outputs
        if out is None:
            raise GraphError(f"op {use} ({op.name}) returns nothing; capture the step again")
        self.values.append(replace(self.values[table], storage=stored.storage, dtype=stored.dtype))
        short_table, rows = len(self.values) - 1, self._temporary(stored.dtype, self.values[out].shape)
        read = with_operands(op, lambda v: short_table if v == table else v)
        self.ops[use] = replace(read, outputs=(rows,))
        self.behind[use] = _call("_to_copy", (rows,), out, op.phase, to="float32")

    def _scale(self, use: int, target: int, weight: CodedWeight, codes: int, scales: int) -> None:
        """Decode codes and scales into storage `target` before an operator."""
        rows, columns = weight.codes_shape
        own = weight.dtype == "float32"
        scaled = target if own else self._storage(4 * weight.items, Role.TEMPORARY, "")
        levels = self._value(scaled, "float32", (rows, weight.block))
        if weight.paired:
            numbers = self._temporary("int32", (rows, columns))
            self._add(use, "_to_copy", (codes,), numbers, to="int32")
            pairs = self._value(scaled, "float32", (rows, columns, 2))
            self._add(use, "embedding", (self._table(), numbers), pairs)
        else:
            self._add(use, "_to_copy", (codes,), levels, to="float32")
        self._add(use, "mul_.Tensor", (levels, scales), levels, writes=(scaled,))
        if not own:
            self._add(
                use, "_to_copy", (levels,), self._value(target, weight.dtype, (rows, weight.block)), to=weight.dtype
            )

    def _add(
        self, use: int, name: str, taken: tuple[int, ...], made: int, writes: tuple[int, ...] = (), to: str = ""
    ) -> None:
        """Add an operator before another."""
        self.ahead.setdefault(use, []).append(_call(name, taken, made, self.before.ops[use].phase, writes, to))

    def _table(self) -> int:
        if self.pairs is None:
            self.pairs = self._stored(PAIRS, "float32", _PAIRS_SHAPE)
        return self.pairs

    def _stored(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        return self._value(self._storage(math.prod(shape) * ITEM_BYTES[dtype], Role.BUFFER, name), dtype, shape)

    def _temporary(self, dtype: str, shape: tuple[int, ...]) -> int:
        return self._value(self._storage(math.prod(shape) * ITEM_BYTES[dtype], Role.TEMPORARY, ""), dtype, shape)

    def _storage(self, nbytes: int, role: Role, name: str) -> int:
        self.storages.append(Storage(nbytes, role, name))
        return len(self.storages) - 1

    def _value(self, s: int, dtype: str, shape: tuple[int, ...]) -> int:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        self.values.append(Value(s, dtype, shape, tuple(reversed(strides)), 0))
        return len(self.values) - 1


def _call(name: str, taken: tuple[int, ...], made: int, phase: Phase, writes: tuple[int, ...] = (), to: str = "") -> Op:
    """Return the call of an aten operator with one result, of data type `to` if that is given."""
    kwargs: tuple[tuple[str, Argument], ...] = (("dtype", NamedArgument("dtype", to)),) if to else ()
    return Op(f"aten::{name}", tuple(map(Ref, taken)), kwargs, (made,), writes, phase)
