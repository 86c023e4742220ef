"""What cannot run under a budget with the same numbers: it is refused with the operator and the line of the program
that calls it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from port_planner.base.errors import ExitCode, PortError, program_line
from port_planner.torch_compat.modes import HigherOrderOperator

_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "symm_mem::")
_WITHOUT_VALUES = frozenset(("c10d::barrier", "c10d::monitored_barrier_"))


class UnsupportedError(PortError):
    """The program does something that cannot run under a budget with the same numbers."""

    exit_code = ExitCode.IMPOSSIBLE


def unsupported(what: str, remedy: str) -> UnsupportedError:
    """Return the error that refuses `what`, with the program's line."""
    place = program_line()
    return UnsupportedError(f"{place}: {what}; {remedy}" if place else f"{what}; {remedy}")


@cache
def _is_collective(func: Any) -> bool:
    """Return whether an operator moves values between processes; a barrier does not."""
    name = str(func._schema.name)
    return name.startswith(_COLLECTIVES) and name not in _WITHOUT_VALUES


def refuse_higher_order(func: Any) -> None:
    """Raise UnsupportedError for an operator that takes programs, because torch runs these where no mode is allowed."""
    if isinstance(func, HigherOrderOperator):
        raise unsupported(
            f"{func.name()} of torch runs a program of its own, which cannot be intercepted",
            "write it with plain operators: scaled_dot_product_attention instead of flex_attention, `if` instead of "
            "cond",
        )


def refuse_unsupported(func: Any, types: Sequence[type]) -> None:
    """Raise UnsupportedError for DTensor and collectives, which access tensors in threads of their own after they have
    returned.
    """
    if types and any(t.__module__.startswith("torch.distributed.tensor") for t in types):
        raise unsupported(
            f"{func._schema.name} of DTensor cannot be intercepted", "use plain tensors in one process, or no budget"
        )
    refuse_collective(func)


def refuse_collective(func: Any) -> None:
    """Raise UnsupportedError for an operator that moves tensors between processes (NCCL, gloo)."""
    if not _is_collective(func):
        return
    raise unsupported(
        f"{func._schema.name} of torch.distributed moves tensors without operators, in threads of its own",
        "run one process without DistributedDataParallel and process groups, or without a budget",
    )
