"""Autocast, lazy conjugation and write counting inside kernels that call operators themselves, as without a dispatch
mode.

While a dispatch mode handles an operator, every key above it is switched off: Autocast, Conjugate, Negative,
ADInplaceOrView. Most kernels compute without asking for these; those that call other operators depend on them. Plain
PyTorch casts matrix products inside the fused operators of nn.TransformerEncoder and `bilinear`. `x.mH()` of a complex
matrix inside `linalg_pinv` would be taken for x.mT(). Autograd would not know that `_foreach_mul_` changed its
operands.
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
    """Return `torch.set_autocast_enabled` that also records the program's own setting, for each thread."""

    def set_autocast_enabled(*args: Any) -> Any:
        result = original(*args)
        _program.autocasts = torch.is_autocast_enabled("cpu")
        return result

    return set_autocast_enabled


def start() -> None:
    """Record this thread's setting outside any operator."""
    _program.autocasts = torch.is_autocast_enabled("cpu")


@cache
def counts_inside(func: Any) -> bool:
    """Return whether only the kernel of an operator counts writes to its arguments."""
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return written and not has_kernel(func, _COUNTING)


def hidden_keys(name: str, args: Sequence[Any], *, counting: bool = False) -> tuple[Any, ...]:
    """Return the dispatch keys that a kernel would see without a mode: Autocast if the program has it on, Conjugate for
    complex operands.

    `counting`: it counts what it writes. Raises UnsupportedError if the keys cannot be determined.
    """
    keys = _LAZY if _has_complex(args) else ()
    if counting:
        keys = (*keys, _COUNTING)
    if not getattr(_program, "autocasts", False):
        return keys
    if name == "aten::linalg_pinv":
        raise unsupported(
            "linalg_pinv under autocast casts inside depending on its caller",
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
