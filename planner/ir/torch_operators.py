"""Turn the names in a graph into torch's operators and arguments.

Only names on the planner's list become anything.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from planner.ir.graph import Argument, GraphError, Named
from planner.ir.operators import OperatorError, check_operator

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": _DTYPES,
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "channels_last": torch.channels_last,
        "preserve_format": torch.preserve_format,
        "channels_last_3d": torch.channels_last_3d,
    },
}


def resolve(name: str) -> Callable[..., Any]:
    """Return torch's operator of this name.

    Raises OperatorError for any that is not allowed or does not exist.
    """
    check_operator(name)
    match = re.fullmatch(r"aten::([A-Za-z0-9_]+)(?:\.([A-Za-z0-9_]+))?", name)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    overload = getattr(packet, match[2] or "default", None) if match and packet is not None else None
    if overload is None:
        raise OperatorError(f"torch {torch.__version__} has no operator {name}; plan the job again with this version")
    result: Callable[..., Any] = overload
    return result


def dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name."""
    return _DTYPES[name]


def named(argument: Named) -> Any:
    """Return one of torch's named objects.

    Raises GraphError for one that is not supported.
    """
    try:
        return _NAMED[argument.kind][argument.name]
    except KeyError:
        raise GraphError(f"the argument {argument.kind} {argument.name!r} is not supported") from None


def literal(argument: Argument) -> Any:
    """Return a constant argument as torch takes it."""
    if isinstance(argument, Named):
        return named(argument)
    if isinstance(argument, tuple):
        return [literal(a) for a in argument]
    return argument
