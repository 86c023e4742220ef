"""A call of an operator in a graph, and the origins of its operands."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.graph import Argument, Op, Ref, StepGraph, Value
from port_planner.ir.torch_operators import resolve
from port_planner.operators import base_name

Shape = tuple[int, ...]

_COPY = "aten::clone"


@dataclass(frozen=True)
class GraphCall:
    """An operator call of a graph, with its arguments by parameter name."""

    graph: "Writers"
    index: int
    arguments: Mapping[str, Argument]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return base_name(self.graph.graph.ops[self.index].name)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters of the operator."""
        return _parameters(self.graph.graph.ops[self.index].name)

    @property
    def spatial(self) -> int:
        """Number of dimensions in which an operator on images works, from its name: 2 for `avg_pool2d`."""
        return next(int(letter) for letter in self.name if letter.isdigit())

    def value(self, name: str) -> Value | None:
        argument = self.arguments.get(name)
        return self.graph.graph.values[argument.value] if isinstance(argument, Ref) else None

    def shape(self, name: str) -> Shape:
        """Return the shape of an operand; raise UnfitError if it is absent."""
        value = self.value(name)
        if value is None:
            raise UnfitError
        return value.shape

    def sizes(self, name: str) -> Shape:
        """Return an argument that is a list of sizes; raise UnfitError if it is not."""
        argument = self.arguments.get(name)
        if not isinstance(argument, tuple):
            raise UnfitError
        return tuple(whole(n) for n in argument)

    def listed(self, name: str, count: int | None = None) -> list[Value]:
        """Return the operands of an argument that is a list of tensors, `count` of them if that is given;
        raise UnfitError if it is not.
        """
        argument = self.arguments.get(name)
        if not isinstance(argument, tuple) or len(argument) != (len(argument) if count is None else count):
            raise UnfitError
        if not all(isinstance(part, Ref) for part in argument):
            raise UnfitError
        return [self.graph.graph.values[part.value] for part in argument if isinstance(part, Ref)]

    def size(self, name: str) -> int:
        return whole(self.arguments.get(name))

    def all_of(self, names: str, shape: Shape) -> bool:
        """Return whether all of those operands that are present have this shape."""
        return all(self.shape(n) == shape for n in names.split() if self.arguments.get(n) is not None)

    def maker(self, value: Value | None) -> Op | None:
        """Return the earlier operator whose only result is this value, if nothing else writes it."""
        made = None if value is None else self.graph.only_toucher(value.storage, self.index)
        op = None if made is None else self.graph.graph.ops[made]
        result = None if op is None or len(op.outputs) != 1 else op.outputs[0]
        return op if result is not None and self.graph.graph.values[result] == value else None

    def made_by(self, name: str, forward: str, output: int) -> "GraphCall":
        """Return the earlier call whose output, unchanged since then, this operand is or was copied from; raise
        UnfitError if there is none.
        """
        for wanted in self._copied(name):
            for i, op in enumerate(self.graph.graph.ops[: self.index]):
                if base_name(op.name) == forward and len(op.outputs) > output:
                    v = op.outputs[output]
                    made = v is not None and self.graph.graph.values[v] == wanted
                    if made and self.graph.touching[wanted.storage] == [i]:
                        return call_of(self.graph, i)
        raise UnfitError

    def taken_by(self, name: str, forward: str) -> list["GraphCall"]:
        """Return the earlier calls that used this operand, or its original, under the same name.

        Calls before its last write do not count.
        """
        ops = self.graph.graph.ops
        found = list[GraphCall]()
        for wanted in self._copied(name):
            last = max(self.graph.touching[wanted.storage], default=-1)
            calls = [call_of(self.graph, i) for i in range(last + 1, self.index) if base_name(ops[i].name) == forward]
            found += [call for call in calls if call.value(name) == wanted]
        return found

    def _copied(self, name: str) -> Iterator[Value]:
        """Yield an operand, the original from which it was copied, and so on, because hooks on saved tensors may pass
        copies to the backward pass.
        """
        value, before = self.value(name), self.index
        if value is None:
            raise UnfitError
        yield value
        while (made := self.graph.copy_of(value, before)) is not None:
            value, before = made
            yield value


class UnfitError(Exception):
    """The operands of a call do not fit; `verify_operands` reports this with all details."""


class Writers:
    """A graph, and the operators that create or change each storage."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph

    @cached_property
    def touching(self) -> list[list[int]]:
        touching: list[list[int]] = [[] for _ in self.graph.storages]
        for i, op in enumerate(self.graph.ops):
            made = {self.graph.values[v].storage for v in op.outputs if v is not None}
            for s in made | set(op.writes):
                touching[s].append(i)
        return touching

    def only_toucher(self, storage: int, before: int) -> int | None:
        """Return the only operator that creates or changes a storage, if it precedes `before`; else None."""
        touching = self.touching[storage]
        return touching[0] if len(touching) == 1 and touching[0] < before else None

    def copy_of(self, value: Value, before: int) -> tuple[Value, int] | None:
        """Return the original of a copy and the operator before `before` that made the copy; None if it is not a copy.

        Nothing else writes the copy, and nothing writes the original afterwards.
        """
        made = self.only_toucher(value.storage, before)
        if made is None:
            return None
        op = self.graph.ops[made]
        if (moved := transfer_of(self.graph, op)) is not None:
            unchanged = max(self.touching[moved.source], default=-1) < made
            return (replace(value, storage=moved.source), made) if unchanged else None
        if op.name != _COPY or op.outputs[0] is None or self.graph.values[op.outputs[0]] != value:
            return None
        if not isinstance(op.args[0], Ref):
            return None
        source = self.graph.values[op.args[0].value]
        unchanged = max(self.touching[source.storage], default=-1) < made
        alike = (source.shape, source.dtype) == (value.shape, value.dtype)
        return (source, made) if unchanged and alike else None


def whole(number: object) -> int:
    """Return an integer that may be a size or an index; raise UnfitError for anything else."""
    if isinstance(number, bool) or not isinstance(number, int) or abs(number) > 1 << 40:
        raise UnfitError
    return number


def call_of(graph: Writers, index: int) -> GraphCall:
    """Return the call of an operator; raise OperatorError for one that torch does not have."""
    op = graph.graph.ops[index]
    return GraphCall(graph, index, {**dict(zip(_parameters(op.name), op.args, strict=False)), **dict(op.kwargs)})


@cache
def _parameters(name: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in resolve(name)._schema.arguments)  # type: ignore[attr-defined]


Fits: TypeAlias = Callable[[GraphCall], bool]
"""Returns whether the operands of a call fit; may raise UnfitError, IndexError, TypeError or
ValueError if they do not.
"""
