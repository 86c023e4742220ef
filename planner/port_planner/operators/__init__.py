"""What is known of torch's operators by hand: each in a row of `table`; `row` says what there is to know.

What torch's schema and tags say is asked of them, where torch is: nothing here imports it.
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
    """Return what is known of an operator, of any overload; of one that has no row, that it is not allowed."""
    return OPERATORS.get(base_name(name), _UNKNOWN)
