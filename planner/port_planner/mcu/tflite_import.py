"""Convert a .tflite file, of float32 or int8, to layers of torch, which `frontend` imports like those of any module.

The file's tensors are [N, H, W, C], torch's [N, C, H, W]. LiteRT's interpreter with its reference kernels is the judge:
each operator is computed by torch from the interpreter's own inputs, for each sample of the calibration data, and
compared with its result. Weights of int8 become the real numbers that they stand for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import fx, nn

from port_planner.mcu.compile import calibration_samples
from port_planner.mcu.ir import FloatArray, McuCompileError
from port_planner.mcu.module_trace import PlacedGraph

TOLERANCE = 1e-4
"""Tolerated difference as a share of a float tensor's largest value: sums of fp32 in another order stay below it."""
SMALLEST = 1e-7
QUANTA = 1.01
"""Largest number of steps of an int8 tensor by which two correct roundings differ."""
OTHER_OPERATORS = "use operators that have one: port-agent's docs/boards.md lists them"


def read_tflite(file: Path | str, calibration: FloatArray) -> nn.Module:
    """Return the network of a .tflite file as a torch module in eval mode; calibration data are [N, C,
    H, W], [N, C, W] or [N, C].

    Raises McuCompileError, with the operator, if it is unknown, or if torch's result differs from that of LiteRT's
    interpreter. Also raises it for a file that is not a model of one input and one output for a batch of 1.
    """
    samples = calibration_samples(calibration)
    model = _without_first_view(_load(Path(file)), samples)
    try:
        reader = _Reader(model)
        network = reader.network()
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise McuCompileError(
            model.name, f"an operator is not as its format says ({error})", "convert it again"
        ) from error
    for number, values in enumerate(_reference(model, samples)):
        _Judge(network, reader, values).run(samples[number : number + 1])
    return network


@dataclass(frozen=True, slots=True)
class TfliteTensor:
    """A tensor of the file: its shape, its values if it is a constant, and how int8 represents real numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: NDArray[Any] | None
    scales: FloatArray
    zeros: NDArray[np.int64]
    axis: int

    def reals(self, codes: NDArray[Any]) -> FloatArray:
        """Return the real numbers that values of this tensor stand for."""
        if not self.scales.size:
            return codes.astype(np.float32)
        along = [1] * codes.ndim
        if codes.ndim:
            along[self.axis] = -1
        shifted = codes.astype(np.float64) - self.zeros.reshape(along)
        found: FloatArray = (shifted * self.scales.astype(np.float64).reshape(along)).astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class TfliteModel:
    """A file: its bytes, tensors, operators, and the indices of the tensors of a sample and of the output.

    `given`: the file's input, which is another tensor than the sample where the first operator only views it.
    """

    content: bytes
    name: str
    tensors: tuple[TfliteTensor, ...]
    operators: tuple[TfliteOperator, ...]
    given: int
    source: int
    result: int

    def as_given(self, sample: NDArray[Any]) -> NDArray[Any]:
        """Return a sample, channels first, as the file's input."""
        last = np.ascontiguousarray(np.moveaxis(sample, 0, -1))[None]
        if self.given == self.source:
            return last
        shape = self.tensors[self.given].shape
        return last.reshape(shape) if len(shape) == 2 else np.ascontiguousarray(sample)[None]


@dataclass(frozen=True, slots=True)
class TfliteOperator:
    """An operator: its number in the file, its name there, its tensors by index (-1: left out), its options."""

    number: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Any

    @property
    def place(self) -> str:
        return f"operator {self.number} ({self.kind})"

    def refusal(self, problem: str, remedy: str = OTHER_OPERATORS) -> McuCompileError:
        """Return the error that refuses this operator."""
        return McuCompileError(self.place, problem, remedy)


_DTYPES = {0: "float32", 2: "int32", 3: "uint8", 4: "int64", 9: "int8"}
_REALS = ("float32", "int8")
_SIZES = ("int32", "int64")


