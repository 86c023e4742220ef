"""Convert an ONNX file to layers of torch, which `frontend` imports like those of any module.

A file's operators become layers and functions of torch, named as its weights are. ONNX's own reference evaluator is the
judge: every tensor that torch computes is compared with its result for the calibration data. Values that do not depend
on the input are the evaluator's, whatever operators make them.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import fx, nn

from port_planner.mcu.compile import calibration_samples
from port_planner.mcu.ir import FloatArray, McuCompileError
from port_planner.mcu.module_trace import PlacedGraph, evaluating, run_nodes
from port_planner.mcu.onnx_nodes import OnnxNode

if TYPE_CHECKING:
    import onnx

Values = Mapping[str, NDArray[Any]]
TOLERANCE = 1e-4
"""Tolerated difference as a share of a tensor's largest value: sums of fp32 in another order stay below it."""
SMALLEST = 1e-7
CHECKED_AT_ONCE = 16

_TAKEN = frozenset({*dir(nn.Module()), *dir(fx.GraphModule)})
"""Names that every module already has."""


def read_onnx(file: Path | str, calibration: FloatArray) -> nn.Module:
    """Return the network of an ONNX file as a torch module in eval mode, equal to the file on the
    calibration data [N, ...].

    Where a weight is named `PATH.weight`, as PyTorch exports it, its layer is `PATH` in the module's state_dict; others
    are named after their nodes. Raises McuCompileError, with the node, for an unknown operator or attribute, and if a
    tensor differs from that of ONNX's reference evaluator. Also raises it for a file that is not a model of one input
    and one output of float32.
    """
    samples = calibration_samples(calibration)
    model = _load(Path(file))
    source, result = _ends(model)
    first = next(_reference(model, source, samples[:1].numpy()))
    reader = _Reader(model, source, first)
    network = reader.network(result)
    _refuse_difference(network, reader.values, _reference(model, source, samples.numpy()), samples)
    return network


