"""Steps whose frozen weights are codes and scales, decoded before each use into temporaries that live for one operator.

A quantized weight is a level times its block's scale in 32 bits, so these operators return the weights' own bits. The codes
are storages like other weights: a plan keeps them in RAM or on flash.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from port_planner.ir.graph import (
    ITEM_BYTES,
    Argument,
    Named,
    Op,
    Ref,
    Role,
    StepGraph,
    Storage,
    Value,
    operands,
    with_operands,
)

PAIRS = "pairs of levels"
"""Name of the table that a byte of two codes is looked up in, shared by all weights of a graph."""
_PAIRS_SHAPE = (256, 2)
_PARTS = ("codes", "scales")
"""What a weight is stored as: storages with its name plus one of these."""


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


def with_decoded(graph: StepGraph, weights: Mapping[str, CodedWeight]) -> StepGraph:
    """Return the graph with these weights decoded; they are given by their storages' keys.

    All other storages, values and operators stay.
    """
    made = _WeightDecoder(graph, weights)
    return made.graph()


def decoded_bytes(graph: StepGraph) -> dict[str, tuple[int, int]]:
    """Return the weights that a graph decodes, by name, with the bytes of each when decoded and as codes and scales."""
    stored = {s.name: s.nbytes for s in graph.storages if s.role is Role.BUFFER}
    found = {}
    for storage in graph.storages:
        parts = [f"{storage.name} {part}" for part in _PARTS]
        if storage.role is Role.TEMPORARY and all(part in stored for part in parts):
            found[storage.name] = storage.nbytes, sum(stored[part] for part in parts)
    return found


class _WeightDecoder:
    def __init__(self, graph: StepGraph, weights: Mapping[str, CodedWeight]) -> None:
        self.before, self.storages, self.values, self.ops = (
            graph,
            list(graph.storages),
            list(graph.values),
            list(graph.ops),
        )
        self.ahead: dict[int, list[Op]] = {}
        """Operator -> the operators that run before it."""
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
            ops.append(op)
        draws = tuple(tuple(place[i] for i in together) for together in self.before.draws)
        return replace(
            self.before, storages=tuple(self.storages), values=tuple(self.values), ops=tuple(ops), draws=draws
        )

    def _decode(self, s: int, weight: CodedWeight) -> None:
        rows, columns = weight.codes_shape
        codes = self._stored(weight.codes_name, "uint8" if weight.paired else "int8", (rows, columns))
        scales = self._stored(weight.scales_name, "float32", (rows, 1))
        first, *others = self.before.uses[s]
        self.storages[s] = replace(self.storages[s], role=Role.TEMPORARY)
        self._decode_for(first, s, weight, codes, scales)
        for use in others:
            target = self._storage(self.storages[s].nbytes, Role.TEMPORARY, weight.name)
            self._decode_for(use, target, weight, codes, scales)
            self.ops[use] = self._reading(self.ops[use], s, target)

    def _reading(self, op: Op, s: int, target: int) -> Op:
        """Return an operator with one storage in its operands replaced by another."""
        moved: dict[int, int] = {}
        for v in operands(op):
            if self.values[v].storage == s and v not in moved:
                self.values.append(replace(self.values[v], storage=target))
                moved[v] = len(self.values) - 1

        return with_operands(op, lambda v: moved.get(v, v))

    def _decode_for(self, use: int, s: int, weight: CodedWeight, codes: int, scales: int) -> None:
        """Decode storage `s` from codes and scales before an operator."""
        rows, columns = weight.codes_shape
        own = weight.dtype == "float32"
        target = s if own else self._storage(4 * weight.items, Role.TEMPORARY, "")
        levels = self._value(target, "float32", (rows, weight.block))
        made, phase = self.ahead.setdefault(use, []), self.before.ops[use].phase

        def add(
            name: str, arguments: Iterable[Argument], output: int, writes: tuple[int, ...] = (), to: str = ""
        ) -> None:
            kwargs: tuple[tuple[str, Argument], ...] = (("dtype", Named("dtype", to)),) if to else ()
            made.append(Op(f"aten::{name}", tuple(arguments), kwargs, (output,), writes, phase))

        if weight.paired:
            numbers = self._temporary("int32", (rows, columns))
            add("_to_copy", [Ref(codes)], numbers, to="int32")
            add("embedding", [Ref(self._table()), Ref(numbers)], self._value(target, "float32", (rows, columns, 2)))
        else:
            add("_to_copy", [Ref(codes)], levels, to="float32")
        add("mul_.Tensor", [Ref(levels), Ref(scales)], levels, (target,))
        if not own:
            add("_to_copy", [Ref(levels)], self._value(s, weight.dtype, (rows, weight.block)), to=weight.dtype)

    def _table(self) -> int:
        if self.pairs is None:
            self.pairs = self._stored(PAIRS, "float32", _PAIRS_SHAPE)
        return self.pairs

    def _stored(self, name: str, dtype: str, shape: tuple[int, int]) -> int:
        return self._value(self._storage(shape[0] * shape[1] * ITEM_BYTES[dtype], Role.BUFFER, name), dtype, shape)

    def _temporary(self, dtype: str, shape: tuple[int, int]) -> int:
        return self._value(self._storage(shape[0] * shape[1] * ITEM_BYTES[dtype], Role.TEMPORARY, ""), dtype, shape)

    def _storage(self, nbytes: int, role: Role, name: str) -> int:
        self.storages.append(Storage(nbytes, role, name))
        return len(self.storages) - 1

    def _value(self, s: int, dtype: str, shape: tuple[int, ...]) -> int:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        self.values.append(Value(s, dtype, shape, tuple(reversed(strides)), 0))
        return len(self.values) - 1