def _load(file: Path) -> TfliteModel:
    try:
        from ai_edge_litert import schema_py_generated as schema
    except ImportError as error:
        remedy = "pip install 'port-agent[tflite]'"
        raise McuCompileError(str(file), "the package ai-edge-litert is not installed", remedy) from error
    try:
        content = file.read_bytes()
        if content[4:8] != b"TFL3":
            raise McuCompileError(str(file), "is not a file of TensorFlow Lite", "convert the model again")
        model = schema.ModelT.InitFromPackedBuf(content, 0)
        (graph,) = model.subgraphs
        names = {number: name for name, number in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
        tensors = tuple(_tensor(each, model.buffers) for each in graph.tensors)
        codes = [max(each.builtinCode, each.deprecatedBuiltinCode) for each in model.operatorCodes]
        operators = tuple(
            TfliteOperator(
                number, names[codes[each.opcodeIndex]], tuple(each.inputs), tuple(each.outputs), each.builtinOptions
            )
            for number, each in enumerate(graph.operators)
        )
    except OSError as error:
        raise McuCompileError(str(file), f"cannot be read ({error.strerror})", "name a .tflite file") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error, MemoryError) as error:
        raise McuCompileError(str(file), f"cannot be read as .tflite ({error})", "convert the model again") from error
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        count = f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        raise McuCompileError(file.name, count, "convert a network of one input and one output")
    source, result = int(graph.inputs[0]), int(graph.outputs[0])
    return TfliteModel(content, file.stem, tensors, operators, source, source, result)


def _without_first_view(model: TfliteModel, samples: torch.Tensor) -> TfliteModel:
    """Return a model whose samples are images as they leave its first operator, if this operator only views
    the input as such images.

    Converters put a Reshape of a flat input there, or a Transpose from channels first, as PyTorch's have it.
    """
    first = model.operators[0] if model.operators else None
    readers = [operator for operator in model.operators if model.source in operator.inputs]
    if first is None or readers != [first] or samples.dim() != 4:
        return model
    channels, height, width = samples.shape[1:]
    before, after = model.tensors[model.source].shape, model.tensors[first.outputs[0]].shape
    flat = first.kind == "RESHAPE" and before == (1, channels * height * width)
    order = model.tensors[first.inputs[1]].values if first.kind == "TRANSPOSE" else None
    turned = order is not None and order.tolist() == [0, 2, 3, 1] and before == (1, channels, height, width)
    if after != (1, height, width, channels) or not (flat or turned):
        return model
    return replace(model, operators=model.operators[1:], source=first.outputs[0])


def _tensor(tensor: Any, buffers: Sequence[Any]) -> TfliteTensor:
    name = tensor.name.decode() if isinstance(tensor.name, bytes) else str(tensor.name)
    dtype, form = _DTYPES.get(tensor.type, f"type {tensor.type}"), tensor.quantization
    shape = tuple(int(extent) for extent in (() if tensor.shape is None else tensor.shape))
    data = buffers[tensor.buffer].data
    values = None
    if data is not None and len(data) and dtype in _DTYPES.values():
        values = np.frombuffer(np.asarray(data, np.uint8).tobytes(), dtype).reshape(shape)
    scales = [] if form is None or form.scale is None else form.scale
    zeros = [] if form is None or form.zeroPoint is None else form.zeroPoint
    axis = 0 if form is None else int(form.quantizedDimension)
    return TfliteTensor(name, shape, dtype, values, np.asarray(scales, np.float32), np.asarray(zeros, np.int64), axis)


