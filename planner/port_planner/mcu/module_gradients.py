"""Check what a board trains against the module's own gradients.

A board does not train what the module does not train: frozen parameters, layers under `no_grad`, missing biases. A
module whose gradients differ from those of the graph is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from port_planner.mcu.ir import Graph, KernelCall, LayerOrigin, McuCompileError, OpKind
from port_planner.mcu.module_trace import softmax_as
from port_planner.mcu.quantize import run_float, torch_weight, weights_of
from port_planner.mcu.torch_axes import TorchAxes
from port_planner.torch_compat.autograd import has_gradient_hooks

SAMPLES = 8
TOLERANCE = 0.05
"""Relative to the norm of a layer's gradient."""
MIN_SHARE = 1e-3
"""Relative to the largest norm: layers with smaller gradients are compared with this one."""

Gradients = Mapping[str, torch.Tensor]


def trained_as_module(
    module: nn.Module, graph: Graph, logits: tuple[str, TorchAxes], has_softmax: bool, samples: torch.Tensor
) -> Graph:
    """Return the graph with what the module trains of each layer marked, and a note of the
    layers that it does not train.

    `logits`: the tensor of the graph that the module returns, and how torch sees it; `has_softmax`: through a softmax.
    Raises McuCompileError, with the layer, if a gradient of the graph differs from the module's, or if torch has none;
    for a parameter with hooks on its gradient; and for a network without weights.
    """
    if not graph.weighted():
        raise McuCompileError(graph.name, "no layer has weights", "give it one, of which a board can learn")
    _refuse_hooks(module)
    chunk, tensors = samples[:SAMPLES].double(), _double_tensors(module)
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    with torch.enable_grad(), _one_thread():
        answer = functional_call(module, tensors, (chunk.clone(),), tie_weights=False)
        weights = {op.name: _leaves(op) for op in graph.weighted()}
        found = logits[1].as_torch(run_float(graph, chunk, weights)[logits[0]])
        if has_softmax:
            found = softmax_as(answer, found)
        direction = torch.randn(answer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (found * direction).sum().backward()
        wanted = _module_gradients(parameters, answer, direction)
    _refuse_difference(graph, weights, wanted)
    ops = tuple(_marked(op, wanted) for op in graph.ops)
    return replace(graph, ops=ops, notes=graph.notes + _notes(replace(graph, ops=ops), wanted))


def _notes(graph: Graph, wanted: Gradients) -> tuple[str, ...]:
    """Return notes on what the module does not train, and on what the module trains but a board does not."""
    origins = [op.origin for op in graph.ops if op.origin]
    frozen = [origin.layer or origin.norm for origin in origins if not (origin.trains_weight or origin.trains_bias)]
    known = {name for o in origins for name in (o.weight, o.bias, f"{o.norm}.weight", f"{o.norm}.bias")}
    known |= {name for names in graph.same if known.intersection(names) for name in names}
    sentences = {
        "not trained, because the module does not train them": dict.fromkeys(frozen),
        "trained by the module, but not on a board": dict.fromkeys(name for name in wanted if name not in known),
    }
    return tuple(f"{sentence}: {', '.join(names)}" for sentence, names in sentences.items() if names)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: with so few samples, several threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _leaves(op: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = weights_of(op)
    return torch_weight(op, weight).double().requires_grad_(), torch.from_numpy(bias).double().requires_grad_()


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on the gradients of parameters, which the copies that are compared do not have."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and has_gradient_hooks(parameter):
            raise McuCompileError(
                name,
                "a hook is registered on its gradient, and a board runs no hooks",
                "remove it: handle.remove() of the handle that register_hook or register_post_accumulate_grad_hook "
                "returned",
            )


def _double_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of parameters and buffers in double precision, where rounding hardly ever
    moves a value across a kink.

    Each place in a module comes once, by the first of its names: `functional_call` would put a place of two names back
    wrongly. Places that share a tensor share its copy.
    """
    copies: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for path, inner in module.named_modules():
        for name, tensor in (
            *inner.named_parameters(recurse=False, remove_duplicate=False),
            *inner.named_buffers(recurse=False, remove_duplicate=False),
        ):
            copy = copies.setdefault(id(tensor), _double(tensor))
            found[f"{path}.{name}" if path else name] = copy
    return found


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().double(), tensor.requires_grad)
    return tensor.double() if tensor.is_floating_point() else tensor


def _module_gradients(
    parameters: Mapping[str, torch.Tensor], answer: torch.Tensor, direction: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients that reach the module's parameters, by the parameter's name."""
    named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not answer.requires_grad or not named:
        return {}
    try:
        gradients = torch.autograd.grad((answer * direction).sum(), list(named.values()), allow_unused=True)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise McuCompileError("module", f"torch cannot train it ({first_line})", "avoid in-place changes") from error
    return {name: gradient for name, gradient in zip(named, gradients, strict=True) if gradient is not None}


def _marked(op: KernelCall, wanted: Gradients) -> KernelCall:
    origin = op.origin
    if origin is None:
        return op
    biases = {origin.bias} if origin.layer else set()
    biases |= {f"{origin.norm}.bias"} if origin.norm else set()
    weight = origin.weight if origin.layer else f"{origin.norm}.weight"
    return replace(op, origin=replace(origin, trains_weight=weight in wanted, trains_bias=bool(biases & wanted.keys())))


def _refuse_difference(
    graph: Graph, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]], wanted: Gradients
) -> None:
    """Compare layer by layer; for weights used twice, the module has only the sum."""
    shared = {name for op in graph.ops if op.shares for name in (op.name, op.shares)}
    least = MIN_SHARE * max((float(gradient.norm()) for gradient in wanted.values()), default=0.0)
    for op in graph.weighted():
        if op.origin is None or op.name in shared:
            continue
        for name, found in _layer_gradients(op, op.origin, graph, weights[op.name]).items():
            if name not in wanted:
                continue
            expected = wanted[name].reshape(found.shape)
            difference, size = float((found - expected).norm()), max(float(expected.norm()), least)
            if not difference <= TOLERANCE * size:
                raise McuCompileError(
                    name,
                    "its gradient in the compiled network differs from the module's by "
                    f"{difference / size if size else np.inf:.0%}",
                    "remove what changes gradients by itself: hooks, functions with their own backward",
                )


