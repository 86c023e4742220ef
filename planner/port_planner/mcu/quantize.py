"""From the float graph to int8: calibration, per-channel weights, fixed-point requantisation.

Real value = scale * (q - zero). Activations are int8 with a zero point per tensor. Weights are int8 in [-127, 127] with
one scale per output channel and no zero point. Biases are int32 at scale in_scale * weight_scale. The sum of a layer
becomes its output through a 31-bit multiplier and a shift, rounded half up in 64 bits (`port_requantize`):

    q = clamp(floor((sum * multiplier + 2**(shift - 1)) / 2**shift) + zero)

The scheme is that of arXiv 2206.15472 section 2 (all-int8 graph, int32 bias); the rounding rule is our own and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from port_planner.mcu.ir import (
    PRODUCTS,
    WEIGHTED,
    Clamp,
    Elementwise,
    FloatArray,
    Graph,
    KernelCall,
    McuCompileError,
    OpKind,
)
from port_planner.mcu.recurrent import recurrent_states

Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]

SMALLEST_SCALE = 1e-6
BIAS_LIMIT = 2**30
HEADROOM = 1.5  # activations grow while the model adapts; measured on the digits task
WEIGHT_HEADROOM = 1.25  # weights grow too, but a coarser scale adds noise to stochastic rounding; measured on digits


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """How one int8 tensor represents real values."""

    scale: np.float32
    zero: int


STATE = QuantizedTensor(np.float32(1 / 127), 0)
"""The format of a recurrent unit's state, which lies between -1 and 1 whatever it learns."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedOp:
    """Everything about one op that the tables hold, except addresses.

    `low`: the fraction of weights beyond their codes, in 1/256 above -1/2; None if there is none.
    """

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
    table: Int8Array | None = None
    slope: FloatArray | None = None
    low: NDArray[np.uint8] | None = None

    @property
    def read_scale(self) -> np.float32:
        """The scale of the weights' operand: the input, or the state before."""
        return self.output.scale if self.op.kind is OpKind.GRU else self.inputs[0].scale


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
        return np.ascontiguousarray(np.clip(quantized, -128, 127).astype(np.int8).reshape(len(array), shape.elements))


