"""What cannot be followed with the same numbers.

It is refused with the operator and the line of the program that calls it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from planner.ir.errors import ExitCode, PortError, program_line

_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_WITHOUT_VALUES = frozenset(("c10d::barrier", "c10d::monitored_barrier_"))


class NotFollowedError(PortError):
    """The program does something that cannot be followed with the same numbers."""

    exit_code = ExitCode.IMPOSSIBLE


def not_followed(what: str, remedy: str) -> NotFollowedError:
    """Return the error that refuses `what`, with the program's line."""
    place = program_line()
    return NotFollowedError(f"{place}: {what}; {remedy}" if place else f"{what}; {remedy}")


@cache
def may_be_refused(func: Any) -> bool:
    """Tell whether an operator may have to be refused whatever its operands' types are."""
    name = str(func._schema.name)
    return name == "aten::prod" or (name.startswith(_COLLECTIVES) and name not in _WITHOUT_VALUES)


def refuse_unfollowable(func: Any, args: Sequence[Any], types: Sequence[type]) -> None:
    """Raise NotFollowedError for an operator that a dispatch mode gives, or may give, other numbers.

    Its values or its gradient.

    `prod_backward` asks `areAnyTensorSubclassLike`, which is true then (torch/csrc/autograd/FunctionsManual.cpp).
    Collectives read and write tensors in threads of their own after the operator has returned.
    """
    if types and any(t.__module__.startswith("torch.distributed.tensor") for t in types):
        raise not_followed(
            f"{func._schema.name} of DTensor cannot be followed", "use plain tensors in one process, or no budget"
        )
    if not may_be_refused(func):
        return
    name = func._schema.name
    if name != "aten::prod":
        raise not_followed(
            f"{name} of torch.distributed moves tensors past the operators, in threads of its own",
            "run one process without DistributedDataParallel and process groups, or without a budget",
        )
    if torch.is_grad_enabled() and args[0].requires_grad:
        raise not_followed(
            "the gradient of prod() has other last digits while operators are followed",
            "take x.log().sum().exp(), or compute it under torch.no_grad(), or run the program without a budget",
        )