def _load(file: Path) -> onnx.ModelProto:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise McuCompileError(
            str(file), "the package onnx is not installed", "pip install 'port-agent[onnx]'"
        ) from error
    try:
        model = onnx.load(file)
        onnx.checker.check_model(model)
    except (OSError, DecodeError, onnx.checker.ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise McuCompileError(str(file), f"cannot be read as ONNX ({first_line})", "export it again") from error
    return model


def _ends(model: onnx.ModelProto) -> tuple[str, str]:
    """Return the names of the one input and the one output."""
    from onnx import TensorProto

    weights = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    outputs = [each.name for each in model.graph.output]
    if len(inputs) != 1 or len(outputs) != 1:
        names = f"inputs {[each.name for each in inputs]} and outputs {outputs}"
        raise McuCompileError(model.graph.name, names, "export a network of one input and one output")
    kind = inputs[0].type.tensor_type.elem_type
    if kind != TensorProto.FLOAT:
        raise McuCompileError(inputs[0].name, f"is of type {TensorProto.DataType.Name(kind)}", "export it in float32")
    return inputs[0].name, outputs[0]


def _reference(model: onnx.ModelProto, source: str, samples: FloatArray) -> Iterator[Values]:
    """Yield every value of the file, as ONNX's reference evaluator computes it for each sample alone.

    Raises McuCompileError if the evaluator fails.
    """
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator = ReferenceEvaluator(model)
        for number in range(len(samples)):
            found = evaluator.run(None, {source: samples[number : number + 1]}, intermediate=True)
            yield cast(Values, found)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise McuCompileError(
            model.graph.name,
            f"ONNX's reference evaluator refuses samples of shape {list(samples.shape[1:])} ({first_line})",
            "give samples of the input's shape, and a model for a batch of 1 or of any size",
        ) from error


def _refuse_difference(
    network: fx.GraphModule,
    values: Mapping[fx.Node, tuple[str, str]],
    reference: Iterator[Values],
    samples: torch.Tensor,
) -> None:
    """Raise McuCompileError, with the first node of the file that differs, unless torch
    computes what the reference does.

    `values`: the name of each node's tensor in the file, and the place that made it.
    """
    for chunk in samples.split(CHECKED_AT_ONCE):
        expected = [next(reference) for _ in range(len(chunk))]
        with evaluating(network):
            found = run_nodes(network, chunk)
        for node, (name, place) in values.items():
            _refuse_node(place, np.concatenate([each[name] for each in expected]), cast(torch.Tensor, found[node]))


def _refuse_node(place: str, expected: FloatArray, found: torch.Tensor) -> None:
    if tuple(found.shape) != expected.shape or not expected.size:
        shapes = f"its shape is {list(expected.shape)}, and {list(found.shape)} here"
        raise McuCompileError(place, shapes, "write this part in another way")
    difference, peak = float(np.abs(found.numpy() - expected).max()), float(np.abs(expected).max())
    if not difference <= TOLERANCE * peak + SMALLEST:
        raise McuCompileError(
            place,
            f"ONNX's reference differs here, by {difference:.3g} of values up to {peak:.3g}",
            "write this part in another way",
        )


class _Reader:
    """One pass over the nodes of a file; `example`: its values for one sample, which show shapes and constants."""

    def __init__(self, model: onnx.ModelProto, source: str, example: Values) -> None:
        from onnx.numpy_helper import to_array

        self.example = example
        self.opset = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=1)
        self.constants: dict[str, NDArray[Any]] = {each.name: to_array(each) for each in model.graph.initializer}
        self.graph = fx.Graph()
        self.layers: dict[str, nn.Module] = {}
        self.parameters: dict[tuple[tuple[int, ...], bytes], nn.Parameter] = {}
        self.tensors: dict[str, fx.Node] = {source: self.graph.placeholder("sample")}
        self.values: dict[fx.Node, tuple[str, str]] = {}
        """Compared values: the nodes, the tensors of the file that they are, and where those are made."""
        nodes = [OnnxNode(each) for each in model.graph.node]
        self.readers = Counter(name for node in nodes for name in node.inputs)
        self.readers.update(each.name for each in model.graph.output)
        for node in nodes:
            self._read(node)

    def network(self, result: str) -> PlacedGraph:
        """Return the layers as a module whose output is this tensor."""
        if result not in self.tensors:
            raise McuCompileError(result, "the output does not depend on the input", "export the whole network")
        self.graph.output(self.tensors[result])
        return PlacedGraph(self.layers, self.graph).eval()

    def _read(self, node: OnnxNode) -> None:
        computed = any(name in self.tensors for name in node.inputs) and node.kind not in ("Shape", "Size")
        if not computed and not node.has_graph:
            self.constants.update((name, self.example[name]) for name in node.outputs)
            return
        known = _OPERATORS.get(node.kind) if not node.domain else None
        if known is None:
            raise node.refusal("no kernel for this operator")
        made = known(self, node)
        node.refuse_unread()
        several = made if isinstance(made, list) else [made]
        if len(several) != len(node.outputs):
            raise node.refusal(f"{len(node.outputs)} outputs", "export it without indices, masks and statistics")
        for name, value in zip(node.outputs, several, strict=True):
            self.tensors[name] = value
            self.values[value] = (name, node.place)

    # -- what an operator reads ---------------------------------------------------------------------------------------

    def tensor(self, node: OnnxNode, position: int = 0) -> fx.Node:
        """Return an input that depends on the sample."""
        name = node.inputs[position]
        if name not in self.tensors:
            raise node.refusal(f"input {name} is a constant", "keep constants inside layers")
        return self.tensors[name]

    def constant(self, node: OnnxNode, position: int) -> NDArray[Any] | None:
        """Return an input that does not depend on the sample, or None if it is left out."""
        name = node.inputs[position] if len(node.inputs) > position else ""
        if name and name not in self.constants:
            raise node.refusal(f"input {name} depends on the sample", "give it as a constant")
        return self.constants[name] if name else None

    def numbers(self, node: OnnxNode, position: int, attribute: str) -> tuple[int, ...] | None:
        """Return whole numbers, which are an input in newer files and an attribute in older ones."""
        given = node.take(attribute, None)
        found = given if given is not None else self.constant(node, position)
        return None if found is None else tuple(int(number) for number in np.asarray(found).reshape(-1))

    def number(self, node: OnnxNode, position: int, attribute: str, default: float) -> float:
        """Return a number in the same way as `numbers`."""
        given = node.take(attribute, None)
        found = given if given is not None else self.constant(node, position)
        return default if found is None else float(np.asarray(found).reshape(()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor for one sample, the batch of 1 first."""
        return self.example[name].shape

    def dimensions(self, node: OnnxNode) -> int:
        """Return how many axes of the data a convolution or pooling runs along.

        Raises McuCompileError unless they are one or two.
        """
        dimensions = len(self.shape(node.inputs[0])) - 2
        if dimensions not in (1, 2):
            raise node.refusal(f"its input has {dimensions} axes of the data", "use one or two")
        return dimensions

    def margins(self, node: OnnxNode, window: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the padding before and after each axis of the data; `window`: what it covers with its dilation."""
        kind, extents = node.take("auto_pad", "NOTSET"), self.shape(node.inputs[0])[2:]
        pads = list(node.take("pads", [0] * (2 * len(window))))
        if not kind.startswith("SAME"):
            return pads[: len(window)], pads[len(window) :]
        wanted = [-(-size // stride) for size, stride in zip(extents, strides, strict=True)]
        both = [
            max(0, (out - 1) * stride + reach - size)
            for out, stride, reach, size in zip(wanted, strides, window, extents, strict=True)
        ]
        less, more = [each // 2 for each in both], [each - each // 2 for each in both]
        return (less, more) if kind == "SAME_UPPER" else (more, less)

    # -- what it becomes ----------------------------------------------------------------------------------------------

    def call(self, node: OnnxNode, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> fx.Node:
        """Add a call of a function of torch."""
        made = self.graph.call_function(function, arguments, keywords)
        made.meta["nn_module_stack"] = {node.name: node.kind}
        return made

    def layer(self, node: OnnxNode, module: nn.Module, weight: str, source: fx.Node) -> fx.Node:
        """Add a call of a layer, under the path that its weight's name gives, or under its node's name."""
        named = re.fullmatch(r"(\w+(\.\w+)*)\.weight", weight)
        base = named[1] if named else re.sub(r"\W+", "_", node.name).strip("_") or node.kind
        path, number = base, 2
        while path in self.layers or path.partition(".")[0] in _TAKEN:
            path, number = f"{base.replace('.', '_')}_{number}", number + 1
        self.layers[path] = module
        return self.graph.call_module(path, (source,))

    def parameter(self, node: OnnxNode, position: int, transposed: bool = False) -> nn.Parameter:
        """Return a constant as a parameter of torch: equal weights are one parameter, shared
        by a layer for each reader.
        """
        values = self.constant(node, position)
        if values is None or values.dtype.kind != "f":
            raise node.refusal(f"input {position} is not a constant of float32", "export it in float32")
        laid = np.array(values.T if transposed else values, np.float32, order="C")
        parameter = nn.Parameter(torch.from_numpy(laid))
        if laid.ndim < 2:
            return parameter  # exporters merge biases that are equal by chance
        return self.parameters.setdefault((laid.shape, laid.tobytes()), parameter)


# -- layers -----------------------------------------------------------------------------------------------------------


def _convolution(reader: _Reader, node: OnnxNode) -> fx.Node:
    dimensions, weight = reader.dimensions(node), reader.parameter(node, 1)
    kernel = list(weight.shape[2:])
    node.skip("kernel_shape")  # the weight's
    groups, ones = node.take("group", 1), [1] * dimensions
    strides, dilations = node.take("strides", ones), node.take("dilations", ones)
    reach = [(taps - 1) * step + 1 for taps, step in zip(kernel, dilations, strict=True)]
    before, behind = reader.margins(node, reach, strides)
    source = reader.tensor(node)
    if before != behind:
        source = reader.call(node, F.pad, source, _torch_padding(before, behind))
        before = [0] * dimensions
    convolution: Callable[..., nn.Conv1d | nn.Conv2d] = nn.Conv1d if dimensions == 1 else nn.Conv2d
    module = convolution(
        weight.shape[1] * groups, weight.shape[0], kernel, strides, before, dilations, groups, bias=False, device="meta"
    )
    module.weight = weight
    if reader.constant(node, 2) is not None:
        module.bias = reader.parameter(node, 2)
    return reader.layer(node, module, node.inputs[1], source)


def _transposed_convolution(reader: _Reader, node: OnnxNode) -> fx.Node:
    dimensions, weight = reader.dimensions(node), reader.parameter(node, 1)
    node.skip("kernel_shape")  # the weight's
    node.expect("auto_pad", "NOTSET")
    ones, zeros, groups = [1] * dimensions, [0] * dimensions, node.take("group", 1)
    pads = list(node.take("pads", zeros * 2))
    before, behind = pads[:dimensions], pads[dimensions:]
    if before != behind:
        raise node.refusal(f"padding {before} before and {behind} behind", "pad both sides alike")
    kinds: dict[int, Callable[..., nn.ConvTranspose1d | nn.ConvTranspose2d]]
    kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}
    module = kinds[dimensions](
        weight.shape[0],
        weight.shape[1] * groups,
        list(weight.shape[2:]),
        node.take("strides", ones),
        before,
        node.take("output_padding", zeros),
        groups,
        bias=False,
        dilation=node.take("dilations", ones),
        device="meta",
    )
    module.weight = weight
    if reader.constant(node, 2) is not None:
        module.bias = reader.parameter(node, 2)
    return reader.layer(node, module, node.inputs[1], reader.tensor(node))


def _torch_padding(before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """Return padding in torch's order: pairs, the last axis first."""
    return [side for pair in reversed(list(zip(before, behind, strict=True))) for side in pair]


def _linear(reader: _Reader, node: OnnxNode, transposed: bool, bias: nn.Parameter | None) -> fx.Node:
    """Add a call of a linear layer on the first input; `transposed`: the second one is [in][out]."""
    weight = reader.parameter(node, 1, transposed)
    if weight.dim() != 2:
        raise node.refusal(f"a constant of shape {list(weight.shape)}", "give it two axes")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = weight
    if bias is not None:
        module.bias = bias
    return reader.layer(node, module, "" if transposed else node.inputs[1], reader.tensor(node))


def _gemm(reader: _Reader, node: OnnxNode) -> fx.Node:
    for name, value in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
        node.expect(name, value)
    node.skip("broadcast")  # as newer files do
    transposed = not node.take("transB", 0)
    if reader.constant(node, 2) is None:
        return _linear(reader, node, transposed, None)
    outputs, given = reader.shape(node.outputs[0])[-1], reader.parameter(node, 2).detach().reshape(-1)
    if len(given) not in (1, outputs):
        raise node.refusal(f"a bias of {len(given)} for {outputs} outputs", "give it one value for each")
    return _linear(reader, node, transposed, nn.Parameter(given.expand(outputs).clone()))


def _batch_norm(reader: _Reader, node: OnnxNode) -> fx.Node:
    if reader.opset < 14:  # before, the reference evaluator normalises by the batch, as in training
        raise node.refusal(
            f"opset {reader.opset} has no batch norm of its own for inference", "export it with 14 or later"
        )
    node.expect("training_mode", 0)
    node.skip("momentum")  # of training
    kind = nn.BatchNorm2d if len(reader.shape(node.inputs[0])) == 4 else nn.BatchNorm1d
    weight = reader.parameter(node, 1)
    module = kind(len(weight), node.take("epsilon", 1e-5))
    module.weight, module.bias = weight, reader.parameter(node, 2)
    module.running_mean, module.running_var = reader.parameter(node, 3).detach(), reader.parameter(node, 4).detach()
    return reader.layer(node, module, node.inputs[1], reader.tensor(node))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _arithmetic(function: Callable[..., Any]) -> Callable[[_Reader, OnnxNode], fx.Node]:
    """Return the reader of an operator of two tensors, or of a tensor and a number on either side."""

    def read(reader: _Reader, node: OnnxNode) -> fx.Node:
        node.skip("broadcast")  # as newer files do
        operands: list[object] = []
        for position, name in enumerate(node.inputs):
            values = None if name in reader.tensors else cast(NDArray[Any], reader.constant(node, position))
            if values is not None and values.size != 1:
                raise node.refusal(
                    f"a constant of shape {list(values.shape)}", "give a number, or fold it into a layer"
                )
            operands.append(reader.tensors[name] if values is None else float(values.reshape(())))
        if function is torch.sub and isinstance(operands[0], float):
            return reader.call(node, torch.rsub, operands[1], operands[0])
        if isinstance(operands[0], float) and function is not operator.truediv:
            operands.reverse()
        return reader.call(node, function, *operands)

    return read


def _add(reader: _Reader, node: OnnxNode) -> fx.Node:
    """Add an addition; if constants for the channels follow a layer without a bias, they become its bias."""
    names = [name for name in node.inputs if name in reader.tensors]
    others = [position for position, name in enumerate(node.inputs) if name not in reader.tensors]
    if len(names) == 1 and len(others) == 1 and reader.readers[names[0]] == 1:
        made = reader.tensors[names[0]]
        module = reader.layers[str(made.target)] if made.op == "call_module" else None
        values = cast(NDArray[Any], reader.constant(node, others[0]))
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.bias is None:
            behind = 0 if isinstance(module, nn.Linear) else module.weight.dim() - 2
            channels = (module.weight.shape[0], *[1] * behind)
            if values.size == channels[0] and values.shape[-len(channels) :] == channels:
                module.bias = nn.Parameter(torch.from_numpy(np.array(values, np.float32).reshape(-1)))
                return made
    return _arithmetic(torch.add)(reader, node)


def _power(reader: _Reader, node: OnnxNode) -> fx.Node:
    exponent = reader.constant(node, 1)
    if exponent is None or exponent.size != 1:
        raise node.refusal("its exponent is not a number")
    return reader.call(node, torch.pow, reader.tensor(node), float(exponent.reshape(())))


def _function(function: Callable[..., Any], **defaults: float) -> Callable[[_Reader, OnnxNode], fx.Node]:
    """Return the reader of a function of each value; `defaults`: the attributes that torch takes, in its order."""

    def read(reader: _Reader, node: OnnxNode) -> fx.Node:
        numbers = [node.take(name, default) for name, default in defaults.items()]
        return reader.call(node, function, reader.tensor(node), *numbers)

    return read


def _selu(reader: _Reader, node: OnnxNode) -> fx.Node:
    node.skip("alpha", "gamma")  # others than torch's differ from the reference
    return reader.call(node, torch.selu, reader.tensor(node))


def _gelu(reader: _Reader, node: OnnxNode) -> fx.Node:
    return reader.call(node, F.gelu, reader.tensor(node), approximate=node.take("approximate", "none"))


def _hard_sigmoid(reader: _Reader, node: OnnxNode) -> fx.Node:
    slope, middle, source = node.take("alpha", 0.2), node.take("beta", 0.5), reader.tensor(node)
    if math.isclose(slope, 1 / 6, rel_tol=1e-6) and middle == 0.5:
        return reader.call(node, F.hardsigmoid, source)
    line = reader.call(node, torch.add, reader.call(node, torch.mul, source, slope), middle)
    return reader.call(node, torch.clamp, line, 0.0, 1.0)


def _leaky_by_constant(reader: _Reader, node: OnnxNode) -> fx.Node:
    slope = reader.constant(node, 1)
    if slope is None or slope.size != 1:
        raise node.refusal("a slope for each channel", "give it one slope")
    return reader.call(node, F.leaky_relu, reader.tensor(node), float(slope.reshape(())))


def _clip(reader: _Reader, node: OnnxNode) -> fx.Node:
    least, most = reader.number(node, 1, "min", -math.inf), reader.number(node, 2, "max", math.inf)
    source = reader.tensor(node)
    if (least, most) == (0.0, 6.0):
        return reader.call(node, F.relu6, source)
    if (least, most) == (0.0, math.inf):
        return reader.call(node, torch.relu, source)
    return reader.call(node, torch.clamp, source, least, most)


def _softmax(function: Callable[..., Any]) -> Callable[[_Reader, OnnxNode], fx.Node]:
    def read(reader: _Reader, node: OnnxNode) -> fx.Node:
        return reader.call(node, function, reader.tensor(node), node.take("axis", -1 if reader.opset >= 13 else 1))

    return read


# -- pooling ----------------------------------------------------------------------------------------------------------


def _pool(kind: str) -> Callable[[_Reader, OnnxNode], fx.Node]:
    """Return the reader of average ("avg") or maximum ("max") pooling."""

    def read(reader: _Reader, node: OnnxNode) -> fx.Node:
        dimensions = reader.dimensions(node)
        ones: list[int] = [1] * dimensions
        window, strides = node.take("kernel_shape", ones), node.take("strides", ones)
        node.expect("storage_order", 0)
        for name, value in (("ceil_mode", 0), ("dilations", ones)):
            node.expect(name, value)
        before, behind = reader.margins(node, window, strides)
        counted = bool(node.take("count_include_pad", 0)) or not any(before)
        if before != behind:
            sides = f"padding {before} before and {behind} behind"
            raise node.refusal(sides, "pad both sides alike")
        last = [counted] if kind == "avg" else []
        function = getattr(F, f"{kind}_pool{dimensions}d")
        no_ceiling = [False] if kind == "avg" else []
        return reader.call(node, function, reader.tensor(node), window, strides, before, *no_ceiling, *last)

    return read


def _global_average(reader: _Reader, node: OnnxNode) -> fx.Node:
    function = F.adaptive_avg_pool1d if reader.dimensions(node) == 1 else F.adaptive_avg_pool2d
    return reader.call(node, function, reader.tensor(node), 1)


def _global_maximum(reader: _Reader, node: OnnxNode) -> fx.Node:
    function = F.max_pool1d if reader.dimensions(node) == 1 else F.max_pool2d
    return reader.call(node, function, reader.tensor(node), list(reader.shape(node.inputs[0])[2:]))


def _mean(reader: _Reader, node: OnnxNode) -> fx.Node:
    axes, kept = reader.numbers(node, 1, "axes"), bool(node.take("keepdims", 1))
    node.expect("noop_with_empty_axes", 0)
    if axes is None:
        raise node.refusal("a mean over all axes", "average over the spatial axes")
    return reader.call(node, torch.mean, reader.tensor(node), list(axes), kept)


# -- views, and what only chooses -------------------------------------------------------------------------------------


def _view(*attributes: str) -> Callable[[_Reader, OnnxNode], fx.Node]:
    """Return the reader of a view, whose shape is that of the reference; `attributes`, `shape` and
    `axes` are contained in it.
    """

    def read(reader: _Reader, node: OnnxNode) -> fx.Node:
        batch, *extents = reader.shape(node.outputs[0]) or (0,)
        node.skip(*attributes)
        if batch != 1:
            raise node.refusal("the batch is not the first axis any more", "keep it there")
        return reader.call(node, torch.reshape, reader.tensor(node), [-1, *extents])

    return read


def _same(reader: _Reader, node: OnnxNode) -> fx.Node:
    node.skip("ratio", "seed", "is_test")  # of training
    return reader.call(node, torch.clone, reader.tensor(node))


def _transpose(reader: _Reader, node: OnnxNode) -> fx.Node:
    order = node.take("perm", list(reversed(range(len(reader.shape(node.inputs[0]))))))
    return reader.call(node, torch.permute, reader.tensor(node), list(order))


def _concatenate(reader: _Reader, node: OnnxNode) -> fx.Node:
    parts = [reader.tensor(node, position) for position in range(len(node.inputs))]
    return reader.call(node, torch.cat, parts, node.take("axis", 1))


def _slice(reader: _Reader, node: OnnxNode) -> fx.Node:
    starts, ends = reader.numbers(node, 1, "starts") or (), reader.numbers(node, 2, "ends") or ()
    rank = len(reader.shape(node.inputs[0]))
    axes = reader.numbers(node, 3, "axes") or tuple(range(len(starts)))
    steps = reader.numbers(node, 4, "steps") or (1,) * len(starts)
    if any(step < 1 for step in steps):
        raise node.refusal(f"steps {list(steps)}", "take steps forward")
    chosen = [slice(None)] * rank
    for axis, *bounds in zip(axes, starts, ends, steps, strict=True):
        chosen[axis] = slice(*bounds)
    return reader.call(node, operator.getitem, reader.tensor(node), tuple(chosen))


def _split(reader: _Reader, node: OnnxNode) -> list[fx.Node]:
    node.skip("split", "num_outputs")  # the sizes are those of the results
    axis, source, start, parts = node.take("axis", 0), reader.tensor(node), 0, []
    for name in node.outputs:
        size = reader.shape(name)[axis]
        parts.append(reader.call(node, torch.narrow, source, axis, start, size))
        start += size
    return parts


def _gather(reader: _Reader, node: OnnxNode) -> fx.Node:
    index, axis = reader.constant(node, 1), node.take("axis", 0)
    if index is None or index.ndim:
        raise node.refusal("chooses several at once", "take a slice")
    return reader.call(node, torch.select, reader.tensor(node), axis, int(index))


def _pad(reader: _Reader, node: OnnxNode) -> fx.Node:
    node.expect("mode", "constant")
    pads, value = reader.numbers(node, 1, "pads") or (), reader.number(node, 2, "value", 0.0)
    rank = len(reader.shape(node.inputs[0]))
    if value or len(pads) != 2 * rank or (len(node.inputs) > 3 and node.inputs[3]):
        raise node.refusal(f"pads {list(pads)} by {value:g} for {rank} axes", "pad all axes, with zeros")
    return reader.call(node, F.pad, reader.tensor(node), _torch_padding(pads[:rank], pads[rank:]))


def _resize(reader: _Reader, node: OnnxNode) -> fx.Node:
    """Upsample to the reference's size; if the reference takes other pixels, the comparison shows it."""
    node.expect("mode", "nearest")
    node.skip(
        "coordinate_transformation_mode",
        "cubic_coeff_a",
        "nearest_mode",
        "exclude_outside",
        "extrapolation_value",
        "scales",
        "antialias",
        "axes",
        "keep_aspect_ratio_policy",
    )
    size = list(reader.shape(node.outputs[0])[2:])
    return reader.call(node, F.interpolate, reader.tensor(node), size, None, "nearest")


_OPERATORS: Mapping[str, Callable[[_Reader, OnnxNode], fx.Node | list[fx.Node]]] = {
    "Abs": _function(torch.abs),
    "Add": _add,
    "AveragePool": _pool("avg"),
    "BatchNormalization": _batch_norm,
    "Celu": _function(torch.celu, alpha=1.0),
    "Clip": _clip,
    "Concat": _concatenate,
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Div": _arithmetic(operator.truediv),
    "Dropout": _same,
    "Elu": _function(F.elu, alpha=1.0),
    "Flatten": _view("axis"),
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_maximum,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _function(F.hardswish),
    "Identity": _same,
    "LeakyRelu": _function(F.leaky_relu, alpha=0.01),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": lambda reader, node: _linear(reader, node, True, None),
    "MaxPool": _pool("max"),
    "Mish": _function(F.mish),
    "Mul": _arithmetic(torch.mul),
    "Neg": _function(torch.neg),
    "PRelu": _leaky_by_constant,
    "Pad": _pad,
    "Pow": _power,
    "Reciprocal": lambda reader, node: reader.call(node, operator.truediv, 1.0, reader.tensor(node)),
    "ReduceMean": _mean,
    "Relu": _function(torch.relu),
    "Reshape": _view("shape", "allowzero"),
    "Resize": _resize,
    "Selu": _selu,
    "Sigmoid": _function(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax(torch.softmax),
    "Softplus": _function(F.softplus),
    "Softsign": _function(F.softsign),
    "Split": _split,
    "Squeeze": _view("axes"),
    "Sub": _arithmetic(torch.sub),
    "Tanh": _function(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _view("axes"),
    "Upsample": _resize,
}


__all__ = ["read_onnx"]