def run_float(
    graph: Graph, samples: torch.Tensor, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor of the float graph for samples [N, C, H, W]; `weights`: replacements of ops' own, by name.

    The importer is checked against this.
    """
    weights = {} if weights is None else weights
    shape = graph.input_shape
    tensors = {graph.input_name: samples.reshape(-1, shape.channels, shape.height, shape.width)}
    for op in graph.ops:
        tensors[op.name] = float_op(op, [tensors[name] for name in op.inputs], weights.get(op.name))
    return tensors


def torch_weight(op: KernelCall, weight: NDArray[np.generic]) -> torch.Tensor:
    """Return weights in the graph's layout converted to torch's, [out, in / groups, height, width]."""
    tensor = torch.from_numpy(np.ascontiguousarray(weight))
    return tensor.permute(2, 0, 1)[:, None] if op.kind is OpKind.DEPTHWISE else tensor.permute(0, 3, 1, 2)


def flat_input(op: KernelCall, tensor: torch.Tensor) -> torch.Tensor:
    """Return an op's input [N, C, H, W] as the op sees it: linear layers read [H, W, C] as channels."""
    shape = op.in_shape
    if tensor.shape[2:] == (shape.height, shape.width):
        return tensor
    return tensor.permute(0, 2, 3, 1).reshape(-1, shape.height, shape.width, shape.channels).permute(0, 3, 1, 2)


def float_op(
    op: KernelCall, inputs: list[torch.Tensor], weights: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the result of an op in float; `weights`: weight and bias to use instead of its own, in torch's layout."""
    if op.kind in _WEIGHTLESS:
        return _clamped(op.clamp, _WEIGHTLESS[op.kind](op, inputs))
    data = flat_input(op, inputs[0])
    if weights is None:
        weight, bias = weights_of(op)
        weights = torch_weight(op, weight).to(data.dtype), torch.from_numpy(bias).to(data.dtype)
    run = recurrent_states if op.kind is OpKind.GRU else convolved
    return _clamped(op.clamp, run(op, data, *weights))


def convolved(op: KernelCall, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the convolution of an op; `weight` is [out, in / groups, height, width], of transposed ones too."""
    if op.kind is not OpKind.TRANSPOSED:
        return F.conv2d(data, weight, bias, op.stride, op.padding, op.dilation, torch_groups(op))
    groups, (_, inputs, *window) = op.groups, weight.shape
    swapped = weight.reshape(groups, -1, inputs, *window).transpose(1, 2).reshape(groups * inputs, -1, *window)
    whole = (op.out_shape.height, op.out_shape.width)
    before = (op.in_shape.height, op.in_shape.width)
    more = [
        after - ((old - 1) * step - 2 * margin + reach * (taps - 1) + 1)
        for after, old, step, margin, reach, taps in zip(
            whole, before, op.stride, op.padding, op.dilation, op.kernel, strict=True
        )
    ]
    return F.conv_transpose2d(data, swapped, bias, op.stride, op.padding, more, groups, op.dilation)


_WEIGHTLESS: dict[OpKind, Callable[[KernelCall, list[torch.Tensor]], torch.Tensor]] = {
    OpKind.ADD: lambda op, inputs: inputs[0] + inputs[1],
    OpKind.AVERAGE_POOL: lambda op, inputs: F.avg_pool2d(inputs[0], op.kernel, op.stride, op.padding),
    OpKind.MAX_POOL: lambda op, inputs: F.max_pool2d(inputs[0], op.kernel, op.stride, op.padding),
    OpKind.MULTIPLY: lambda op, inputs: inputs[0] * inputs[1],
    OpKind.SCALE: lambda op, inputs: inputs[0] * inputs[1],
    OpKind.CONCAT: lambda op, inputs: torch.cat(inputs, concat_axis(op)),
    OpKind.UPSAMPLE: lambda op, inputs: inputs[0].repeat_interleave(op.kernel[0], 2).repeat_interleave(op.kernel[1], 3),
    OpKind.TABLE: lambda op, inputs: tabulated_function(op)(inputs[0]),
}


def concat_axis(op: KernelCall) -> int:
    """Return the axis of [N, C, H, W] along which a concatenation joins its inputs."""
    if op.in_shape.channels != op.out_shape.channels:
        return 1
    return 3 if op.in_shape.width != op.out_shape.width else 2


def torch_groups(op: KernelCall) -> int:
    """Return the groups of a convolution as torch counts them."""
    return op.in_shape.channels if op.kind is OpKind.DEPTHWISE else op.groups


def tabulated_function(op: KernelCall) -> Elementwise:
    """Return the function of a table.

    Raises McuCompileError for an op without one.
    """
    if op.function is None:
        raise McuCompileError(op.name, "has no function", "this is a defect of the importer")
    return op.function


def weights_of(op: KernelCall) -> tuple[FloatArray, FloatArray]:
    """Return weight and bias of an op that has them.

    Raises McuCompileError for an op without them.
    """
    if op.weight is None or op.bias is None:
        raise McuCompileError(op.name, "has no weights", "this is a defect of the importer")
    return op.weight, op.bias


def _clamped(clamp: Clamp, tensor: torch.Tensor) -> torch.Tensor:
    """Clamp as torch's own layers do: no gradient passes at the limits."""
    low, high = clamp.value
    if low is None:
        return tensor
    return F.relu(tensor) if high is None else F.hardtanh(tensor, low, high)


def quantize(
    graph: Graph,
    calibration: NDArray[np.float32],
    headroom: float = HEADROOM,
    growth: float = WEIGHT_HEADROOM,
    start: QuantizedTensor | None = None,
) -> QuantizedGraph:
    """Return the int8 graph, its ranges taken from `calibration` [N, C, H, W]; a few dozen samples are enough.

    `headroom` widens the range of every activation except the input, for a model that will keep learning. The
    ranges of weights widen as much, up to `growth` times the largest weight of a row. Without it, that weight
    starts at its limit and cannot grow. `start`: the format of the input; None: by `calibration`. Raises
    McuCompileError for a `headroom` below 1.
    """
    if headroom < 1.0:
        raise McuCompileError("headroom", f"{headroom} would clip the calibration data", "use 1.0 or more")
    with torch.no_grad():
        tensors = run_float(graph, torch.from_numpy(np.ascontiguousarray(calibration, dtype=np.float32)))
    formats = {graph.input_name: start or _tensor_format(tensors[graph.input_name], Clamp.NONE, 1.0)}
    ops = []
    for op in graph.ops:
        inputs = tuple(formats[name] for name in op.inputs)
        quantized = _quantize_op(op, inputs, tensors[op.name], headroom, min(headroom, growth))
        formats[op.name] = quantized.output
        ops.append(quantized)
    return QuantizedGraph(graph, formats[graph.input_name], tuple(ops))


def _tensor_format(tensor: torch.Tensor, clamp: Clamp, headroom: float) -> QuantizedTensor:
    low, high = (limit * headroom for limit in _including_zero(tensor))
    if clamp.value[1] is not None:
        high = min(high, clamp.value[1])
    scale = np.float32(max((high - low) / 255.0, SMALLEST_SCALE))
    return QuantizedTensor(scale, int(np.clip(round(-128 - low / float(scale)), -128, 127)))


def _result_format(op: KernelCall, source: QuantizedTensor, result: torch.Tensor, headroom: float) -> QuantizedTensor:
    """Return the format of an op's result, with `headroom` times its range.

    A result of only zeros has no range in which the op could learn: it takes that of the op's input, to both sides.
    """
    if bool(result.any()):
        return _tensor_format(result, op.clamp, headroom)
    reach = 255 * float(source.scale)
    return _tensor_format(_clamped(op.clamp, torch.tensor([-reach, reach])), op.clamp, 1.0)


def _limits(clamp: Clamp, output: QuantizedTensor) -> tuple[int, int]:
    low, high = clamp.value
    least = -128 if low is None else max(-128, output.zero)
    most = 127 if high is None else min(127, output.zero + round(high / float(output.scale)))
    return least, most


def _quantize_op(
    op: KernelCall, inputs: tuple[QuantizedTensor, ...], result: torch.Tensor, headroom: float, growth: float
) -> QuantizedOp:
    if op.kind in (OpKind.AVERAGE_POOL, OpKind.MAX_POOL, OpKind.UPSAMPLE):
        return QuantizedOp(op, inputs, inputs[0], *_limits(op.clamp, inputs[0]))
    if op.kind is OpKind.TABLE:
        return _tabulate(op, inputs[0], result, headroom)
    if op.kind is OpKind.CONCAT:
        return _quantize_sum(op, inputs, _covering(inputs, op.clamp))
    output = inputs[0] if op.fixed else _result_format(op, inputs[0], result, headroom)
    if op.kind is OpKind.ADD:
        return _quantize_sum(op, inputs, output)
    if op.kind in PRODUCTS:
        return _quantize_product(op, inputs, output)
    if op.kind is OpKind.GRU:
        output = STATE
    return _quantize_weighted(op, inputs[0], output, growth if op.trains_weight else 1.0)


def _tabulate(op: KernelCall, source: QuantizedTensor, result: torch.Tensor, headroom: float) -> QuantizedOp:
    """Tabulate a function and its derivative for the codes of its input.

    The output covers what the input's codes can give, but at most `headroom` times what calibration
    showed if that is not zero.
    """
    codes = torch.arange(-128, 128, dtype=torch.float64)
    reals = ((codes - source.zero) * float(source.scale)).requires_grad_()
    with torch.enable_grad():
        values = tabulated_function(op)(reals)
        (slopes,) = torch.autograd.grad(values.sum(), reals)
    wrong = ~(torch.isfinite(values) & torch.isfinite(slopes))
    if bool(wrong.any()):
        at = float(reals.detach()[wrong][0])
        raise McuCompileError(
            op.name, f"has no value or derivative at {at:.3g}", "restrict its input to where both exist"
        )
    reached = values.detach()
    if bool(result.any()):
        reached = reached.clamp(*(limit * headroom for limit in _including_zero(result)))
    output = _tensor_format(_clamped(op.clamp, reached), op.clamp, 1.0)
    low, high = _limits(op.clamp, output)
    exact = (values.detach() / float(output.scale) + 0.5).floor() + output.zero
    passes = (exact >= low) & (exact <= high)
    table = exact.clamp(low, high).numpy().astype(np.int8)
    return QuantizedOp(
        op, (source,), output, low, high, table=table, slope=(slopes * passes).numpy().astype(np.float32)
    )


def _including_zero(tensor: torch.Tensor) -> tuple[float, float]:
    return min(float(tensor.min()), 0.0), max(float(tensor.max()), 0.0)


def _covering(inputs: tuple[QuantizedTensor, ...], clamp: Clamp) -> QuantizedTensor:
    """Return a format that covers all values that the inputs can hold."""
    ends = [(code - tensor.zero) * float(tensor.scale) for tensor in inputs for code in (-128, 127)]
    return _tensor_format(_clamped(clamp, torch.tensor(ends)), clamp, 1.0)


def _quantize_product(op: KernelCall, inputs: tuple[QuantizedTensor, ...], output: QuantizedTensor) -> QuantizedOp:
    scale = float(inputs[0].scale) * float(inputs[1].scale)
    output = _representable(output, scale)
    multiplier, shift = requantisation(np.array([scale / float(output.scale)]))
    limits = _limits(op.clamp, output)
    return QuantizedOp(op, inputs, output, *limits, add_multipliers=(int(multiplier[0]), 0), add_shift=int(shift[0]))


def _quantize_sum(op: KernelCall, inputs: tuple[QuantizedTensor, ...], output: QuantizedTensor) -> QuantizedOp:
    """Quantize an addition whose two inputs share one shift.

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
    by_channel = np.moveaxis(weight, -1, 0).reshape(op.rows, -1)
    if op.kind is not OpKind.DEPTHWISE:
        by_channel = weight.reshape(op.rows, -1)
    read = float((output if op.kind is OpKind.GRU else source).scale)
    least = np.maximum(np.abs(bias) / (read * BIAS_LIMIT), SMALLEST_SCALE)  # the bias must be representable
    scale = np.maximum(_largest_by_row(op, by_channel) * (headroom / 127.0), least).astype(np.float32)
    divisor = scale if op.kind is OpKind.DEPTHWISE else scale[:, None, None, None]
    quantized = np.clip(np.round(weight / divisor), -127, 127).astype(np.int8)
    sums = read * scale.astype(np.float64)
    whole_bias = np.clip(np.round(bias / sums), -BIAS_LIMIT, BIAS_LIMIT).astype(np.int32)
    if op.kind in (OpKind.CLASSIFIER, OpKind.GRU):
        return QuantizedOp(op, (source,), output, -128, 127, quantized, whole_bias, scale)
    output = _representable(output, float(sums.max()))
    multiplier, shift = requantisation(sums / float(output.scale))
    limits = _limits(op.clamp, output)
    return QuantizedOp(op, (source,), output, *limits, quantized, whole_bias, scale, multiplier, shift)


def _largest_by_row(op: KernelCall, by_channel: FloatArray) -> FloatArray:
    """Return the largest weight of each row [rows, weights].

    A trained row of zeros takes that of the other rows, so that it can learn. If all are zero, it takes the limit
    within which PyTorch draws first weights.
    """
    largest: FloatArray = np.abs(by_channel).max(axis=1)
    if op.trains_weight:
        others = float(largest.max()) or 1 / np.sqrt(by_channel.shape[1])
        largest = np.where(largest > 0, largest, others).astype(np.float32)
    return largest


def _representable(output: QuantizedTensor, largest_sum_scale: float) -> QuantizedTensor:
    """Coarsen the output until every ratio is below 1/4, which a shift of 33 needs; only tiny outputs are affected."""
    if largest_sum_scale / float(output.scale) < 0.2499:
        return output
    return QuantizedTensor(np.float32(largest_sum_scale / 0.2499), output.zero)


def requantisation(ratios: NDArray[np.float64]) -> tuple[Int32Array, NDArray[np.uint8]]:
    """Return multiplier and shift per channel: ratio = multiplier / 2**shift, 33 <= shift <= 62, multiplier < 2**31."""
    _, exponent = np.frexp(ratios)
    shift = np.clip(31 - exponent, 33, 62)
    multiplier = np.round(ratios * 2.0**shift)
    over = (multiplier >= 2**31) & (shift > 33)  # rounding up to the next power of two
    shift = np.where(over, shift - 1, shift)
    multiplier = np.minimum(np.where(over, multiplier / 2, multiplier), 2**31 - 1)
    return multiplier.astype(np.int32), shift.astype(np.uint8)


def rounded_logits(model: QuantizedGraph, samples: NDArray[np.float32]) -> FloatArray:
    """Return the logits of torch's operators in float64, with every tensor rounded to its int8 format.

    No integer arithmetic is involved.
    """
    graph, start = model.graph, model.input
    shape = graph.input_shape
    codes = torch.from_numpy(model.quantize_input(samples).astype(np.float64))
    image = codes.reshape(-1, shape.height, shape.width, shape.channels).permute(0, 3, 1, 2)
    tensors = {graph.input_name: (image - start.zero) * float(start.scale)}
    with torch.no_grad():
        for op in model.ops:
            value = float_op(op.op, [tensors[name] for name in op.op.inputs], _real_weights(op))
            if op.op.kind is not OpKind.CLASSIFIER:
                scale, zero = float(op.output.scale), op.output.zero
                value = ((value / scale + 0.5).floor() + zero).clamp(op.out_min, op.out_max).sub(zero) * scale
            tensors[op.op.name] = value
    logits: FloatArray = tensors[graph.ops[-1].name].flatten(1).float().numpy()
    return logits


def _real_weights(op: QuantizedOp) -> tuple[torch.Tensor, torch.Tensor] | None:
    if op.weight is None or op.bias is None or op.weight_scale is None:
        return None
    scale = torch.from_numpy(op.weight_scale.astype(np.float64))
    weight = torch_weight(op.op, op.weight).double() * scale.view(-1, 1, 1, 1)
    return weight, torch.from_numpy(op.bias).double() * scale * float(op.read_scale)


def logits_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the root mean squared difference of logits [N, classes], relative to the wanted
    ones' deviation over samples.
    """
    exact = wanted.astype(np.float64)
    centred = exact - exact.mean(0)  # a constant offset carries no information
    return float(np.sqrt(np.mean((found - exact) ** 2) / max(float(np.mean(centred**2)), 1e-12)))


def typical_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the median distance of logits [N, classes] from the wanted ones, relative to these ones' median
    distance from their medians.

    Unlike `logits_error`, it shows what a single sample far from all others does to these: it makes
    the steps of int8 too large.
    """
    exact = wanted.astype(np.float64)
    differences, distances = (np.linalg.norm(exact - other, axis=1) for other in (found, np.median(exact, axis=0)))
    return float(np.median(differences) / max(float(np.median(distances)), 1e-6))


__all__ = [
    "HEADROOM",
    "WEIGHTED",
    "WEIGHT_HEADROOM",
    "QuantizedGraph",
    "QuantizedOp",
    "QuantizedTensor",
    "convolved",
    "flat_input",
    "float_op",
    "logits_error",
    "quantize",
    "requantisation",
    "rounded_logits",
    "run_float",
    "torch_weight",
    "typical_error",
    "weights_of",
]
