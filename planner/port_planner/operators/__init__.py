"""Hand-written facts about torch's operators, one row of `table` for each; `row` defines the columns.

Facts that torch's schema and tags state are read from there where torch is loaded; nothing here imports it.
"""

from functools import lru_cache

from port_planner.operators.row import Operator
from port_planner.operators.table import OPERATORS

_UNKNOWN = Operator(allowed=False)


def base_name(name: str) -> str:
    """Return the name of an operator of torch, "aten::add.Tensor", without namespace and overload: "add"."""
    return name.removeprefix("aten::").partition(".")[0]


def overload_name(name: str) -> str:
    """Return the overload of an operator: "Tensor" for "aten::add.Tensor", "" if there is no suffix."""
    return name.partition(".")[2]


@lru_cache(maxsize=4096)
def operator_of(name: str) -> Operator:
    """Return what is known about an operator, for any overload; an operator without a row is not allowed."""
    return OPERATORS.get(base_name(name), _UNKNOWN)
