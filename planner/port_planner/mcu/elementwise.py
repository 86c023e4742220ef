"""Functions of one value: which layers and functions of torch are one, and what they compute by themselves.

A board holds such a function as a table of the 256 codes of its input, so that one kernel runs them all.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx, nn

from port_planner.mcu.ir import Elementwise

MODULES = (
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.SiLU,
    nn.GELU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Softplus,
    nn.Softsign,
    nn.Mish,
    nn.LogSigmoid,
)
NAMES = frozenset(
    {
        "abs",
        "add",
        "celu",
        "clamp",
        "clip",
        "div",
        "elu",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "iadd",
        "imul",
        "isub",
        "itruediv",
        "leaky_relu",
        "logsigmoid",
        "mish",
        "mul",
        "neg",
        "pow",
        "rsub",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "softsign",
        "square",
        "sub",
        "tanh",
        "truediv",
    }
)
"""Functions and methods of torch, and Python's operators, all of whose other arguments are numbers."""


def node_function(node: fx.Node, name: str) -> Elementwise | None:
    """Return the function of one value that a call is; None where it is none, or reads another tensor.

    `name`: that of the function or method, without the underscore of those in place.
    """
    if name not in NAMES or len(node.all_input_nodes) != 1:
        return None

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()  # it may be changed in place
        arguments = fx.map_arg(node.args, lambda _: copy)
        function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        return cast(torch.Tensor, function(*arguments, **node.kwargs))

    return apply


def module_function(module: nn.Module) -> Elementwise | None:
    """Return the function of one value that a layer is; None where it is none."""
    if not isinstance(module, MODULES):
        return None
    return lambda tensor: cast(torch.Tensor, module(tensor.clone()))


__all__ = ["module_function", "node_function"]
