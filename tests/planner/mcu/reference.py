"""The integer forward pass in torch int64: what the firmware must compute, bit for bit, on every activation.

Written from the number formats of quantize.py, without looking at the kernels: whole tensors, 64-bit integers, floor
division. Convolutions go through float64, where products and sums of int8 data below 2**53 are exact.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from port_planner.mcu.ir import PRODUCTS, McuCompileError, OpKind
from port_planner.mcu.quantize import (
    QuantizedGraph,
    QuantizedOp,
    concat_axis,
    convolved,
    flat_input,
    tabulated_function,
    torch_weight,
)

Array = TypeVar("Array", bound=np.ndarray[Any, Any])


def reference_forward(model: QuantizedGraph, inputs: NDArray[np.int8]) -> dict[str, torch.Tensor]:
    """Return every activation as int64 [N, C, H, W]; the classifier's entry holds its raw sums [N, classes].

    `inputs` is int8 [N, bytes] as `quantize_input` returns it.
    """
    shape = model.graph.input_shape
    start = torch.from_numpy(inputs.astype(np.int64)).reshape(-1, shape.height, shape.width, shape.channels)
    tensors = {model.graph.input_name: start.permute(0, 3, 1, 2).contiguous()}
    for op in model.ops:
        tensors[op.op.name] = _forward(op, [tensors[name] for name in op.op.inputs])
    return tensors


def reference_logits(model: QuantizedGraph, sums: torch.Tensor) -> NDArray[np.float32]:
    """Return the classifier's float32 logits of its raw sums, rounded as the firmware does: two fp32 products."""
    last = model.ops[-1]
    scale = last.inputs[0].scale * _present(last, last.weight_scale)
    return sums.numpy().astype(np.float32) * scale


def _forward(op: QuantizedOp, inputs: list[torch.Tensor]) -> torch.Tensor:
    kind = op.op.kind
    if kind is OpKind.MAX_POOL:
        pooled = F.max_pool2d(inputs[0].double(), op.op.kernel, op.op.stride, op.op.padding).long()
        return pooled.clamp(op.out_min, op.out_max)
    if kind is OpKind.AVERAGE_POOL:
        return _average_pool(op, inputs[0])
    if kind is OpKind.ADD:
        return _add(op, inputs[0], inputs[1])
    if kind is OpKind.CONCAT:
        return torch.cat([_moved(op, index, tensor) for index, tensor in enumerate(inputs)], concat_axis(op.op))
    if kind is OpKind.UPSAMPLE:
        return F.interpolate(inputs[0].double(), scale_factor=op.op.kernel).long().clamp(op.out_min, op.out_max)
    if kind is OpKind.TABLE:
        return _function(op, inputs[0])
    if kind in PRODUCTS:
        return _product(op, inputs[0], inputs[1])
    if kind is OpKind.GRU:
        return _states(op, inputs[0])
    sums = _sums(op, inputs[0])
    if kind is OpKind.CLASSIFIER:
        return sums[:, :, 0, 0]
    multiplier = torch.from_numpy(_present(op, op.multiplier).astype(np.int64)).view(1, -1, 1, 1)
    shift = torch.from_numpy(_present(op, op.shift).astype(np.int64)).view(1, -1, 1, 1)
    half = torch.ones_like(shift) << (shift - 1)
    value = ((sums * multiplier + half) >> shift) + op.output.zero
    return value.clamp(op.out_min, op.out_max)


def _present(op: QuantizedOp, array: Array | None) -> Array:
    if array is None:
        raise McuCompileError(op.op.name, "has no quantised weights", "this is a defect of the quantiser")
    return array


def _sums(op: QuantizedOp, data: torch.Tensor) -> torch.Tensor:
    centred = (flat_input(op.op, data) - op.inputs[0].zero).double()
    weight = torch_weight(op.op, _present(op, op.weight)).double()
    bias = torch.from_numpy(_present(op, op.bias).astype(np.int64)).view(1, -1, 1, 1)
    return convolved(op.op, centred, weight, None).long() + bias


def _states(op: QuantizedOp, data: torch.Tensor) -> torch.Tensor:
    """Integer products with the codes of the state before; the rest in float64, with exact exponentials."""
    weight = torch_weight(op.op, _present(op, op.weight)).flatten(1).long()
    bias = torch.from_numpy(_present(op, op.bias).astype(np.int64))
    unit = torch.from_numpy(_present(op, op.weight_scale).astype(np.float64)) * float(op.output.scale)
    given = (data - op.inputs[0].zero).double() * float(op.inputs[0].scale)
    codes = torch.zeros(len(data), op.op.out_shape.channels, dtype=torch.int64)
    state, found = codes.double(), []
    for step in given.flatten(2).unbind(2):
        reset, update, new = step.chunk(3, 1)
        of_reset, of_update, of_new = ((codes @ weight.T + bias).double() * unit).chunk(3, 1)
        candidate = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        gate = torch.sigmoid(update + of_update)
        state = (1 - gate) * candidate + gate * state
        codes = (state / float(op.output.scale) + 0.5).floor().clamp(-128, 127).long()
        found.append(codes)
    return torch.stack(found, 2)[:, :, None]


def _average_pool(op: QuantizedOp, data: torch.Tensor) -> torch.Tensor:
    window = op.op.kernel[0] * op.op.kernel[1]
    centred = (data - op.inputs[0].zero).double()
    sums = F.avg_pool2d(centred, op.op.kernel, op.op.stride, op.op.padding, divisor_override=1).round().long()
    mean = torch.div(2 * sums + window, 2 * window, rounding_mode="floor")
    return (mean + op.output.zero).clamp(op.out_min, op.out_max)


def _add(op: QuantizedOp, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    first, second = op.add_multipliers
    total = (left - op.inputs[0].zero) * first + (right - op.inputs[1].zero) * second
    value = (total + (1 << (op.add_shift - 1))) >> op.add_shift
    return (value + op.output.zero).clamp(op.out_min, op.out_max)


def _moved(op: QuantizedOp, index: int, data: torch.Tensor) -> torch.Tensor:
    """One input of a concatenation at the scale of the output."""
    value = ((data - op.inputs[index].zero) * op.add_multipliers[index] + (1 << (op.add_shift - 1))) >> op.add_shift
    return (value + op.output.zero).clamp(op.out_min, op.out_max)


def _function(op: QuantizedOp, data: torch.Tensor) -> torch.Tensor:
    """The function of the real values, rounded half up."""
    values = tabulated_function(op.op)((data - op.inputs[0].zero).double() * float(op.inputs[0].scale))
    return ((values / float(op.output.scale) + 0.5).floor() + op.output.zero).clamp(op.out_min, op.out_max).long()


def _product(op: QuantizedOp, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = (left - op.inputs[0].zero) * (right - op.inputs[1].zero)
    value = (product * op.add_multipliers[0] + (1 << (op.add_shift - 1))) >> op.add_shift
    return (value + op.output.zero).clamp(op.out_min, op.out_max)