def _reference(model: TfliteModel, samples: torch.Tensor) -> Iterator[Callable[[int], FloatArray]]:
    """Yield, for each sample, a function that returns the real values of a tensor, as LiteRT's interpreter computes it.

    Raises McuCompileError if the interpreter fails.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    source = model.tensors[model.given]
    try:
        interpreter = Interpreter(
            model_content=model.content,
            experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
            experimental_preserve_all_tensors=True,
        )
        interpreter.allocate_tensors()
        for sample in samples:
            given = model.as_given(sample.numpy())
            if source.scales.size:
                codes = np.floor(given / source.scales[0] + 0.5) + source.zeros[0]
                given = np.clip(codes, -128, 127).astype(np.int8)
            interpreter.set_tensor(model.given, given)
            interpreter.invoke()
            yield lambda index: model.tensors[index].reals(interpreter.get_tensor(index))
    except (RuntimeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise McuCompileError(
            model.name,
            f"LiteRT's interpreter refuses it, or samples of shape {list(samples.shape[1:])} ({first_line})",
            "give samples of the input's shape, channels first",
        ) from error


class _Judge(fx.Interpreter):
    """One run over a sample, in which each operator reads the interpreter's results, and is compared with them."""

    def __init__(self, network: PlacedGraph, reader: _Reader, values: Callable[[int], FloatArray]) -> None:
        super().__init__(network)
        self.extra_traceback = False
        self.reader, self.values = reader, values

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; return what the interpreter has in its place, if the file has it.

        Raises McuCompileError if the two differ.
        """
        with torch.no_grad():
            found = super().run_node(n)
        if n not in self.reader.values:
            return found
        index, place = self.reader.values[n]
        expected = _channels_first(torch.from_numpy(self.values(index)))
        if place:
            self._compare(place, self.reader.model.tensors[index], expected, found)
        return expected

    @staticmethod
    def _compare(place: str, tensor: TfliteTensor, expected: torch.Tensor, found: torch.Tensor) -> None:
        if expected.shape != found.shape:
            shapes = f"its shape is {list(expected.shape)}, and {list(found.shape)} here"
            raise McuCompileError(place, shapes, "write this part in another way")
        peak = float(expected.abs().max())
        allowed = TOLERANCE * peak + SMALLEST
        if tensor.scales.size:
            scale, zero = float(tensor.scales[0]), int(tensor.zeros[0])
            found, allowed = found.clamp(scale * (-128 - zero), scale * (127 - zero)), QUANTA * scale
        difference = float((found - expected).abs().max())
        if not difference <= allowed:
            raise McuCompileError(
                place,
                f"LiteRT's interpreter differs here, by {difference:.3g} of values up to {peak:.3g}",
                "write this part in another way",
            )


def _channels_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(-1, 1) if tensor.dim() > 2 else tensor


class _Reader:
    """One pass over the operators of a file."""

    def __init__(self, model: TfliteModel) -> None:
        self.model, self.graph = model, fx.Graph()
        self.layers: dict[str, nn.Module] = {}
        placeholder = self.graph.placeholder("sample")
        self.nodes: dict[int, fx.Node] = {model.source: placeholder}
        self.values: dict[fx.Node, tuple[int, str]] = {placeholder: (model.source, "")}
        """Values of the interpreter: the nodes, their tensors in the file, and the operators that made them."""
        for operator in model.operators:
            self._read(operator)

    def network(self) -> PlacedGraph:
        """Return the layers as a module."""
        if self.model.result not in self.nodes:
            raise McuCompileError(
                self.model.name, "the output does not depend on the input", "convert the whole network"
            )
        self.graph.output(self.nodes[self.model.result])
        return PlacedGraph(self.layers, self.graph).eval()

    def _read(self, operator: TfliteOperator) -> None:
        if all(self.model.tensors[index].dtype in _SIZES for index in operator.outputs):
            return  # sizes, as Reshape reads them; those of its result are known
        known = _OPERATORS.get(operator.kind)
        if known is None or len(operator.outputs) != 1:
            raise operator.refusal("no kernel for this operator")
        output = self.model.tensors[operator.outputs[0]]
        for index in (index for index in operator.inputs if index in self.nodes):
            self._expect_reals(operator, self.model.tensors[index])
        self._expect_reals(operator, output)
        made = self._activated(operator, known(self, operator))
        if made in self.values:
            made = self.call(operator, torch.clone, made)
        self.nodes[operator.outputs[0]] = made
        self.values[made] = (operator.outputs[0], operator.place)

    @staticmethod
    def _expect_reals(operator: TfliteOperator, tensor: TfliteTensor) -> None:
        if (
            tensor.dtype not in _REALS
            or tensor.scales.size > 1
            or (tensor.dtype == "int8") != (tensor.scales.size == 1)
        ):
            raise operator.refusal(f"a tensor of {tensor.dtype}", "convert the model to float32, or to int8 throughout")

    def _activated(self, operator: TfliteOperator, made: fx.Node) -> fx.Node:
        """Add the activation function that an operator contains."""
        number = int(getattr(operator.options, "fusedActivationFunction", 0))
        if number not in _ACTIVATIONS:
            raise operator.refusal(f"activation function {number}", "use none, ReLU, ReLU6 or ReLU of -1 to 1")
        function = _ACTIVATIONS[number]
        return made if function is None else self.call(operator, function, made)

    # -- what an operator reads ---------------------------------------------------------------------------------------

    def node(self, operator: TfliteOperator, position: int = 0) -> fx.Node:
        """Return an input that depends on the sample."""
        if operator.inputs[position] not in self.nodes:
            raise operator.refusal(f"input {position} is a constant", "keep constants inside layers")
        return self.nodes[operator.inputs[position]]

    def constant(self, operator: TfliteOperator, position: int) -> NDArray[Any] | None:
        """Return a constant input, as real numbers if it is quantised; None if it is left out."""
        index = operator.inputs[position] if len(operator.inputs) > position else -1
        if index < 0:
            return None
        tensor = self.model.tensors[index]
        if tensor.values is None:
            raise operator.refusal(f"input {position} is not a constant", "give it as a constant")
        return tensor.reals(tensor.values) if tensor.scales.size else tensor.values

    def shape(self, index: int) -> tuple[int, ...]:
        return self.model.tensors[index].shape

    # -- what it becomes ----------------------------------------------------------------------------------------------

    def call(self, operator: TfliteOperator, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Add a call of a function of torch."""
        made = self.graph.call_function(function, arguments)
        made.meta["nn_module_stack"] = {operator.place: operator.kind}
        return made

    def layer(
        self, operator: TfliteOperator, module: nn.Conv2d | nn.Linear, weight: NDArray[Any], source: fx.Node
    ) -> fx.Node:
        """Add a call of a layer that has this weight, and input 2 of the operator as its bias."""
        bias = self.constant(operator, 2)
        module.weight = nn.Parameter(torch.from_numpy(np.array(weight, np.float32, order="C")))
        module.bias = None if bias is None else nn.Parameter(torch.from_numpy(np.array(bias, np.float32)))
        name = f"{operator.kind.lower()}_{operator.number}"
        self.layers[name] = module
        return self.graph.call_module(name, (source,))

    def channels_last(self, operator: TfliteOperator, index: int) -> fx.Node:
        """Return a tensor in the file's order."""
        rank = len(self.shape(index))
        node = self.nodes[index]
        return node if rank < 3 else self.call(operator, torch.permute, node, [0, *range(2, rank), 1])

    def viewed(self, operator: TfliteOperator, source: fx.Node) -> fx.Node:
        """Return a tensor in the file's order with the extents of the operator's result."""
        batch, *extents = self.shape(operator.outputs[0]) or (0,)
        if batch != 1:
            raise operator.refusal("the batch is not the first axis, or not 1", "convert it for a batch of 1")
        made, rank = self.call(operator, torch.reshape, source, [-1, *extents]), 1 + len(extents)
        return made if rank < 3 else self.call(operator, torch.permute, made, [0, rank - 1, *range(1, rank - 1)])

    def axis(self, operator: TfliteOperator, axis: int) -> int:
        """Return the axis of torch that corresponds to an axis of the file's first input."""
        rank = len(self.shape(operator.inputs[0]))
        axis %= rank
        return axis if rank < 3 or axis == 0 else 1 if axis == rank - 1 else axis + 1


