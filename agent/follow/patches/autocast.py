"""Autocast inside the few kernels that call operators themselves, as without a dispatch mode.

While a dispatch mode handles an operator, every key above it is switched off, Autocast too. Most kernels compute and never
ask; the fused ones of nn.TransformerEncoder and nn.MultiheadAttention call matrix products, which plain PyTorch casts.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

FUSED = frozenset({"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"})
"""Called by modules directly, never from below an autocast kernel, where plain PyTorch does not cast either."""

_set_enabled = torch.set_autocast_enabled
_program = threading.local()


def watching_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.set_autocast_enabled` that takes note of the program's own setting.

    Each thread's for itself.
    """

    def set_autocast_enabled(*args: Any) -> Any:
        result = original(*args)
        _program.enabled = torch.is_autocast_enabled("cpu")
        return result

    return set_autocast_enabled


def start() -> None:
    """Take note of the setting of this thread as it is outside of any operator."""
    _program.enabled = torch.is_autocast_enabled("cpu")


@contextlib.contextmanager
def as_the_program_has_it() -> Iterator[None]:
    """Switch autocast on inside the block, in the handler of a mode, if the program has it on."""
    if not getattr(_program, "enabled", False):
        yield
        return
    _set_enabled("cpu", True)
    try:
        yield
    finally:
        _set_enabled("cpu", False)  # as the handler found it
