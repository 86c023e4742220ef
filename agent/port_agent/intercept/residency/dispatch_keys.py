"""Autocast, lazy conjugation and the counting of writes inside kernels that call operators themselves, as without a dispatch mode.

While a dispatch mode handles an operator, every key above it is switched off: Autocast, Conjugate, Negative, ADInplaceOrView. Most
kernels compute and never ask. Those that call other operators do: matrix products inside the fused ones of nn.TransformerEncoder and of
`bilinear` are cast by plain PyTorch, `x.mH()` of a complex matrix inside `linalg_pinv` would be taken for x.mT(), and of what
`_foreach_mul_` multiplies autograd would not know that it was changed.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from port_agent.intercept.residency.refusals import unsupported
from port_planner.operators import operator_of
from port_planner.torch_compat.modes import DispatchKey, has_kernel

_AUTOCAST = DispatchKey.AutocastCPU
_LAZY = (DispatchKey.Conjugate, DispatchKey.Negative)
_COUNTING = DispatchKey.ADInplaceOrView
_NUMBERS = frozenset((int, float, bool, str, type(None)))

_program = threading.local()


def watching_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.set_autocast_enabled` that takes note of the program's own setting.

    Each thread's for itself.
    """

    def set_autocast_enabled(*args: Any) -> Any:
        result = original(*args)
        _program.autocasts = torch.is_autocast_enabled("cpu")
        return result

    return set_autocast_enabled


def start() -> None:
    """Take note of the setting of this thread as it is outside of any operator."""
    _program.autocasts = torch.is_autocast_enabled("cpu")


@cache
def counts_inside(func: Any) -> bool:
    """Return whether nobody but the kernel of an operator counts that its arguments are written."""
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return written and not has_kernel(func, _COUNTING)


def hidden_keys(name: str, args: Sequence[Any], *, counting: bool = False) -> tuple[Any, ...]:
    """Return what the kernel of an operator would see without a mode: Autocast where the program has it on, Conjugate for complex operands.

    `counting`: it counts what it writes. Raises UnsupportedError where that cannot be told.
    """
    keys = _LAZY if _has_complex(args) else ()
    if counting:
        keys = (*keys, _COUNTING)
    if not getattr(_program, "autocasts", False):
        return keys
    if name == "aten::linalg_pinv":
        raise unsupported(
            "linalg_pinv under autocast casts inside, or not, as its caller does",
            "call it under torch.autocast(enabled=False)",
        )
    return (_AUTOCAST, *keys) if operator_of(name).casts_inside else keys


def _has_complex(args: Sequence[Any]) -> bool:
    for argument in args:
        kind = type(argument)
        if kind in _NUMBERS:  # `isinstance` of these and a tensor takes longer than all the rest
            continue
        if kind is list or kind is tuple:
            if _has_complex(argument):
                return True
        elif isinstance(argument, torch.Tensor) and argument.is_complex():
            return True
    return False
