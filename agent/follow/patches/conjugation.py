"""Lazy conjugates and negatives inside kernels that call operators themselves, as without a dispatch mode.

While a dispatch mode handles an operator, every key above it is switched off, Conjugate and Negative too. A kernel that takes
`x.mH()` of a complex matrix and calls the next operator with it (`linalg_pinv`, `linalg_lstsq`) would compute with the numbers
that are not conjugated.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
_NUMBERS = frozenset((int, float, bool, str, type(None)))


def is_needed(args: Sequence[Any]) -> bool:
    """Tell whether a kernel may see a conjugate: an operand is complex."""
    for argument in args:
        kind = type(argument)
        if kind in _NUMBERS:  # `isinstance` of these and a tensor takes longer than all the rest
            continue
        if kind is list or kind is tuple:
            if is_needed(argument):
                return True
        elif isinstance(argument, torch.Tensor) and argument.is_complex():
            return True
    return False


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Switch both keys on inside the block, in the handler of a mode."""
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key, was in zip(_KEYS, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)
