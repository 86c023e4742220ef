"""Hand-written facts about torch's operators: one row of `table` each; `row` defines the columns.

Facts that torch's schema and tags already state are read from them wherever torch is loaded; nothing here imports it.
"""

from functools import lru_cache

from port_planner.operators.row import Operator
from port_planner.operators.table import OPERATORS

_UNKNOWN = Operator(allowed=False)


def base_name(name: str) -> str:
    """Return the name of an operator of torch, "aten::add.Tensor", without namespace and overload: "add"."""
    return name.removeprefix("aten::").partition(".")[0]


def overload_name(name: str) -> str:
    """Return the overload of an operator, "Tensor" of "aten::add.Tensor"; "" for the one without a suffix."""
    return name.partition(".")[2]


@lru_cache(maxsize=4096)
def operator_of(name: str) -> Operator:
    """Return what is known of an operator, of any overload; an operator without a row is not allowed."""
    return OPERATORS.get(base_name(name), _UNKNOWN)
