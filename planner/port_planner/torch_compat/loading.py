"""What torch imports although hardly any program needs it, and how that is avoided. Needs no torch itself."""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from port_planner.torch_compat.parts import require, use_part, uses

DYNAMO = "torch._dynamo"
STANDS_ALONE = f"{DYNAMO}._trace_wrapped_higher_order_op"
"""A submodule that needs nothing from its package; transformers imports it for its attention masks."""
_META_KERNELS = "torch._meta_registrations"
_CACHED_ON_FUNCTION = "__dynamo_disable"
"""Attribute in which torch._disable_dynamo stores the result of `disable` (torch/_compile.py)."""
CALLBACK = "_callback_from_stance"
"""Name of the function of `compiler_frames` that compiled code asks how to run."""


@uses(_META_KERNELS, "each process that computes takes 11 MiB more")
@contextlib.contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Import torch in the block without its Python code for the meta device; later imports add that code."""
    held = sys.modules[_META_KERNELS] = types.ModuleType(_META_KERNELS)
    try:
        yield
        importlib.import_module("torch._prims.rng_prims")  # torch.Generator asks for it
    finally:
        del sys.modules[_META_KERNELS]
    torch: Any = sys.modules["torch"]
    if vars(torch).get("_meta_registrations") is held:
        del torch._meta_registrations


def _can_be_marked() -> None:
    never_compile(lambda: None)


@uses("torch._C._dynamo.eval_frame.set_code_exec_strategy", "the follower is compiled, too", _can_be_marked)
def never_compile(function: Callable[..., Any]) -> None:
    """Exclude a function and its callees from torch.compile, like torch._dynamo.disable, without loading it.

    Its wrapper would cost two calls each time; the mark on the code costs nothing.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def bind_dynamo(module: types.ModuleType) -> None:
    """Put a module in the place of torch._dynamo."""
    import torch

    sys.modules[DYNAMO] = torch._dynamo = module


def unbind_dynamo() -> None:
    """Remove the module that replaces torch._dynamo from torch."""
    import torch

    del torch._dynamo


def forget_disabled(function: Callable[..., Any]) -> None:
    """Make torch decide again how to call a function that is excluded from the compiler."""
    if getattr(function, _CACHED_ON_FUNCTION, None) is function:
        delattr(function, _CACHED_ON_FUNCTION)


def mark_disabled(
    call: Callable[..., Any], function: Callable[..., Any], reason: str | None, *, recursive: bool
) -> None:
    """Give `call` the attributes of the result of torch._dynamo.disable(function) (torch/_dynamo/eval_frame.py)."""
    vars(call).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=reason,
        _torchdynamo_disable_recursive=recursive,
        _torchdynamo_orig_callable=function,
        _torchdynamo_wrapper_id=id(call),
    )


def compiler_frames() -> types.ModuleType | None:
    """Return torch's module that runs compiled code, if anything may have been compiled."""
    return sys.modules.get(f"{DYNAMO}.eval_frame")


def compiling_disabled() -> bool | None:
    """Return whether the compiler's configuration disables it; None if it is not loaded."""
    config: Any = sys.modules.get(f"{DYNAMO}.config")
    return None if config is None else bool(config.disable)


def compiler_of(callback: Any) -> str:
    """Return the name of the backend that created compiled code."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return str(getattr(callback, "compiler_name", type(callback).__name__))


@uses("torch.nn.Module._compiled_call_impl", "a bundle is planned of what torch.compile computes otherwise")
def is_compiled(code: Any) -> bool:
    """Return whether a module or function was passed to torch.compile."""
    if getattr(code, "_compiled_call_impl", None) is not None or type(code).__name__ == "OptimizedModule":
        return True
    return hasattr(code, "_torchdynamo_orig_callable") and not getattr(code, "_torchdynamo_disable", False)


def _has_its_place() -> None:
    require(importlib.util.find_spec(STANDS_ALONE), f"no module {STANDS_ALONE}")


use_part(DYNAMO, "its place is held until somebody compiles", "each process takes 70 MiB more", _has_its_place)
