"""From the float graph to int8: calibration, per-channel weights, fixed-point requantisation.

Real value = scale * (q - zero). Activations are int8 with a zero point per tensor, weights int8 in [-127, 127] with one
scale per output channel and no zero point, biases int32 at scale in_scale * weight_scale. The sum of a layer becomes its
output through a 31-bit multiplier and a shift, rounded half up in 64 bits (`port_requantize`):

    q = clamp(floor((sum * multiplier + 2**(shift - 1)) / 2**shift) + zero)

The scheme is that of arXiv 2206.15472 section 2 (all-int8 graph, int32 bias), the rounding rule is ours and exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from port_planner.mcu.ir import WEIGHTED, Clamp, FloatArray, Graph, KernelCall, McuCompileError, OpKind

Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]

SMALLEST_SCALE = 1e-6
BIAS_LIMIT = 2**30
HEADROOM = 1.5  # activations grow while the model adapts; measured on the digits task
WEIGHT_HEADROOM = 1.25  # so do weights; but a coarser scale makes stochastic rounding noisier; measured on digits


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """How one int8 tensor stands for real values."""

    scale: np.float32
    zero: int


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedOp:
    """Everything of one op that the tables hold, beside addresses."""

    op: KernelCall
    inputs: tuple[QuantizedTensor, ...]
    output: QuantizedTensor
    out_min: int
    out_max: int
    weight: Int8Array | None = None
    bias: Int32Array | None = None
    weight_scale: FloatArray | None = None
    multiplier: Int32Array | None = None
    shift: NDArray[np.uint8] | None = None
    add_multipliers: tuple[int, int] = (0, 0)
    add_shift: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedGraph:
    """A graph and, op by op, its quantised tables."""

    graph: Graph
    input: QuantizedTensor
    ops: tuple[QuantizedOp, ...]

    def quantize_input(self, samples: NDArray[np.float32]) -> Int8Array:
        """Return samples [N, C, H, W] or [N, C, W] as int8 [N, bytes], in the arena's order."""
        array = np.asarray(samples, np.float32)
        shape = self.graph.input_shape
        array = array.reshape(len(array), shape.channels, shape.height, shape.width).transpose(0, 2, 3, 1)
        quantized = np.floor(array / self.input.scale + np.float32(0.5)) + self.input.zero
        return np.ascontiguousarray(np.clip(quantized, -128, 127).astype(np.int8).reshape(len(array), -1))


def run_float(graph: Graph, samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every tensor of the float graph for samples [N, C, H, W].

    The importer is checked against this.
    """
    shape = graph.input_shape
    tensors = {graph.input_name: samples.reshape(-1, shape.channels, shape.height, shape.width)}
    for op in graph.ops:
        tensors[op.name] = _clamped(op.clamp, _float_op(op, [tensors[name] for name in op.inputs]))
    return tensors


def torch_weight(op: KernelCall, weight: NDArray[np.generic]) -> torch.Tensor:
    """Return weights of the graph's layout in torch's layout [out, in / groups, height, width]."""
    tensor = torch.from_numpy(np.ascontiguousarray(weight))
    return tensor.permute(2, 0, 1)[:, None] if op.kind is OpKind.DEPTHWISE else tensor.permute(0, 3, 1, 2)


def flat_input(op: KernelCall, tensor: torch.Tensor) -> torch.Tensor:
    """Return an op's input [N, C, H, W] as the op sees it: the linear layers read [H, W, C] as channels."""
    if (tensor.shape[2], tensor.shape[3]) == (op.in_shape.height, op.in_shape.width):
        return tensor
    return tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1, 1, 1)


def _float_op(op: KernelCall, inputs: list[torch.Tensor]) -> torch.Tensor:
    if op.kind is OpKind.ADD:
        return inputs[0] + inputs[1]
    if op.kind is OpKind.AVERAGE_POOL:
        return F.avg_pool2d(inputs[0], op.kernel, op.stride, op.padding)
    if op.kind is OpKind.MAX_POOL:
        return F.max_pool2d(inputs[0], op.kernel, op.stride, op.padding)
    weight, bias = weights_of(op)
    groups = op.in_shape.channels if op.kind is OpKind.DEPTHWISE else 1
    data = flat_input(op, inputs[0])
    return F.conv2d(data, torch_weight(op, weight), torch.from_numpy(bias), op.stride, op.padding, 1, groups)


def weights_of(op: KernelCall) -> tuple[FloatArray, FloatArray]:
    """Return weight and bias of an op that has them.

    Raises McuCompileError for an op without.
    """
    if op.weight is None or op.bias is None:
        raise McuCompileError(op.name, "has no weights", "this is a defect of the importer")
    return op.weight, op.bias


def _clamped(clamp: Clamp, tensor: torch.Tensor) -> torch.Tensor:
    low, high = clamp.value
    return tensor if low is None and high is None else tensor.clamp(low, high)


