"""Autocast and lazy conjugation inside kernels that call operators themselves, as without a dispatch mode.

While a dispatch mode handles an operator, every key above it is switched off: Autocast, Conjugate, Negative. Most kernels compute
and never ask. Those that call other operators do: matrix products inside the fused ones of nn.TransformerEncoder, `linalg_pinv`
or `bilinear` are cast by plain PyTorch, and `x.mH()` of a complex matrix inside `linalg_pinv` would be taken for x.mT().
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
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


def are_needed(args: Sequence[Any]) -> bool:
    """Tell whether a kernel may see what a mode switched off: the program autocasts, or an operand is complex."""
    return getattr(_program, "autocasts", False) or _has_complex(args)


@contextlib.contextmanager
def as_at_the_call() -> Iterator[None]:
    """Switch on inside the block, in the handler of a mode, what was on where the operator was called.

    Autocast is off there below the kernel of another operator that was cast itself.
    """
    with enable_reentrant_dispatch():
        wanted = [key for key in (_AUTOCAST, *_LAZY) if not torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    switched = [key for key in wanted if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in switched:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in switched:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


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
