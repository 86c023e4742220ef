"""Gated recurrent units as two ops: the product with every step of the input, a convolution, and the states one by one.

The first is trained, quantised and computed as any convolution. The second (firmware/kernels/recurrent.c) reads its
result: what the input gives each gate at each step.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from port_planner.mcu.ir import GATES, FloatArray, KernelCall, LayerOrigin, OpKind, Shape
from port_planner.mcu.torch_axes import TorchAxes, extent


def unsupported_gru(gru: nn.GRU) -> tuple[str, str] | None:
    """Return what a board cannot run of a layer, and the remedy; None if it can run everything."""
    if gru.num_layers > 1:
        return f"{gru.num_layers} layers in one", "use an nn.GRU for each"
    if gru.bidirectional:
        return "two directions", "use bidirectional=False"
    return None if gru.batch_first else ("the batch as its second axis", "use batch_first=True")


def recurrent_ops(gru: nn.GRU, layer: str, seen: TorchAxes, source: str) -> tuple[KernelCall, KernelCall] | None:
    """Return the two ops of a layer, the second without its input. What they compute is [steps, channels], "WC".

    `layer`: its path; `seen`: what torch sees of its input, whose tensor is `source`. None unless that is [steps,
    features] with the steps along one axis of the data.
    """
    time, features = seen.axes if len(seen.axes) == 2 else ("C", "")
    if time not in ("", "H", "W"):
        return None
    shape, width = seen.shape, GATES * gru.hidden_size
    steps = extent(shape, time)
    extents = (width, *(extent(shape, name) for name in features))
    order = (0, *(1 + features.index(name) for name in "HWC" if name in features))
    window, read = (1, 1), Shape(1, steps, shape.elements // steps)
    if time == "W" and shape.height > 1:  # the features of a step are a column
        window, read = (shape.height, 1), shape
    held = {name: _array(tensor) for name, tensor in gru.named_parameters(remove_duplicate=False)}
    zeros = np.zeros(width, np.float32)
    weight = held["weight_ih_l0"].reshape(extents).transpose(order).reshape(width, *window, -1)
    gates = KernelCall(
        "_ih",
        OpKind.CONV,
        (source,),
        read,
        Shape(1, steps, width),
        window,
        weight=np.ascontiguousarray(weight),
        bias=held.get("bias_ih_l0", zeros),
        origin=LayerOrigin(layer, extents, order, part="_ih_l0"),
    )
    states = held["weight_hh_l0"]
    unit = KernelCall(
        "_hh",
        OpKind.GRU,
        (),
        gates.out_shape,
        Shape(1, steps, gru.hidden_size),
        weight=states[:, None, None],
        bias=held.get("bias_hh_l0", zeros),
        origin=LayerOrigin(layer, states.shape, (0, 1), part="_hh_l0"),
    )
    return gates, unit


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.detach().to(torch.float32).cpu().numpy().copy()


def recurrent_states(op: KernelCall, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the states [N, C, H, W] of a unit after each step of its gates' inputs [N, 3 C, H, W]."""
    steps = data.flatten(2).unbind(2)
    state, states = torch.zeros_like(steps[0][:, : op.out_shape.channels]), []
    for step in steps:
        reset, update, new = step.chunk(GATES, 1)
        of_reset, of_update, of_new = F.linear(state, weight.flatten(1), bias).chunk(GATES, 1)
        candidate = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        state = candidate + torch.sigmoid(update + of_update) * (state - candidate)
        states.append(state)
    return torch.stack(states, 2).reshape(len(data), -1, op.out_shape.height, op.out_shape.width)


__all__ = ["recurrent_ops", "recurrent_states", "unsupported_gru"]
