"""Forward-mode differentiation (`torch.autograd.forward_ad`): which tensors have tangents, and for which the
last digits would differ.

torch computes a tangent after the operator, by formulas that depend on whether a dispatch mode is on
(`areAnyTensorSubclassLike`). Inside `torch.func`, they depend on its wrappers instead, so plain
PyTorch uses the same formulas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from port_agent.intercept.residency.operands import tensors_in
from port_agent.intercept.residency.refusals import unsupported
from port_planner.operators import operator_of
from port_planner.torch_compat.autograd import forward_differentiating
from port_planner.torch_compat.modes import DispatchKey, seeing

_ASKED_THROUGH = (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView)
"""Dispatch keys that are disabled while a mode handles an operator."""


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent of a tensor if it has one, also from inside the handler of a mode."""
    if not forward_differentiating() or tensor.is_inference():
        return None
    with seeing(_ASKED_THROUGH):
        tangent: torch.Tensor | None = forward_ad.unpack_dual(tensor).tangent
    return tangent


def refuse_tangents(func: Any, args: Sequence[Any]) -> None:
    """Raise UnsupportedError for an operator whose tangent would have different last digits."""
    if not forward_differentiating() or not operator_of(func._schema.name).other_tangents:
        return
    if any(tangent_of(tensor) is not None for tensor in tensors_in(args)):
        raise unsupported(
            f"the tangent of {func._schema.name} has different last digits while operators are intercepted",
            "use torch.func.jvp, or run the program without a budget",
        )
