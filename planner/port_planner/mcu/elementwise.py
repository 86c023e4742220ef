"""Functions of one value: which layers and functions of torch are such functions, and what they compute.

A board holds such a function as a table of the 256 codes of its input, so that one kernel runs them all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import cast

import torch
from torch import fx, nn
from torch.nn import functional

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
FUNCTIONS: frozenset[Callable[..., object]] = frozenset(
    {
        torch.abs,
        torch.add,
        torch.celu,
        torch.clamp,
        torch.clip,
        torch.div,
        torch.mul,
        torch.neg,
        torch.pow,
        torch.rsub,
        torch.selu,
        torch.sigmoid,
        torch.square,
        torch.sub,
        torch.tanh,
        functional.elu,
        functional.gelu,
        functional.hardsigmoid,
        functional.hardswish,
        functional.hardtanh,
        functional.leaky_relu,
        functional.logsigmoid,
        functional.mish,
        functional.silu,
        functional.softplus,
        functional.softsign,
        operator.iadd,
        operator.imul,
        operator.isub,
        operator.itruediv,
        operator.truediv,
    }
)
"""Functions of torch and Python whose other arguments are all numbers."""
HOMES = (torch, functional, operator)


def node_function(node: fx.Node, name: str) -> Elementwise | None:
    """Return the function of one value that a call computes; None for other calls, and if it reads another tensor.

    `name`: that of the function or method, without the trailing underscore of in-place variants.
    """
    if len(node.all_input_nodes) != 1 or not _is_torchs(node.target, name):
        return None

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()  # the function may work in place
        arguments = fx.map_arg(node.args, lambda _: copy)
        function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        return cast(torch.Tensor, function(*arguments, **node.kwargs))

    return apply


def _is_torchs(target: object, name: str) -> bool:
    """Return whether a function belongs to torch; other libraries may define functions of the same name."""
    if not any(getattr(home, name, None) in FUNCTIONS for home in HOMES):
        return False
    return isinstance(target, str) or any(
        getattr(home, getattr(target, "__name__", ""), None) is target for home in HOMES
    )


def module_function(module: nn.Module) -> Elementwise | None:
    """Return the function of one value that a layer computes; None for other layers."""
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        slope = float(module.weight)
        return lambda tensor: functional.leaky_relu(tensor, slope)
    if not isinstance(module, MODULES):
        return None
    return lambda tensor: cast(torch.Tensor, module(tensor.clone()))


__all__ = ["module_function", "node_function"]
