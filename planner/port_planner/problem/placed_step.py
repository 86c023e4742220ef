"""A step whose operators run on several kinds of devices: the recorded one with transfers between their memories.

A storage is on the device where it is written, and all operators that write it run there. Operators elsewhere read a
copy, which is made before its first reader and stays valid until the storage is written again. Results are those of the
operators on their devices: transfers do not change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import all_bytes, transfer_op
from port_planner.ir.graph import (
    Argument,
    GraphError,
    NamedArgument,
    Op,
    Role,
    StepGraph,
    Storage,
    Value,
    operands,
    verify_graph,
    with_operands,
)


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step on several kinds of devices; `origin`: each operator's index in the recorded step, None for a transfer."""

    graph: StepGraph
    origin: tuple[int | None, ...]


def on_kind(graph: StepGraph, kind: str) -> StepGraph:
    """Return a step with all its storages on one kind of device."""
    storages = tuple(replace(s, device=kind) for s in graph.storages)
    return replace(graph, storages=storages, ops=tuple(_made_there(op, kind) for op in graph.ops))


def homes_of(graph: StepGraph, kinds: Sequence[str], known: Mapping[str, str]) -> tuple[str, ...]:
    """Return the kind of device on which each storage is if operators run on these `kinds`, one per operator.

    `known`: where other graphs have put lasting storages, by key. Raises GraphError if a storage is written on two
    kinds, or on a kind other than the known one.
    """
    found = []
    for s, storage in enumerate(graph.storages):
        where = {kinds[i] for i in graph.writers[s]}
        readers = [kinds[i] for i in graph.uses[s]]
        if not where and storage.role is Role.BATCH:
            where = {readers[0]} if len(set(readers)) == 1 else {CPU}
        elif not where:
            where = {known.get(storage.key, readers[0] if readers else CPU)}
        if len(where) > 1 or (storage.persistent and known.get(storage.key, *where) not in where):
            raise GraphError(f"storage {s} ({graph.label(s)}) would be written on {' and '.join(sorted(where))}")
        found.append(where.pop())
    return tuple(found)


def placed_step(graph: StepGraph, kinds: Sequence[str], known: Mapping[str, str] = {}) -> PlacedStep:
    """Return a step whose operators run on these `kinds` of devices, one per operator; `known`
    and errors as in `homes_of`.
    """
    return _TransferPlacer(graph, kinds, homes_of(graph, kinds, known)).placed()


class _TransferPlacer:
    """Goes through a step and adds a transfer before each operator that needs contents from elsewhere."""

    def __init__(self, graph: StepGraph, kinds: Sequence[str], homes: Sequence[str]) -> None:
        self.graph, self.kinds, self.homes = graph, kinds, homes
        self.storages = [replace(s, device=home) for s, home in zip(graph.storages, homes, strict=True)]
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origin: list[int | None] = []
        self.copies: dict[tuple[int, str], int] = {}
        """Storage and kind -> the storage there with its current contents."""
        self.seen: dict[tuple[int, int], int] = {}
        """Value and storage of a copy -> the value on the copy."""

    def placed(self) -> PlacedStep:
        for i, (op, kind) in enumerate(zip(self.graph.ops, self.kinds, strict=True)):
            there = {s: self._copy(s, kind, op) for s in self.graph.reads[i] if self.homes[s] != kind}
            values = {
                v: self._on(v, there[s]) if (s := self.graph.values[v].storage) in there else v for v in operands(op)
            }
            self._add(_made_there(with_operands(op, values.__getitem__), kind), i)
            for written in op.writes:
                for held in [held for held in self.copies if held[0] == written]:
                    del self.copies[held]
        place = {i: k for k, i in enumerate(self.origin) if i is not None}
        draws = tuple(tuple(place[i] for i in together) for together in self.graph.draws)
        graph = replace(
            self.graph, storages=tuple(self.storages), values=tuple(self.values), ops=tuple(self.ops), draws=draws
        )
        verify_graph(graph)
        return PlacedStep(graph, tuple(self.origin))

    def _add(self, op: Op, origin: int | None) -> None:
        self.ops.append(op)
        self.origin.append(origin)

    def _copy(self, s: int, kind: str, reader: Op) -> int:
        """Return the storage on a kind of device with the current contents of a storage, adding a
        transfer if there is none.
        """
        if (s, kind) not in self.copies:
            nbytes = self.graph.storages[s].nbytes
            self.copies[s, kind] = made = len(self.storages)
            self.storages.append(Storage(nbytes, Role.TEMPORARY, "", kind))
            source, target = self._value(all_bytes(s, nbytes)), self._value(all_bytes(made, nbytes))
            self._add(transfer_op(source, target, kind, reader.phase), None)
        return self.copies[s, kind]

    def _on(self, v: int, storage: int) -> int:
        if (v, storage) not in self.seen:
            self.seen[v, storage] = self._value(replace(self.graph.values[v], storage=storage))
        return self.seen[v, storage]

    def _value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _made_there(op: Op, kind: str) -> Op:
    """Return an operator that creates its tensor on this kind of device, if it names a device at all."""

    def other(argument: Argument) -> Argument:
        named = isinstance(argument, NamedArgument) and argument.kind == "device"
        return NamedArgument("device", kind) if named else argument

    return replace(op, args=tuple(map(other, op.args)), kwargs=tuple((name, other(a)) for name, a in op.kwargs))
