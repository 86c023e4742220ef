"""Turn the names in a graph into torch's operators and arguments.

Only names on the planner's list are accepted.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from port_planner.ir.allowed_operators import ADD_SCALED, MAXIMUM_OUT, OperatorError, check_operator
from port_planner.ir.graph import Argument, GraphError, NamedArgument, Op, Ref, StepGraph, references
from port_planner.ir.torch_device import known_kinds
from port_planner.operators import base_name, operator_of

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": _DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "channels_last": torch.channels_last,
        "preserve_format": torch.preserve_format,
        "channels_last_3d": torch.channels_last_3d,
    },
}

COMPLEX = "complex"
"""The kind of an argument that names a complex number, as Python spells it."""

MAX_COORDINATE = 1e30
"""Largest coordinate that is still finite in float32 when it is scaled to pixels."""
CONNECTIONIST = "_ctc_loss"
"""Operator whose labels, the second of four tensors or lists, become addresses regardless of their
values, in all its overloads.
"""
_CONNECTIONIST_OPERANDS = 4
REPEATS = "aten::repeat_interleave.Tensor"
"""Operator whose first argument gives the repeats of each index; torch writes that many, whatever their sum."""
RECURRENT = "aten::mkldnn_rnn_layer"
"""A layer of an LSTM by oneDNN."""
_WITH_WORKSPACE = 4
"""The number of tensors such a layer returns; the last is for its backward pass."""
MAX_REPEATS = 2**48
"""Largest number of repeats: more than any address space holds, and far below overflow of a 64-bit sum."""


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
    if name != MAXIMUM_OUT and any(argument.is_out for argument in overload._schema.arguments):
        raise OperatorError(f"the operator {name} writes into a tensor it is given, which is not supported")
    result: Callable[..., Any] = overload
    return result


def function_of(op: Op) -> Callable[..., Any]:
    """Return a function that repeats a recorded call; raise OperatorError as `resolve` does.

    A recurrent layer creates the workspace of its backward pass only if gradients are recorded, as they were if the
    workspace is in the graph. A CTC loss makes its workspace as wide as its labels allow (`of_all_labels`).
    """
    function = resolve(op.name)
    if base_name(op.name) == CONNECTIONIST:
        return lambda *args, **kwargs: of_all_labels(args[1], function(*args, **kwargs))
    if _factor(op) is not None:
        return lambda target, other, *, alpha: target.add_(other, alpha=alpha.item())
    if op.name != RECURRENT or len(op.outputs) < _WITH_WORKSPACE:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return function(*args, **kwargs)

    return run


def of_all_labels(labels: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of a CTC loss in the same shape for all batches.

    The workspace of its backward pass is as wide as the longest sequence of labels in the batch. Here it is made as
    wide as the padded `labels`, one row per sample; nothing reads the rest.
    """
    likelihood, alpha = found
    missing = 2 * labels.shape[1] + 1 - alpha.shape[-1] if labels.dim() > 1 else 0
    return (likelihood, torch.nn.functional.pad(alpha, (0, missing), value=-math.inf)) if missing else found


def shaped_by_contents(op: Op) -> bool:
    """Return whether the shape of an operator's result depends on operand values, such as rows that a mask selects."""
    tags: Sequence[torch.Tag] = resolve(op.name).tags  # type: ignore[attr-defined]
    return torch.Tag.dynamic_output_shape in tags


def _factor(op: Op) -> Ref | None:
    """Return the tensor whose value scales the addend, if the call has one."""
    alpha = dict(op.kwargs).get("alpha") if op.name == ADD_SCALED else None
    return alpha if isinstance(alpha, Ref) else None


def check_arguments(op: Op, graph: StepGraph) -> None:
    """Raise GraphError if a call omits a tensor, or changes a storage that it does not declare.

    torch dereferences missing tensors, and checks of a storage hold only while nothing changes it undeclared.
    """
    given, factor = dict(op.kwargs), _factor(op)
    if factor is not None and graph.values[factor.value].shape:
        raise GraphError(f"{op.name} is scaled by a tensor with more than one number; plan the job again")
    coordinates = operator_of(op.name).coordinates
    if coordinates is not None and coordinates >= len(op.args):
        raise GraphError(f"{op.name} is called without its coordinates; plan the job again")
    if op.name == REPEATS and not (op.args and isinstance(op.args[0], Ref)):
        raise GraphError(f"{op.name} is called without its repeats; plan the job again")
    if base_name(op.name) == CONNECTIONIST and (
        len(op.args) < _CONNECTIONIST_OPERANDS or not all(isinstance(a, Ref) for a in op.args[:2])
    ):
        raise GraphError(f"{op.name} is called without its labels and lengths; plan the job again")
    for i, parameter in enumerate(resolve(op.name)._schema.arguments):  # type: ignore[attr-defined]
        argument = op.args[i] if i < len(op.args) else given.get(parameter.name)
        if argument is None and isinstance(parameter.type, torch.TensorType):
            raise GraphError(f"{op.name} is called without its tensor {parameter.name}; plan the job again")
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            changed = {graph.values[v].storage for v in references(argument)}
            if not changed <= set(op.writes):
                raise GraphError(f"{op.name} changes a storage that its graph does not name; plan the job again")


def dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name."""
    return _DTYPES[name]


def named(argument: NamedArgument) -> Any:
    """Return one of torch's named objects, or a complex number.

    Raises GraphError for one that is not supported.
    """
    if argument.kind == "device" and argument.name in known_kinds():
        return torch.device(argument.name)
    try:
        return complex(argument.name) if argument.kind == COMPLEX else _NAMED[argument.kind][argument.name]
    except (KeyError, ValueError):
        raise GraphError(f"the argument {argument.kind} {argument.name!r} is not supported") from None


def literal(argument: Argument) -> Any:
    """Return a constant argument in torch's form."""
    if isinstance(argument, NamedArgument):
        return named(argument)
    if isinstance(argument, tuple):
        return [literal(a) for a in argument]
    return argument
