"""What is known about an operator for any operands, looked up once for each call.

Of the 45 us that interception added to an operator, calling ten cached functions took 10, because an operator's
hash is computed in Python.
"""

from dataclasses import dataclass
from typing import Any

from port_agent.intercept.decisions.rematerialization import repeatable
from port_agent.intercept.residency.dispatch_keys import counts_inside
from port_agent.intercept.residency.operands import (
    makes_storage,
    only_views,
    stable_number,
    written_arguments,
)
from port_agent.intercept.tiles.elementwise import is_tiled
from port_agent.intercept.tiles.lists import takes_lists
from port_agent.intercept.tiles.products import is_product
from port_agent.intercept.tiles.rows import looks_up_rows
from port_planner.operators import operator_of
from port_planner.operators.row import Operator, Reads


@dataclass(frozen=True, slots=True)
class OperatorTraits:
    """Flags of one operator; each is the result of the function of the same name."""

    func: Any
    known: Operator
    """The operator's row in the table of operators."""
    name: str
    """Name of the operator, with its namespace, without its overload."""
    number: int
    views: bool
    """Whether the operator returns views of its operands, and reads none of their bytes."""
    reads_nothing: bool
    """Whether the operator uses only the shapes of its operands."""
    shape_alone: int | None
    """The argument of which the operator needs only the shape, if there is one."""
    reads_rows: bool
    """Whether the operator reads only the rows, or the one number, of an operand that another argument selects."""
    makes_storage: bool
    writes: bool
    repeatable: bool
    counts_inside: bool
    """Whether the kernel counts its writes by calling operators that do so; their counters show
    autograd what was changed.
    """
    tiled: bool
    takes_lists: bool
    maps_file: bool
    """Whether a weight or a table may be read from its file part by part."""


_known: dict[int, OperatorTraits] = {}
"""Traits by the address of the operator, which they keep alive."""


def traits_of(func: Any) -> OperatorTraits:
    """Return the traits of an operator."""
    return _known.get(id(func)) or _learn(func)


def forget_traits() -> None:
    """Clear the cache after facts about operators have changed."""
    _known.clear()


def _learn(func: Any) -> OperatorTraits:
    name = str(func._schema.name)
    known = operator_of(name)
    traits = _known[id(func)] = OperatorTraits(
        func, known, name, stable_number(func), only_views(func), known.reads is Reads.SHAPES, known.shape_only, known.reads is Reads.ROWS,
        makes_storage(func),
        bool(written_arguments(func)), repeatable(func), counts_inside(func), is_tiled(func), takes_lists(func),
        is_product(func) or looks_up_rows(func),
    )  # fmt: skip
    return traits
