"""A step graph in the making: what another graph has, and what is added to it.

Storages and values of the original keep their numbers, so what stands in both is compared by number.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir.graph import Argument, Op, Ref, Role, StepGraph, Storage, Value


@dataclass(frozen=True, slots=True)
class Replacement:
    """Which ops of the original (`old`, ascending) became which of the new graph (`new`, ascending), and how."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph that computes the same, and where it differs from the one it was made of."""

    graph: StepGraph
    replacements: tuple[Replacement, ...]


class Draft:
    """Collects the ops of a new graph in order."""

    def __init__(self, graph: StepGraph) -> None:
        self._original = graph
        self._storages = list(graph.storages)
        self._values = list(graph.values)
        self._known = {value: v for v, value in enumerate(graph.values)}
        self.ops: list[Op] = []

    def storage(self, nbytes: int) -> int:
        """Add a temporary storage and return its number."""
        self._storages.append(Storage(nbytes, Role.TEMPORARY, ""))
        return len(self._storages) - 1

    def value(self, value: Value) -> int:
        """Return the number of a value, adding it where it is new."""
        if value not in self._known:
            self._known[value] = len(self._values)
            self._values.append(value)
        return self._known[value]

    def add(self, op: Op) -> int:
        """Add an op at the end and return its number."""
        self.ops.append(op)
        return len(self.ops) - 1

    def graph(self) -> StepGraph:
        """Return what was collected, without the storages that no op touches any more."""
        whole = StepGraph(
            tuple(self._storages), tuple(self._values), tuple(self.ops), self._original.batch, self._original.loss,
            self._original.aux, self._original.scalars,
        )  # fmt: skip
        return whole


def substituted(argument: Argument, values: dict[int, int]) -> Argument:
    """Return an argument with every value in it replaced as `values` says."""
    if isinstance(argument, Ref):
        return Ref(values.get(argument.value, argument.value))
    if isinstance(argument, tuple):
        return tuple(substituted(a, values) for a in argument)
    return argument


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, as torch gives them."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
