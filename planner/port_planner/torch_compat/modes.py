"""Dispatch modes, the keys that a mode's handler does not see, and the kernels of composite operators."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

from port_planner.torch_compat.parts import require, use_part, uses

__all__ = ["DispatchKey", "HigherOrderOperator", "TorchDispatchMode", "is_traceable_wrapper_subclass", "pytree"]

current_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
pop_mode: Callable[[], Any] = _pop_mode
push_mode: Callable[[Any], None] = _push_mode
"""Torch's own functions, bound directly, because each operator calls them."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap in torch._dynamo, which would take 70 MiB;
    uses `loading.never_compile`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _composites_are_known() -> None:
    key = DispatchKey.CompositeImplicitAutograd
    require(has_kernel(torch.ops.aten.linear.default, key), "aten::linear is not composite")
    require(not has_kernel(torch.ops.aten.native_batch_norm.default, key), "aten::native_batch_norm is composite")


@uses(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "composite operators are not known as such", _composites_are_known
)
def has_kernel(func: Any, key: DispatchKey) -> bool:
    """Return whether an operator has a kernel of C++ for a key;
    OpOverload.has_kernel_for_dispatch_key counts Python's, too.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name))


@uses("torch.ops.aten.gru.input._op_dk", "composites run by Python's decompositions: other last digits (gru)")
def composite(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own kernel of a composite operator, which decides as without a mode."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@uses("torch.library.Library._destroy", "operators that were replaced stay so after the budget")
def remove_kernels(library: torch.library.Library) -> None:
    """Remove the kernels with which a library replaced torch's, immediately instead of at garbage collection."""
    library._destroy()


@uses("torch._C._dispatch_tls_set_dispatch_key_excluded", "autocast and conjugates inside of kernels: other values")
@contextlib.contextmanager
def seeing(keys: tuple[DispatchKey, ...]) -> Iterator[None]:
    """Enable keys inside the block, in the handler of a mode, where they are disabled."""
    switched = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in switched:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in switched:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _mode_can_be_lifted() -> None:
    mode: Any = OperatorMode
    with mode() as entered:
        require(current_modes()[-1:] == [entered], "the mode that was entered last is not the last on the stack")
        with without_modes():
            require(current_modes() == [], "modes are on where all are switched off")
        push_mode(pop_mode())


_DISPATCH = "torch.utils._python_dispatch"
use_part(f"{_DISPATCH}.TorchDispatchMode", "sees every operator", "nothing is planned or followed", _mode_can_be_lifted)
use_part(f"{_DISPATCH}.TorchDispatchMode._should_skip_dynamo", "keeps _dynamo away", "processes take 70 MiB more")
use_part(f"{_DISPATCH}.is_traceable_wrapper_subclass", "such take themselves apart", "their parts are not followed")
use_part("torch.utils._pytree.tree_flatten", "finds tensors in what is nested", "steps cannot be recorded")
use_part("torch._ops.HigherOrderOperator", "is refused by name", "flex_attention and cond end in an error of torch's")
for _key in ("AutocastCPU", "Conjugate", "Negative", "ADInplaceOrView", "AutogradFunctionality"):
    use_part(f"torch._C.DispatchKey.{_key}", "is off in a mode's handler, and kernels ask for it", "other values")