# -- operators --------------------------------------------------------------------------------------------------------


def _margins(
    reader: _Reader, operator: TfliteOperator, reach: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and after height and width; with SAME, an odd one is added after."""
    if operator.options.padding == 1:
        return [0, 0], [0, 0]
    extents = reader.shape(operator.inputs[0])[1:3]
    both = [
        max(0, (-(-size // stride) - 1) * stride + window - size)
        for size, stride, window in zip(extents, strides, reach, strict=True)
    ]
    return [each // 2 for each in both], [each - each // 2 for each in both]


def _convolution(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    options, depthwise = operator.options, operator.kind == "DEPTHWISE_CONV_2D"
    given = reader.constant(operator, 1)
    if given is None or given.ndim != 4:
        raise operator.refusal("its weights are not a constant of four axes")
    inputs = reader.shape(operator.inputs[0])[-1]
    weight = given.transpose(3, 0, 1, 2) if depthwise else given.transpose(0, 3, 1, 2)
    groups = inputs if depthwise else inputs // weight.shape[1]
    strides, dilations = [options.strideH, options.strideW], [options.dilationHFactor, options.dilationWFactor]
    reach = [(taps - 1) * step + 1 for taps, step in zip(weight.shape[2:], dilations, strict=True)]
    before, behind = _margins(reader, operator, reach, strides)
    source = reader.node(operator)
    if before != behind:
        source = reader.call(operator, F.pad, source, [before[1], behind[1], before[0], behind[0]])
        before = [0, 0]
    module = nn.Conv2d(
        inputs,
        weight.shape[0],
        cast(Any, list(weight.shape[2:])),
        cast(Any, strides),
        cast(Any, before),
        cast(Any, dilations),
        groups,
        device="meta",
    )
    return reader.layer(operator, module, weight, source)


def _linear(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    weight = reader.constant(operator, 1)
    if weight is None or weight.ndim != 2 or operator.options.weightsFormat:
        raise operator.refusal("its weights are not a plain constant of two axes")
    reader.node(operator)
    source = reader.channels_last(operator, operator.inputs[0])
    if len(reader.shape(operator.inputs[0])) != 2:
        source = reader.call(operator, torch.reshape, source, [-1, weight.shape[1]])
    if len(reader.shape(operator.outputs[0])) != 2:
        raise operator.refusal("a result of more than two axes", "flatten before it")
    return reader.layer(operator, nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight, source)


def _pool(function: Callable[..., Any]) -> Callable[[_Reader, TfliteOperator], fx.Node]:
    def read(reader: _Reader, operator: TfliteOperator) -> fx.Node:
        options = operator.options
        window, strides = [options.filterHeight, options.filterWidth], [options.strideH, options.strideW]
        before, behind = _margins(reader, operator, window, strides)
        if before != behind or (function is F.avg_pool2d and any(before)):
            sides = f"padding {before} before and {behind} behind"
            raise operator.refusal(sides, "pool without padding, or with the same on both sides")
        return reader.call(operator, function, reader.node(operator), window, strides, before)

    return read


def _arithmetic(function: Callable[..., Any]) -> Callable[[_Reader, TfliteOperator], fx.Node]:
    """Return the reader of an operator of two tensors, or of a tensor and a number after it."""

    def read(reader: _Reader, operator: TfliteOperator) -> fx.Node:
        second = operator.inputs[1]
        if second in reader.nodes:
            return reader.call(operator, function, reader.node(operator), reader.nodes[second])
        values = cast(NDArray[Any], reader.constant(operator, 1))
        if values.size != 1:
            raise operator.refusal(
                f"a constant of shape {list(values.shape)}", "give a number, or fold it into a layer"
            )
        return reader.call(operator, function, reader.node(operator), float(values.reshape(())))

    return read


def _function(function: Callable[..., Any], *options: str) -> Callable[[_Reader, TfliteOperator], fx.Node]:
    """Return the reader of a function of each value; `options`: the options that torch takes."""

    def read(reader: _Reader, operator: TfliteOperator) -> fx.Node:
        numbers = [float(getattr(operator.options, name)) for name in options]
        return reader.call(operator, function, reader.node(operator), *numbers)

    return read


def _view(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    reader.node(operator)
    return reader.viewed(operator, reader.channels_last(operator, operator.inputs[0]))


def _mean(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    axes = [
        reader.axis(operator, int(axis)) for axis in np.reshape(cast(NDArray[Any], reader.constant(operator, 1)), -1)
    ]
    made = reader.call(operator, torch.mean, reader.node(operator), axes, bool(operator.options.keepDims))
    if not operator.options.keepDims and len(reader.shape(operator.outputs[0])) > 2:
        raise operator.refusal("a mean over some of the spatial axes", "average over all of them, or keep the axes")
    return made


def _softmax(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    if operator.options.beta != 1 or len(reader.shape(operator.inputs[0])) != 2:
        raise operator.refusal("a softmax with a beta, or not over classes", "end the model with the logits")
    return reader.call(operator, torch.softmax, reader.node(operator), 1)


def _concatenate(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    parts = [reader.node(operator, position) for position in range(len(operator.inputs))]
    return reader.call(operator, torch.cat, parts, reader.axis(operator, int(operator.options.axis)))


def _pad(reader: _Reader, operator: TfliteOperator) -> fx.Node:
    pairs, rank = np.asarray(reader.constant(operator, 1)), len(reader.shape(operator.inputs[0]))
    order: list[int] = [0] * rank
    for axis in range(rank):
        order[reader.axis(operator, axis)] = axis
    sides = [int(side) for axis in reversed(order) for side in pairs[axis]]
    return reader.call(operator, F.pad, reader.node(operator), sides)


_ACTIVATIONS: Mapping[int, Callable[..., Any] | None] = {0: None, 1: torch.relu, 2: F.hardtanh, 3: F.relu6}
_OPERATORS: Mapping[str, Callable[[_Reader, TfliteOperator], fx.Node]] = {
    "ADD": _arithmetic(torch.add),
    "AVERAGE_POOL_2D": _pool(F.avg_pool2d),
    "CONCATENATION": _concatenate,
    "CONV_2D": _convolution,
    "DEPTHWISE_CONV_2D": _convolution,
    "DEQUANTIZE": _function(torch.clone),
    "EXPAND_DIMS": _view,
    "FULLY_CONNECTED": _linear,
    "HARD_SWISH": _function(F.hardswish),
    "LEAKY_RELU": _function(F.leaky_relu, "alpha"),
    "LOGISTIC": _function(torch.sigmoid),
    "MAX_POOL_2D": _pool(F.max_pool2d),
    "MEAN": _mean,
    "MUL": _arithmetic(torch.mul),
    "PAD": _pad,
    "QUANTIZE": _function(torch.clone),
    "RELU": _function(torch.relu),
    "RELU6": _function(F.relu6),
    "RESHAPE": _view,
    "SOFTMAX": _softmax,
    "SQUEEZE": _view,
    "SUB": _arithmetic(torch.sub),
    "TANH": _function(torch.tanh),
}


__all__ = ["TfliteModel", "TfliteOperator", "TfliteTensor", "read_tflite"]