def quantize(graph: Graph, calibration: NDArray[np.float32], headroom: float = HEADROOM) -> QuantizedGraph:
    """Return the int8 graph, its ranges taken from `calibration` [N, C, H, W].

    A few dozen samples are enough.

    `headroom` widens every activation range but the input's, for a model that will keep learning. Weights get as
    much, up to WEIGHT_HEADROOM: with none, the largest weight of every row starts at its limit and cannot grow.
    Raises McuCompileError for a `headroom` below 1.
    """
    if headroom < 1.0:
        raise McuCompileError("headroom", f"{headroom} would clip the calibration data", "use 1.0 or more")
    with torch.no_grad():
        tensors = run_float(graph, torch.from_numpy(np.ascontiguousarray(calibration, dtype=np.float32)))
    formats = {graph.input_name: _tensor_format(tensors[graph.input_name], Clamp.NONE, 1.0)}
    ops = []
    for op in graph.ops:
        inputs = tuple(formats[name] for name in op.inputs)
        quantized = _quantize_op(op, inputs, tensors[op.name], headroom)
        formats[op.name] = quantized.output
        ops.append(quantized)
    return QuantizedGraph(graph, formats[graph.input_name], tuple(ops))


def _tensor_format(tensor: torch.Tensor, clamp: Clamp, headroom: float) -> QuantizedTensor:
    low, high = min(float(tensor.min()), 0.0) * headroom, max(float(tensor.max()), 0.0) * headroom
    if clamp.value[1] is not None:
        high = min(high, clamp.value[1])
    scale = np.float32(max((high - low) / 255.0, SMALLEST_SCALE))
    return QuantizedTensor(scale, int(np.clip(round(-128 - low / float(scale)), -128, 127)))


def _limits(clamp: Clamp, output: QuantizedTensor) -> tuple[int, int]:
    low, high = clamp.value
    least = -128 if low is None else max(-128, output.zero)
    most = 127 if high is None else min(127, output.zero + round(high / float(output.scale)))
    return least, most


def _quantize_op(
    op: KernelCall, inputs: tuple[QuantizedTensor, ...], result: torch.Tensor, headroom: float
) -> QuantizedOp:
    if op.kind in (OpKind.AVERAGE_POOL, OpKind.MAX_POOL):
        return QuantizedOp(op, inputs, inputs[0], *_limits(op.clamp, inputs[0]))
    output = _tensor_format(result, op.clamp, headroom)
    if op.kind is OpKind.ADD:
        return _quantize_add(op, inputs, output)
    return _quantize_weighted(op, inputs[0], output, min(headroom, WEIGHT_HEADROOM))


def _quantize_add(op: KernelCall, inputs: tuple[QuantizedTensor, ...], output: QuantizedTensor) -> QuantizedOp:
    """Both inputs share one shift.

    |x - zero| <= 255 and multipliers below 2**22 keep the sum within 31 bits.
    """
    ratios = [float(tensor.scale) / float(output.scale) for tensor in inputs]
    shift = 1
    while shift < 30 and max(ratios) * 2.0 ** (shift + 1) < 2**22:
        shift += 1
    first, second = (round(ratio * 2**shift) for ratio in ratios)
    return QuantizedOp(op, inputs, output, *_limits(op.clamp, output), add_multipliers=(first, second), add_shift=shift)


def _quantize_weighted(
    op: KernelCall, source: QuantizedTensor, output: QuantizedTensor, headroom: float
) -> QuantizedOp:
    weight, bias = weights_of(op)
    by_channel = np.moveaxis(weight, -1, 0).reshape(op.out_shape.channels, -1)
    if op.kind is not OpKind.DEPTHWISE:
        by_channel = weight.reshape(op.out_shape.channels, -1)
    scale = np.maximum(np.abs(by_channel).max(axis=1) * (headroom / 127.0), SMALLEST_SCALE).astype(np.float32)
    divisor = scale if op.kind is OpKind.DEPTHWISE else scale[:, None, None, None]
    quantized = np.clip(np.round(weight / divisor), -127, 127).astype(np.int8)
    sums = float(source.scale) * scale.astype(np.float64)
    whole_bias = np.clip(np.round(bias / sums), -BIAS_LIMIT, BIAS_LIMIT).astype(np.int32)
    if op.kind is OpKind.CLASSIFIER:
        return QuantizedOp(op, (source,), output, -128, 127, quantized, whole_bias, scale)
    output = _representable(output, float(sums.max()))
    multiplier, shift = requantisation(sums / float(output.scale))
    limits = _limits(op.clamp, output)
    return QuantizedOp(op, (source,), output, *limits, quantized, whole_bias, scale, multiplier, shift)


def _representable(output: QuantizedTensor, largest_sum_scale: float) -> QuantizedTensor:
    """Coarsen the output until every ratio is below 1/4, which a shift of 33 needs.

    Only tiny outputs come here.
    """
    if largest_sum_scale / float(output.scale) < 0.2499:
        return output
    return QuantizedTensor(np.float32(largest_sum_scale / 0.2499), output.zero)


def requantisation(ratios: NDArray[np.float64]) -> tuple[Int32Array, NDArray[np.uint8]]:
    """Return multiplier and shift per channel: ratio = multiplier / 2**shift.

    33 <= shift <= 62, multiplier < 2**31.
    """
    _, exponent = np.frexp(ratios)
    shift = np.clip(31 - exponent, 33, 62)
    multiplier = np.round(ratios * 2.0**shift)
    over = (multiplier >= 2**31) & (shift > 33)  # rounding up to the next power of two
    shift = np.where(over, shift - 1, shift)
    multiplier = np.minimum(np.where(over, multiplier / 2, multiplier), 2**31 - 1)
    return multiplier.astype(np.int32), shift.astype(np.uint8)


__all__ = [
    "HEADROOM",
    "WEIGHTED",
    "QuantizedGraph",
    "QuantizedOp",
    "QuantizedTensor",
    "flat_input",
    "quantize",
    "requantisation",
    "run_float",
    "torch_weight",
    "weights_of",
]