def _layer_gradients(
    op: KernelCall, origin: LayerOrigin, graph: Graph, weights: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return an op's gradients as those of the module's parameters, by their names."""
    weight, bias = (tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in weights)
    one = torch.ones(len(bias), dtype=torch.float64)
    deviation, mean, gain = one, torch.zeros_like(one), one
    if origin.norm:
        state = {
            name: torch.from_numpy(values).double()
            for name, values in graph.state.items()
            if name.startswith(origin.norm)
        }
        deviation = (state[f"{origin.norm}.running_var"] + origin.norm_eps).sqrt()
        mean, gain = state[f"{origin.norm}.running_mean"], state.get(f"{origin.norm}.weight", one)
    found = {f"{origin.norm}.bias": bias} if origin.norm else {}
    if not origin.layer:
        return found | {f"{origin.norm}.weight": (weight.reshape(-1) - bias * mean) / deviation}
    scale = gain / deviation
    laid = weight.permute(2, 3, 1, 0) if op.kind is OpKind.DEPTHWISE else weight.permute(0, 2, 3, 1)
    scaled = laid * (scale if op.kind is OpKind.DEPTHWISE else scale[:, None, None, None])
    moved = scaled.reshape([origin.extents[axis] for axis in origin.order])
    back = moved.permute([int(axis) for axis in np.argsort(origin.order)])
    return found | {origin.weight: back, origin.bias: bias * scale}


__all__ = ["trained_as_module"]
