"""From a PyTorch module, as written, to the compiler's float graph.

torch.fx traces the module, batch norm is folded into the convolution before it, activation functions into the op before
them, dropout and identity vanish, and a flatten only changes how the linear layer's columns are ordered. MCUNet's and
torchvision's MobileNetV2 blocks go through unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn

from port_planner.mcu.ir import (
    WEIGHTED,
    Clamp,
    FloatArray,
    Graph,
    KernelCall,
    McuCompileError,
    OpKind,
    Shape,
    verify_mcu_graph,
)

INPUT = "input"


@dataclass(frozen=True, slots=True)
class NodeValue:
    """What an fx node stands for: a tensor of the graph, its layout, and whether it is flattened."""

    tensor: str
    shape: Shape
    flat: bool = False


def import_module(module: nn.Module, input_shape: Sequence[int], name: str = "model") -> Graph:
    """Return the float graph of a module in eval mode.

    For one sample of `input_shape`: [C, H, W] or [C, W].

    Raises McuCompileError, with the layer and what to do, for anything the firmware has no kernel for.
    """
    was_training = module.training
    module.eval()
    try:
        traced = fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError) as error:
        raise McuCompileError(name, f"cannot be traced ({error})", "remove control flow on tensor values") from error
    finally:
        module.train(was_training)
    importer = _Importer(traced, _sample_shape(input_shape))
    graph = Graph(name, INPUT, importer.input_shape, importer.run())
    verify_mcu_graph(graph)
    return graph


def _sample_shape(extents: Sequence[int]) -> Shape:
    if len(extents) == 3:
        return Shape(extents[1], extents[2], extents[0])
    if len(extents) == 2:
        return Shape(1, extents[1], extents[0])
    if len(extents) == 1:
        return Shape(1, 1, extents[0])
    raise McuCompileError("input", f"{len(extents)} axes", "give one sample as [C, H, W], [C, W] or [C]")


def _pair(value: object, one_d: bool) -> tuple[int, int]:
    """Return (vertical, horizontal) of a torch argument: an int or a tuple.

    1-D extents are horizontal.
    """
    numbers = (value,) if isinstance(value, int) else tuple(cast(Sequence[int], value))
    if one_d:
        return -1, int(numbers[0])
    return (int(numbers[0]), int(numbers[0])) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def _window(value: object, one_d: bool, missing: int) -> tuple[int, int]:
    vertical, horizontal = _pair(value, one_d)
    return (missing if vertical < 0 else vertical), horizontal


def _function_name(node: fx.Node) -> str:
    """Return the name of the function or method called.

    A printed function also carries its address, in which "1d" may stand.
    """
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.name))


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.detach().to(torch.float32).cpu().numpy().copy()


def _out_shape(
    shape: Shape, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], channels: int
) -> Shape:
    height = (shape.height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    width = (shape.width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    return Shape(height, width, channels)


class _Importer:
    """One pass over the fx nodes.

    `ops` grows in execution order, later nodes may rewrite the newest op.
    """

    def __init__(self, traced: fx.GraphModule, input_shape: Shape) -> None:
        self.traced = traced
        self.modules = dict(traced.named_modules())
        self.input_shape = input_shape
        self.values: dict[fx.Node, NodeValue] = {}
        self.ops: dict[str, KernelCall] = {}

    def run(self) -> tuple[KernelCall, ...]:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if INPUT in {value.tensor for value in self.values.values()}:
                    raise McuCompileError(node.name, "a second input", "feed the sensors as channels of one input")
                self.values[node] = NodeValue(INPUT, self.input_shape)
            elif node.op == "output":
                self._finish(node)
            elif node.op == "call_module":
                self.values[node] = self._module(node)
            elif self._asks_for_a_shape(node):
                continue  # only ever an argument of view and reshape, which flatten
            elif node.op in ("call_function", "call_method"):
                self.values[node] = self._function(node)
            else:
                raise McuCompileError(node.name, f"{node.op} {node.target}", "keep parameters inside layers")
        return tuple(self.ops.values())

    def _asks_for_a_shape(self, node: fx.Node) -> bool:
        if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
            return True
        return node.target is operator.getitem and node.args[0] not in self.values

    def _finish(self, node: fx.Node) -> None:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise McuCompileError("output", "not a single tensor", "return the logits only")
        last = self.ops.get(self.values[result].tensor)
        if (
            last is None
            or last.kind is not OpKind.CONV
            or last.clamp is not Clamp.NONE
            or last.in_shape.height * last.in_shape.width != 1
        ):
            raise McuCompileError("output", "the model does not end in a linear layer", "end it with nn.Linear")
        self.ops[last.name] = replace(last, kind=OpKind.CLASSIFIER)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _source(self, node: fx.Node, position: int = 0) -> NodeValue:
        argument = node.args[position] if len(node.args) > position else None
        if not isinstance(argument, fx.Node) or argument not in self.values:
            raise McuCompileError(
                node.name, f"argument {position} is not a tensor", "use tensors computed from the input"
            )
        return self.values[argument]

    def _module(self, node: fx.Node) -> NodeValue:
        module = self.modules[str(node.target)]
        value = self._source(node)
        label = str(node.target).replace(".", "_")
        match module:
            case nn.Conv2d() | nn.Conv1d():
                return self._convolution(label, module, value)
            case nn.BatchNorm2d() | nn.BatchNorm1d():
                return self._fold_batch_norm(label, module, value, node)
            case nn.Linear():
                return self._linear(label, module, value)
            case nn.ReLU():
                return self._activate(label, Clamp.RELU, value, node)
            case nn.ReLU6():
                return self._activate(label, Clamp.RELU6, value, node)
            case nn.Hardtanh() if (module.min_val, module.max_val) == (0.0, 6.0):
                return self._activate(label, Clamp.RELU6, value, node)
            case nn.Dropout() | nn.Dropout2d() | nn.Dropout1d() | nn.Identity():
                return value
            case nn.Flatten():
                return replace(value, flat=True)
            case nn.MaxPool2d() | nn.MaxPool1d() | nn.AvgPool2d() | nn.AvgPool1d():
                return self._pool_module(label, module, value)
            case nn.AdaptiveAvgPool2d() | nn.AdaptiveAvgPool1d():
                return self._global_average(label, module.output_size, value)
        raise McuCompileError(
            label, f"no kernel for {type(module).__name__}", "use convolution, pooling, ReLU, add, linear"
        )

    def _function(self, node: fx.Node) -> NodeValue:
        target, name = node.target, _function_name(node)
        if target in (operator.add, operator.iadd, torch.add) or name.removesuffix("_") == "add":
            return self._add(node)
        value = self._source(node)
        if target in (F.relu, torch.relu):
            return self._activate(node.name, Clamp.RELU, value, node)
        if target is F.relu6:
            return self._activate(node.name, Clamp.RELU6, value, node)
        if target is torch.flatten:
            return replace(value, flat=True)
        match name:
            case "relu" | "relu_":
                return self._activate(node.name, Clamp.RELU, value, node)
            case "flatten" | "view" | "reshape":
                return replace(value, flat=True)
            case "squeeze":
                return replace(value, flat=value.flat or value.shape.height * value.shape.width == 1)
            case "dropout" | "contiguous":
                return value
            case "mean":
                return self._mean(node, value)
            case "adaptive_avg_pool2d" | "adaptive_avg_pool1d":
                return self._global_average(node.name, self._argument(node, 1, "output_size", 1), value)
            case "max_pool2d" | "max_pool1d" | "avg_pool2d" | "avg_pool1d":
                return self._pool_function(node, value)
        raise McuCompileError(node.name, f"no kernel for {name}", "use convolution, pooling, ReLU, add, linear")

    @staticmethod
    def _argument(node: fx.Node, position: int, keyword: str, default: object) -> object:
        return node.args[position] if len(node.args) > position else node.kwargs.get(keyword, default)

    # -- layers -----------------------------------------------------------------------------------------------------

    def _append(self, op: KernelCall) -> NodeValue:
        if op.out_shape.height < 1 or op.out_shape.width < 1:
            raise McuCompileError(op.name, f"output {op.out_shape} is empty", "feed a larger input")
        name, number = op.name, 2
        while name in self.ops or name == INPUT:
            name, number = f"{op.name}_{number}", number + 1
        self.ops[name] = replace(op, name=name)
        return NodeValue(name, op.out_shape)

    def _convolution(self, label: str, conv: nn.Conv2d | nn.Conv1d, value: NodeValue) -> NodeValue:
        one_d = isinstance(conv, nn.Conv1d)
        kernel, stride = _window(conv.kernel_size, one_d, 1), _window(conv.stride, one_d, 1)
        if any(d != 1 for d in conv.dilation) or conv.padding_mode != "zeros":
            raise McuCompileError(label, "dilation or non-zero padding", "use dilation 1 and zero padding")
        padding = self._padding(label, conv.padding, kernel, one_d)
        depthwise = conv.groups > 1
        if depthwise and not conv.groups == conv.in_channels == conv.out_channels:
            raise McuCompileError(label, f"groups {conv.groups}", "use groups=1, or depthwise with multiplier 1")
        weight = _array(conv.weight)
        weight = weight[:, :, None, :] if one_d else weight
        layout = weight[:, 0].transpose(1, 2, 0) if depthwise else weight.transpose(0, 2, 3, 1)
        bias = np.zeros(conv.out_channels, np.float32) if conv.bias is None else _array(conv.bias)
        kind = OpKind.DEPTHWISE if depthwise else OpKind.CONV
        out = _out_shape(value.shape, kernel, stride, padding, conv.out_channels)
        return self._append(
            KernelCall(
                label,
                kind,
                (value.tensor,),
                value.shape,
                out,
                kernel,
                stride,
                padding,
                Clamp.NONE,
                np.ascontiguousarray(layout),
                bias,
            )
        )

    @staticmethod
    def _padding(label: str, padding: object, kernel: tuple[int, int], one_d: bool) -> tuple[int, int]:
        if padding == "valid":
            return 0, 0
        if padding == "same":
            if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
                raise McuCompileError(label, "'same' padding of an even kernel", "use an odd kernel")
            return kernel[0] // 2, kernel[1] // 2
        return _window(padding, one_d, 0)

    def _fold_batch_norm(
        self, label: str, norm: nn.BatchNorm1d | nn.BatchNorm2d, value: NodeValue, node: fx.Node
    ) -> NodeValue:
        op = self._sole_producer(label, value, node)
        if op.kind not in WEIGHTED or op.clamp is not Clamp.NONE or op.weight is None or op.bias is None:
            raise McuCompileError(label, "batch norm not directly behind a convolution", "put it behind one")
        if norm.running_mean is None or norm.running_var is None:
            raise McuCompileError(label, "batch norm without running statistics", "train it with track_running_stats")
        scale = 1.0 / np.sqrt(norm.running_var.detach().double().numpy() + norm.eps)
        if norm.affine:
            scale = scale * norm.weight.detach().double().numpy()
        shift = -norm.running_mean.detach().double().numpy() * scale
        if norm.affine:
            shift = shift + norm.bias.detach().double().numpy()
        broadcast = scale if op.kind is OpKind.DEPTHWISE else scale[:, None, None, None]
        weight = (op.weight * broadcast).astype(np.float32)
        self.ops[op.name] = replace(op, weight=weight, bias=(op.bias * scale + shift).astype(np.float32))
        return value

    def _linear(self, label: str, linear: nn.Linear, value: NodeValue) -> NodeValue:
        shape = value.shape
        if not value.flat and shape.height * shape.width != 1:
            raise McuCompileError(label, f"linear layer on {shape}", "flatten or pool before it")
        weight = _array(linear.weight)
        if linear.in_features != shape.elements:
            raise McuCompileError(
                label, f"{linear.in_features} features, input has {shape.elements}", "check the input shape"
            )
        # torch flattens [C, H, W]; the arena holds [H, W, C]
        weight = (
            weight.reshape(-1, shape.channels, shape.height, shape.width)
            .transpose(0, 2, 3, 1)
            .reshape(len(weight), 1, 1, -1)
        )
        bias = np.zeros(linear.out_features, np.float32) if linear.bias is None else _array(linear.bias)
        flat = Shape(1, 1, shape.elements)
        out = Shape(1, 1, linear.out_features)
        return self._append(
            KernelCall(label, OpKind.CONV, (value.tensor,), flat, out, weight=np.ascontiguousarray(weight), bias=bias)
        )

    def _sole_producer(self, label: str, value: NodeValue, node: fx.Node) -> KernelCall:
        source = node.args[0]
        if value.tensor not in self.ops:
            raise McuCompileError(label, "acts on the input itself", "scale the data instead")
        if isinstance(source, fx.Node) and len(source.users) > 1:
            raise McuCompileError(label, f"{value.tensor} is also read without it", "apply it before the branch")
        return self.ops[value.tensor]

    def _activate(self, label: str, clamp: Clamp, value: NodeValue, node: fx.Node) -> NodeValue:
        if value.tensor in self.ops and self.ops[value.tensor].clamp is clamp:
            return value
        op = self._sole_producer(label, value, node)
        if (op.clamp is not Clamp.NONE and clamp is not Clamp.RELU) or op.clamp is Clamp.RELU6:
            clamp = Clamp.RELU6
        self.ops[op.name] = replace(op, clamp=clamp)
        return value

    def _add(self, node: fx.Node) -> NodeValue:
        if node.kwargs.get("alpha", 1) != 1:
            raise McuCompileError(node.name, "add with alpha", "scale the branch inside its convolution")
        left, right = self._source(node, 0), self._source(node, 1)
        if left.shape != right.shape or left.flat or right.flat:
            raise McuCompileError(node.name, f"adds {left.shape} and {right.shape}", "only equal shapes are added")
        return self._append(KernelCall(node.name, OpKind.ADD, (left.tensor, right.tensor), left.shape, left.shape))

    # -- pooling ----------------------------------------------------------------------------------------------------

    def _pool(
        self,
        label: str,
        kind: OpKind,
        value: NodeValue,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> NodeValue:
        if value.flat:
            raise McuCompileError(label, "pooling of a flattened tensor", "pool before flattening")
        if padding[0] * 2 > kernel[0] or padding[1] * 2 > kernel[1]:
            raise McuCompileError(label, f"padding {padding} over half the window {kernel}", "pad less")
        out = _out_shape(value.shape, kernel, stride, padding, value.shape.channels)
        return self._append(KernelCall(label, kind, (value.tensor,), value.shape, out, kernel, stride, padding))

    def _pool_arguments(
        self, label: str, read: Callable[[str, object], object], one_d: bool, average: bool, value: NodeValue
    ) -> NodeValue:
        kernel = _window(read("kernel_size", None), one_d, 1)
        stride_argument = read("stride", None)
        stride = kernel if stride_argument in (None, ()) else _window(stride_argument, one_d, 1)
        padding = _window(read("padding", 0), one_d, 0)
        if read("ceil_mode", False) or read("dilation", 1) not in (1, (1,), (1, 1)) or read("return_indices", False):
            raise McuCompileError(label, "ceil_mode, dilation or indices", "pool without them")
        if average and (
            read("divisor_override", None) is not None or (not read("count_include_pad", True) and any(padding))
        ):
            raise McuCompileError(label, "a divisor other than the window", "use count_include_pad=True")
        return self._pool(label, OpKind.AVERAGE_POOL if average else OpKind.MAX_POOL, value, kernel, stride, padding)

    def _pool_module(self, label: str, module: nn.Module, value: NodeValue) -> NodeValue:
        one_d = isinstance(module, nn.MaxPool1d | nn.AvgPool1d)
        average = isinstance(module, nn.AvgPool1d | nn.AvgPool2d)
        return self._pool_arguments(label, lambda key, default: getattr(module, key, default), one_d, average, value)

    def _pool_function(self, node: fx.Node, value: NodeValue) -> NodeValue:
        name = _function_name(node)
        average = "avg" in name
        order = ["kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
        if not average:
            order = ["kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"]
        return self._pool_arguments(
            node.name,
            lambda key, default: self._argument(node, order.index(key) + 1, key, default) if key in order else default,
            "1d" in name,
            average,
            value,
        )

    def _global_average(self, label: str, output_size: object, value: NodeValue) -> NodeValue:
        sizes = {output_size} if isinstance(output_size, int) else set(cast(Sequence[int], output_size))
        if sizes != {1}:
            raise McuCompileError(label, f"adaptive pooling to {output_size}", "pool to 1, or use AvgPool2d")
        if value.shape.height * value.shape.width == 1:
            return value
        window = (value.shape.height, value.shape.width)
        return self._pool(label, OpKind.AVERAGE_POOL, value, window, (1, 1), (0, 0))

    def _mean(self, node: fx.Node, value: NodeValue) -> NodeValue:
        """Average over the spatial axes, at once or, as MCUNet writes it, mean(3) followed by mean(2)."""
        axes = self._axes(node)
        if not axes or not axes <= {2, 3}:
            raise McuCompileError(node.name, f"mean over axes {sorted(axes)}", "average over the spatial axes")
        if axes == {2, 3} or value.shape.height == 1 or value.shape.width == 1:
            return self._global_average(node.name, 1, value)
        source = node.args[0]
        if axes == {3} and any(self._is_mean(user) and self._axes(user) == {2} for user in node.users):
            return value
        if axes == {2} and isinstance(source, fx.Node) and self._is_mean(source) and self._axes(source) == {3}:
            return self._global_average(node.name, 1, value)
        raise McuCompileError(node.name, f"mean over axis {sorted(axes)} alone", "average over both spatial axes")

    @staticmethod
    def _is_mean(node: fx.Node) -> bool:
        return node.target == "mean" or node.target is torch.mean

    def _axes(self, node: fx.Node) -> set[int]:
        argument = self._argument(node, 1, "dim", None)
        axes = (argument,) if isinstance(argument, int) else tuple(cast(Sequence[int], argument or ()))
        return {axis if axis >= 0 else axis + 4 for axis in axes}
