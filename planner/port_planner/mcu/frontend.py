"""Import a PyTorch module, as written, into the compiler's float graph.

torch.fx traces the module. Batch norm is folded into the convolution before it, and an activation function into the op
before it. Dropout and identity disappear. Views only change what the axes of a tensor mean (`torch_axes`). The
MobileNetV2 blocks of MCUNet and torchvision are imported unchanged. The graph is then compared with the module.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn

from port_planner.mcu.elementwise import module_function, node_function
from port_planner.mcu.ir import (
    WEIGHTED,
    Clamp,
    Elementwise,
    FloatArray,
    Graph,
    KernelCall,
    LayerOrigin,
    Loss,
    McuCompileError,
    OpKind,
    Shape,
    verify_mcu_graph,
)
from port_planner.mcu.module_gradients import trained_as_module
from port_planner.mcu.module_trace import (
    evaluating,
    logits_node,
    node_place,
    refuse_difference,
    refuse_parameters,
    run_nodes,
    shared_names,
    trace_module,
)
from port_planner.mcu.recurrent import recurrent_ops, unsupported_gru
from port_planner.mcu.selections import choosing_ops, identity_layer, image_layer, read_choice
from port_planner.mcu.torch_axes import GRAPH_AXES, TorchAxes, extent

INPUT = "input"
SOFTMAX_NOTE = "the softmax at the end is left out: the loss has one, and the board's outputs are logits"
OTHER_LAYERS = "use supported layers; port-agent's docs/boards.md lists them"
CHOOSING = frozenset({"getitem", "narrow", "select", "flip", "roll", "pad", "channel_shuffle", "repeat"})
SPLITTING = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})
"""Calls that return several tensors, which later nodes select one by one."""
MAX_OUTPUTS = 256
"""Largest number of outputs of a model that does not end in a linear layer: they take their
square in bytes of flash.
"""
_NOISE_SAMPLES = 2
"""Number of noise samples; with one, the batch would be an axis of extent 1, which squeeze() removes."""


@dataclass(frozen=True, slots=True)
class NodeValue:
    """What an fx node stands for: a tensor of the graph, and its axes as torch sees them."""

    tensor: str
    seen: TorchAxes

    @property
    def shape(self) -> Shape:
        return self.seen.shape


def import_module(
    module: nn.Module,
    input_shape: Sequence[int],
    name: str = "model",
    samples: torch.Tensor | None = None,
    loss: Loss = Loss.CROSS_ENTROPY,
) -> Graph:
    """Return the float graph of a module in eval mode, compared with the module on `samples` (None: on noise).

    `input_shape`: of one sample, [C, H, W] or [C, W], or [steps, features] that a GRU reads. A softmax at the end is
    left out if `loss` contains one.

    Raises McuCompileError, with the layer and the remedy, for anything that the firmware has no kernel for, and if the
    graph computes something else than the module.
    """
    noise = torch.randn(_NOISE_SAMPLES, *input_shape, generator=torch.Generator().manual_seed(1))
    samples = noise if samples is None else samples
    refuse_parameters(module)
    with evaluating(module):
        traced = trace_module(module, name)
        seen = _sample_axes(traced, tuple(input_shape))
        importer = _Importer(traced, seen, run_nodes(traced, noise), loss)
        state = {
            key: _array(value) if value.is_floating_point() else value.numpy(force=True).copy()
            for key, value in module.state_dict().items()
        }
        notes = (SOFTMAX_NOTE,) if importer.end is not importer.logits else ()
        graph = Graph(name, INPUT, seen.shape, importer.run(), state, notes, loss, shared_names(module))
        verify_mcu_graph(graph)
        lasting = importer.lasting()
        refuse_difference(module, traced, graph, lasting, samples)
        return trained_as_module(module, graph, lasting[cast(fx.Node, importer.logits)], bool(notes), samples)


def _sample_axes(traced: fx.GraphModule, extents: tuple[int, ...]) -> TorchAxes:
    """Return the axes of a sample; [steps, features] of a recurrent layer are an image of one channel."""
    readers = next((list(node.users) for node in traced.graph.nodes if node.op == "placeholder"), [])
    modules = [traced.get_submodule(str(node.target)) for node in readers if node.op == "call_module"]
    if len(extents) == 2 and any(isinstance(module, nn.GRU) for module in modules):
        return TorchAxes.of(_sample_shape((1, *extents)), "HW")
    return TorchAxes.of(_sample_shape(extents), GRAPH_AXES if len(extents) == 3 else "CW"[: len(extents)])


def _sample_shape(extents: Sequence[int]) -> Shape:
    if len(extents) == 3:
        return Shape(extents[1], extents[2], extents[0])
    if len(extents) == 2:
        return Shape(1, extents[1], extents[0])
    if len(extents) == 1:
        return Shape(1, 1, extents[0])
    raise McuCompileError("input", f"{len(extents)} axes", "give one sample as [C, H, W], [C, W] or [C]")


def _numbers(value: object, count: int) -> tuple[int, ...]:
    """Return a torch argument, an int or a tuple, as one number for each of `count` axes."""
    numbers = (value,) if isinstance(value, int) else tuple(cast(Sequence[int], value))
    return tuple(int(number) for number in (numbers * count if len(numbers) == 1 else numbers))


def _by_axis(names: Sequence[str], numbers: Sequence[int], missing: int) -> tuple[int, int]:
    """Return numbers that belong to axes of the graph as (vertical, horizontal)."""
    given = dict(zip(names, numbers, strict=True))
    return given.get("H", missing), given.get("W", missing)


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

    `ops` grows in execution order; later nodes may rewrite an op whose result nothing else reads.
    """

    def __init__(self, traced: fx.GraphModule, seen: TorchAxes, results: Mapping[fx.Node, object], loss: Loss) -> None:
        self.traced = traced
        self.modules = dict(traced.named_modules())
        self.input = seen
        self.results = results
        self.values: dict[fx.Node, NodeValue] = {}
        self.ops: dict[str, KernelCall] = {}
        self.views: dict[str, list[fx.Node]] = {}
        """The nodes that stand for a tensor in its op's current form."""
        end = traced.graph.output_node().args[0]
        self.end = end if isinstance(end, fx.Node) else None
        self.logits = self.end
        if self.end is not None and loss is Loss.CROSS_ENTROPY:
            self.logits = logits_node(self.end)
        self.owners: dict[int, tuple[str, object]] = {}
        """The op with the weights of a module or parameter, by its identity; holding the object
        keeps the identity unique.
        """
        self.sequences: dict[fx.Node, NodeValue] = {}
        """The states of recurrent layers after each step: by the layer's node, and by that of its last state."""

    def run(self) -> tuple[KernelCall, ...]:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if self.values:
                    raise McuCompileError(node.name, "a second input", "feed the sensors as channels of one input")
                self._stand_for(node, NodeValue(INPUT, self.input))
            elif node.op == "output":
                return self._finish(node)
            elif self._is_recurrent(node):
                self._recurrent(node)
            elif not isinstance(self.results[node], torch.Tensor):
                self._refuse_several(node)  # other results are sizes, which only views use as arguments
            elif node is self.end and node is not self.logits:
                continue  # a softmax: the loss has one of its own, and the order of the classes stays the same
            elif node.op == "call_module":
                self._stand_for(node, self._module(node))
            elif node.op in ("call_function", "call_method"):
                self._stand_for(node, self._function(node))
            else:
                raise McuCompileError(node_place(node), f"{node.op} {node.target}", "keep parameters inside layers")
        raise McuCompileError("output", "the module returns nothing", "return the logits")

    def lasting(self) -> dict[fx.Node, tuple[str, TorchAxes]]:
        """Return the nodes that stand for a tensor in its op's final form, in execution order."""
        kept = {node for name, nodes in self.views.items() if name == INPUT or name in self.ops for node in nodes}
        return {node: (value.tensor, value.seen) for node, value in self.values.items() if node in kept}

    def _stand_for(self, node: fx.Node, value: NodeValue) -> None:
        self.values[node] = value
        self.views.setdefault(value.tensor, []).append(node)

    def _finish(self, node: fx.Node) -> tuple[KernelCall, ...]:
        if not isinstance(node.args[0], fx.Node) or self.logits is None:
            raise McuCompileError("output", "not a single tensor", "return the logits only")
        if self.logits not in self.values:
            raise McuCompileError("output", f"{self.logits} is not a tensor [N, ...]", "return the logits only")
        value = self.values[self.logits]
        if not self._is_linear(value):
            self._refuse_end(value)
            value = self._append(node, identity_layer(value.tensor, value.seen), ("C",))
            self.values[self.logits] = value
        last = self.ops[value.tensor]
        self.ops[last.name] = replace(last, kind=OpKind.CLASSIFIER)
        self._drop_unread(last.name)
        return tuple(self.ops.values())

    @staticmethod
    def _refuse_end(value: NodeValue) -> None:
        """Raise McuCompileError for outputs that are not one axis, or more outputs than a final
        pass-through layer may have.
        """
        if len(value.seen.axes) != 1:
            raise McuCompileError(
                "output",
                f"its shape is {list(value.seen.extents)}, but a board's outputs are one axis",
                "end the model with nn.Flatten() or nn.Linear",
            )
        if value.shape.elements > MAX_OUTPUTS:
            raise McuCompileError(
                "output",
                f"{value.shape.elements} outputs do not come from a linear layer, and passing them on takes their "
                "square in bytes of flash",
                f"end the model with nn.Linear, or give it at most {MAX_OUTPUTS} outputs",
            )

    def _is_linear(self, value: NodeValue) -> bool:
        """Return whether a linear layer computes a tensor."""
        op = self.ops.get(value.tensor)
        if op is None or op.kind is not OpKind.CONV or op.clamp is not Clamp.NONE:
            return False
        return op.in_shape.height * op.in_shape.width == 1

    def _drop_unread(self, result: str) -> None:
        """Remove ops on which the result does not depend, and compute the result last."""
        needed = {result}
        for op in reversed(self.ops.values()):
            needed.update(op.inputs if op.name in needed else ())
        self.ops = {name: op for name, op in self.ops.items() if name in needed}

    def _refuse_several(self, node: fx.Node) -> None:
        """Raise McuCompileError for a layer or function that returns several tensors."""
        result = self.results[node]
        if node.target in SPLITTING or getattr(node.target, "__name__", "") in SPLITTING:
            return
        if isinstance(result, tuple | list) and any(isinstance(each, torch.Tensor | tuple) for each in result):
            module = self.modules.get(str(node.target)) if node.op == "call_module" else None
            kind = node.name if module is None else type(module).__name__
            raise McuCompileError(node_place(node), f"no kernel for {kind}, which gives several tensors", OTHER_LAYERS)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _source(self, node: fx.Node, position: int = 0) -> NodeValue:
        argument = node.args[position] if len(node.args) > position else None
        if not isinstance(argument, fx.Node) or argument not in self.values:
            raise McuCompileError(
                node_place(node), f"argument {position} is not a tensor", "use tensors computed from the input"
            )
        return self.values[argument]

    def _module(self, node: fx.Node) -> NodeValue:
        module = self.modules[str(node.target)]
        value = self._source(node)
        self._refuse_derived(node, module)
        match module:
            case nn.Conv2d() | nn.Conv1d():
                return self._convolution(node, module, value)
            case nn.ConvTranspose2d() | nn.ConvTranspose1d():
                return self._transposed(node, module, value)
            case nn.BatchNorm2d() | nn.BatchNorm1d():
                return self._batch_norm(node, module, value)
            case nn.Linear():
                return self._linear(node, module, value)
            case nn.ReLU():
                return self._activate(node, Clamp.RELU, value)
            case nn.ReLU6():
                return self._activate(node, Clamp.RELU6, value)
            case nn.Hardtanh() if (module.min_val, module.max_val) == (0.0, 6.0):
                return self._activate(node, Clamp.RELU6, value)
            case nn.Dropout() | nn.Dropout2d() | nn.Dropout1d() | nn.Identity():
                return value
            case nn.Upsample() | nn.UpsamplingNearest2d():
                return self._upsample(node, module.mode, value)
            case nn.Flatten() | nn.Unflatten():
                return self._view(node, value)
            case nn.ZeroPad1d() | nn.ZeroPad2d() | nn.ConstantPad1d() | nn.ConstantPad2d() | nn.ChannelShuffle():
                return self._choose(node, value, module)
            case nn.GLU():
                return self._gate(node, module.dim, value)
            case nn.MaxPool2d() | nn.MaxPool1d() | nn.AvgPool2d() | nn.AvgPool1d():
                return self._pool_module(node, module, value)
            case nn.AdaptiveAvgPool2d() | nn.AdaptiveAvgPool1d():
                dimensions = 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2
                return self._adaptive_average(node, module.output_size, dimensions, value)
        function = module_function(module)
        if function is not None:
            return self._tabulate(node, function, value)
        raise McuCompileError(node_place(node), f"no kernel for {type(module).__name__}", OTHER_LAYERS)

    @staticmethod
    def _refuse_derived(node: fx.Node, module: nn.Module) -> None:
        """Raise McuCompileError for a weight that is computed from other parameters: a board
        would train another weight.
        """
        own = dict(module.named_parameters(recurse=False))
        names = ("weight", "weight_ih_l0", "weight_hh_l0")
        if any(isinstance(getattr(module, name, None), torch.Tensor) and name not in own for name in names):
            raise McuCompileError(
                node_place(node),
                "its weight is made of other parameters (weight or spectral norm, pruning, a parametrization)",
                "make it a parameter: remove_weight_norm, prune.remove or remove_parametrizations",
            )

    def _function(self, node: fx.Node) -> NodeValue:
        target = node.target
        name = (target if isinstance(target, str) else str(getattr(target, "__name__", node.name))).removesuffix("_")
        function = node_function(node, name)
        if function is not None and not (
            name in ("add", "iadd") and len(node.args) > 1 and node.args[0] is node.args[1]
        ):
            return self._tabulate(node, function, self.values[node.all_input_nodes[0]])
        if name in ("add", "iadd", "sub", "isub", "subtract"):
            return self._add(node, negated="sub" in name)
        if name in ("mul", "imul", "multiply"):
            return self._multiply(node)
        if name in ("cat", "concat", "concatenate"):
            return self._concatenate(node)
        if name in CHOOSING:
            return self._choose(node, *self._chosen_from(node))
        value = self._source(node)
        match name:
            case "glu":
                return self._gate(node, self._argument(node, 1, "dim", -1), value)
            case "relu":
                return self._activate(node, Clamp.RELU, value)
            case "relu6":
                return self._activate(node, Clamp.RELU6, value)
            case "flatten" | "view" | "reshape" | "squeeze" | "unsqueeze" | "unflatten":
                return self._view(node, value)
            case "permute" | "transpose" | "swapaxes" | "movedim":
                return self._permute(node, value)
            case "dropout" | "contiguous" | "clone":
                return value
            case "mean":
                return self._mean(node, value)
            case "adaptive_avg_pool2d" | "adaptive_avg_pool1d":
                size = self._argument(node, 1, "output_size", 1)
                return self._adaptive_average(node, size, 1 if "1d" in name else 2, value)
            case "max_pool2d" | "max_pool1d" | "avg_pool2d" | "avg_pool1d":
                return self._pool_function(node, name, value)
            case "interpolate" | "upsample":
                return self._upsample(node, str(self._argument(node, 3, "mode", "nearest")), value)
        raise McuCompileError(node_place(node), f"no kernel for {name}", OTHER_LAYERS)

    def _argument(self, node: fx.Node, position: int, keyword: str, default: object) -> object:
        """Return an argument of a call; sizes of tensors in it are replaced by their numbers."""
        found: Any = node.args[position] if len(node.args) > position else node.kwargs.get(keyword, default)

        def number(inner: fx.Node) -> Any:
            result = self.results[inner]
            return inner if isinstance(result, torch.Tensor) else result

        return fx.map_arg(found, number)

    # -- views ------------------------------------------------------------------------------------------------------

    def _result_shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape that a node had when torch ran it, without the batch."""
        batch, *extents = cast(torch.Tensor, self.results[node]).shape or (0,)
        if batch != _NOISE_SAMPLES:
            raise McuCompileError(node_place(node), "the batch is no longer the first axis", "keep it there")
        return tuple(extents)

    def _view(self, node: fx.Node, value: NodeValue) -> NodeValue:
        extents = self._result_shape(node)
        seen = value.seen.reshaped(extents)
        if seen is None and value.seen.axes == ("C",) and len(extents) in (2, 3):
            axes = ("C", "W") if len(extents) == 2 else GRAPH_AXES
            return self._append(node, image_layer(value.tensor, extents), axes)
        if seen is None:
            shapes = f"{list(value.seen.extents)} as {list(extents)}"
            raise McuCompileError(node_place(node), f"takes {shapes}, which divides an axis", "merge whole axes only")
        return NodeValue(value.tensor, seen)

    def _permute(self, node: fx.Node, value: NodeValue) -> NodeValue:
        """Read the order of the axes from torch, with a tensor whose strides tell them apart."""
        extents = (_NOISE_SAMPLES, *value.seen.extents)
        probe = torch.empty_strided(extents, tuple(range(1, len(extents) + 1)), device="meta")
        arguments = [probe, *node.args[1:]]
        if isinstance(node.target, str):
            moved = getattr(torch.Tensor, node.target)(*arguments, **node.kwargs)
        else:
            moved = cast(Callable[..., torch.Tensor], node.target)(*arguments, **node.kwargs)
        batch, *order = (stride - 1 for stride in moved.stride())
        if batch != 0:
            raise McuCompileError(node_place(node), "the batch is no longer the first axis", "keep it there")
        return NodeValue(value.tensor, value.seen.permuted([axis - 1 for axis in order]))

    # -- layers -----------------------------------------------------------------------------------------------------

    def _append(self, node: fx.Node, op: KernelCall, axes: Sequence[str]) -> NodeValue:
        """Add an op under its node's name, followed by its own; to torch, its result has these axes of the graph."""
        if op.out_shape.height < 1 or op.out_shape.width < 1:
            raise McuCompileError(node_place(node), f"output {op.out_shape} is empty", "feed a larger input")
        label = re.sub(r"\W", "_", str(node.target), flags=re.ASCII) if node.op == "call_module" else node.name
        label += op.name
        name, number = label, 2
        while name in self.ops or name == INPUT:
            name, number = f"{label}_{number}", number + 1
        self.ops[name] = replace(op, name=name)
        return NodeValue(name, TorchAxes.of(op.out_shape, axes))

    def _own(self, value: NodeValue, *owned: object) -> NodeValue:
        """Record that an op has the weights of these modules or parameters; a later op with the
        same weights shares them.
        """
        op = self.ops[value.tensor]
        for thing in owned:
            owner, _ = self.owners.setdefault(id(thing), (op.name, thing))
            if owner != op.name:
                op = replace(op, shares=owner)
        self.ops[op.name] = op
        return value

    def _image(self, node: fx.Node, value: NodeValue, dimensions: int) -> tuple[str, ...]:
        names = value.seen.image(dimensions)
        if names is None:
            raise McuCompileError(
                node_place(node),
                f"its input {list(value.seen.extents)} is not channels and {dimensions} axes of the data",
                "give it [N, C, H, W] or [N, C, W], where C is the channel axis of the layer before",
            )
        return names

    def _convolution(self, node: fx.Node, conv: nn.Conv2d | nn.Conv1d, value: NodeValue) -> NodeValue:
        dimensions = 1 if isinstance(conv, nn.Conv1d) else 2
        names = self._image(node, value, dimensions)
        if conv.padding_mode != "zeros":
            raise McuCompileError(node_place(node), f"{conv.padding_mode} padding", "use zero padding")
        kernel = _by_axis(names, conv.kernel_size, 1)
        stride = _by_axis(names, conv.stride, 1)
        padding, dilation = self._padding(node, conv, names), _by_axis(names, conv.dilation, 1)
        depthwise = dilation == (1, 1) and 1 < conv.groups == conv.in_channels == conv.out_channels
        plain = OpKind.CONV if dilation == (1, 1) and conv.groups == 1 else OpKind.GROUPED
        windows = tuple(_numbers(conv.kernel_size, dimensions)) if names == ("W", "H") else kernel
        down, across = (3, 2) if names == ("W", "H") else (2, 3)
        extents = (conv.out_channels, conv.in_channels // conv.groups, *windows)
        origin = LayerOrigin(str(node.target), extents, (1, down, across, 0) if depthwise else (0, down, across, 1))
        layout = _array(conv.weight).reshape(extents).transpose(origin.order)
        bias = np.zeros(conv.out_channels, np.float32) if conv.bias is None else _array(conv.bias)
        reach = tuple((taps - 1) * step + 1 for taps, step in zip(kernel, dilation, strict=True))
        out = _out_shape(value.shape, cast(tuple[int, int], reach), stride, padding, conv.out_channels)
        op = KernelCall(
            "",
            OpKind.DEPTHWISE if depthwise else plain,
            (value.tensor,),
            value.shape,
            out,
            kernel,
            stride,
            padding,
            weight=np.ascontiguousarray(layout[0] if depthwise else layout),
            bias=bias,
            origin=origin,
            dilation=dilation,
            groups=1 if depthwise else conv.groups,
        )
        return self._own(self._append(node, op, ("C", *names)), conv, conv.weight)

    def _transposed(self, node: fx.Node, conv: nn.ConvTranspose2d | nn.ConvTranspose1d, value: NodeValue) -> NodeValue:
        dimensions = 1 if isinstance(conv, nn.ConvTranspose1d) else 2
        names = self._image(node, value, dimensions)
        after = _by_axis(names, self._result_shape(node)[1:], 1)
        down, across = (4, 3) if names == ("W", "H") else (3, 4)
        kernel, groups = _by_axis(names, conv.kernel_size, 1), conv.groups
        windows = tuple(_numbers(conv.kernel_size, dimensions)) if names == ("W", "H") else kernel
        extents = (groups, conv.in_channels // groups, conv.out_channels // groups, *windows)
        origin = LayerOrigin(str(node.target), extents, (0, 2, down, across, 1))
        weight = _array(conv.weight).reshape(extents).transpose(origin.order)
        bias = np.zeros(conv.out_channels, np.float32) if conv.bias is None else _array(conv.bias)
        op = KernelCall(
            "",
            OpKind.TRANSPOSED,
            (value.tensor,),
            value.shape,
            Shape(*after, conv.out_channels),
            kernel,
            _by_axis(names, conv.stride, 1),
            _by_axis(names, cast(tuple[int, ...], conv.padding), 0),
            weight=np.ascontiguousarray(weight.reshape(conv.out_channels, *kernel, -1)),
            bias=bias,
            origin=origin,
            dilation=_by_axis(names, conv.dilation, 1),
            groups=groups,
        )
        return self._own(self._append(node, op, ("C", *names)), conv, conv.weight)

    def _padding(self, node: fx.Node, conv: nn.Conv2d | nn.Conv1d, names: Sequence[str]) -> tuple[int, int]:
        if conv.padding == "valid":
            return 0, 0
        if conv.padding == "same":
            if any(extents % 2 == 0 for extents in conv.kernel_size):
                raise McuCompileError(node_place(node), "'same' padding of an even kernel", "use an odd kernel")
            sides = [extents // 2 * step for extents, step in zip(conv.kernel_size, conv.dilation, strict=True)]
            return _by_axis(names, sides, 0)
        return _by_axis(names, cast(tuple[int, ...], conv.padding), 0)

    def _batch_norm(self, node: fx.Node, norm: nn.BatchNorm1d | nn.BatchNorm2d, value: NodeValue) -> NodeValue:
        """Fold a batch norm into the op before it, or run it as a 1x1 depthwise convolution."""
        if value.seen.axes[:1] != ("C" if value.shape.channels > 1 else "",):
            raise McuCompileError(node_place(node), "batch norm of a flattened tensor", "normalise before flattening")
        if norm.running_mean is None or norm.running_var is None:
            raise McuCompileError(
                node_place(node), "batch norm without running statistics", "train it with track_running_stats"
            )
        scale = 1.0 / np.sqrt(norm.running_var.detach().double().numpy() + norm.eps)
        if norm.affine:
            scale = scale * norm.weight.detach().double().numpy()
        shift = -norm.running_mean.detach().double().numpy() * scale
        if norm.affine:
            shift = shift + norm.bias.detach().double().numpy()
        op = self.ops.get(value.tensor)
        folds = op is not None and op.kind is not OpKind.GRU and op.clamp is Clamp.NONE
        if op is None or op.origin is None or op.origin.norm or not folds or not self._alone(node):
            origin = LayerOrigin("", norm=str(node.target), norm_eps=norm.eps)
            weight, bias = scale.astype(np.float32)[None, None], shift.astype(np.float32)
            op = KernelCall(
                "", OpKind.DEPTHWISE, (value.tensor,), value.shape, value.shape, weight=weight, bias=bias, origin=origin
            )
            return self._own(self._append(node, op, value.seen.axes), norm)
        broadcast = scale if op.kind is OpKind.DEPTHWISE else scale[:, None, None, None]
        folded = (cast(FloatArray, op.weight) * broadcast).astype(np.float32)
        bias = (cast(FloatArray, op.bias) * scale + shift).astype(np.float32)
        origin = replace(op.origin, norm=str(node.target), norm_eps=norm.eps)
        self._rewrite(replace(op, weight=folded, bias=bias, origin=origin))
        return self._own(value, norm)

    def _linear(self, node: fx.Node, linear: nn.Linear, value: NodeValue) -> NodeValue:
        """Apply a linear layer to a whole tensor, flattened in any order of axes, or to the channels of each pixel."""
        *others, last = value.seen.axes
        if any(others) and last != "C":
            raise McuCompileError(
                node_place(node), f"linear layer on {list(value.seen.extents)}", "flatten or pool before it"
            )
        shape = value.shape
        in_shape = shape if any(others) else Shape(1, 1, shape.elements)
        extents = (linear.out_features, *(extent(shape, name) for name in last))
        order = (0, *(1 + last.index(name) for name in "HWC" if name in last))
        weight = _array(linear.weight).reshape(extents).transpose(order).reshape(linear.out_features, 1, 1, -1)
        bias = np.zeros(linear.out_features, np.float32) if linear.bias is None else _array(linear.bias)
        out = Shape(in_shape.height, in_shape.width, linear.out_features)
        op = KernelCall(
            "",
            OpKind.CONV,
            (value.tensor,),
            in_shape,
            out,
            weight=np.ascontiguousarray(weight),
            bias=bias,
            origin=LayerOrigin(str(node.target), extents, order),
        )
        return self._own(self._append(node, op, (*others, "C")), linear, linear.weight)

    # -- recurrent layers -------------------------------------------------------------------------------------------

    def _is_recurrent(self, node: fx.Node) -> bool:
        """Return whether a node is a recurrent layer, or reads its results: a tuple, or a
        tensor with the batch second.
        """
        if node.op == "call_module" and isinstance(self.modules[str(node.target)], nn.GRU):
            return True
        return node.op != "output" and any(source in self.sequences for source in node.all_input_nodes)

    def _recurrent(self, node: fx.Node) -> None:
        source = next((each for each in node.all_input_nodes if each in self.sequences), None)
        if source is None:
            self.sequences[node] = self._gated(node, self._source(node))
        elif isinstance(self.results[source], torch.Tensor):
            self._stand_for(node, self._last_state(node, source))
        elif node.target is operator.getitem and node.args[1] in (0, -2):
            self._stand_for(node, self.sequences[source])
        elif node.target is operator.getitem and node.args[1] in (1, -1):
            self.sequences[node] = self.sequences[source]
        else:
            raise McuCompileError(
                node_place(node), "reads both results of a recurrent layer", "take one: y, h = gru(x)"
            )

    def _last_state(self, node: fx.Node, source: fx.Node) -> NodeValue:
        """Return what a call makes of the last state, whose axes are [1, N, C]: a view
        whose first axis is the batch.
        """
        states = self.sequences[source]
        probe = torch.linspace(-1, 1, _NOISE_SAMPLES * states.shape.channels).reshape(1, _NOISE_SAMPLES, -1)
        found = self._call(node, {source: probe}) if node.all_input_nodes == [source] else None
        if not isinstance(found, torch.Tensor) or found.numel() != probe.numel():
            found = probe
        batch, *extents = found.shape
        last = self._choose(node, states, lambda sequence: sequence[:, -1])
        seen = last.seen.reshaped(extents)
        if batch != _NOISE_SAMPLES or seen is None or not torch.equal(found.flatten(), probe.flatten()):
            raise McuCompileError(
                node_place(node), "reads the last state of a recurrent layer as [1, N, C]", "take h[-1] first"
            )
        return NodeValue(last.tensor, seen)

    def _gated(self, node: fx.Node, value: NodeValue) -> NodeValue:
        gru = cast(nn.GRU, self.modules[str(node.target)])
        self._refuse_derived(node, gru)
        refused = unsupported_gru(gru)
        if len(node.all_input_nodes) > 1:
            refused = "a first state of its own", "let it begin with zeros"
        if refused is not None:
            raise McuCompileError(node_place(node), *refused)
        made = recurrent_ops(gru, str(node.target), value.seen, value.tensor)
        if made is None:
            raise McuCompileError(
                node_place(node),
                f"its input {list(value.seen.extents)} is not [N, steps, features] with steps along an axis of the data",
                "give it x.transpose(1, 2) of [N, C, W]",
            )
        gates, unit = made
        inputs = self._own(self._append(node, gates, "WC"), gru.weight_ih_l0).tensor
        return self._own(self._append(node, replace(unit, inputs=(inputs,)), "WC"), gru.weight_hh_l0)

    # -- what is folded into the op before --------------------------------------------------------------------------

    def _alone(self, node: fx.Node) -> bool:
        """Return whether only `node` reads its tensor in its current form, under any of its names."""
        tensor = self._source(node).tensor
        readers = (reader for view in self.views[tensor] for reader in view.users if reader is not node)
        return tensor != INPUT and all(
            (reader in self.values and self.values[reader].tensor == tensor)
            or (reader.op != "output" and not isinstance(self.results[reader], torch.Tensor))
            for reader in readers
        )

    def _rewrite(self, op: KernelCall) -> None:
        """Replace an op; earlier nodes no longer stand for its result."""
        self.ops[op.name] = op
        self.views[op.name] = []

    def _activate(self, node: fx.Node, clamp: Clamp, value: NodeValue) -> NodeValue:
        """Fold an activation function into the op before it; if that is also read without it, add a 1x1 pooling."""
        op = self.ops.get(value.tensor)
        if op is not None and op.clamp in (clamp, Clamp.RELU6):
            return value
        if op is None or op.kind is OpKind.GRU or not self._alone(node):
            pool = KernelCall("", OpKind.MAX_POOL, (value.tensor,), value.shape, value.shape, clamp=clamp)
            return self._append(node, pool, value.seen.axes)
        self._rewrite(replace(op, clamp=clamp))
        return value

    def _add(self, node: fx.Node, negated: bool) -> NodeValue:
        """Add two tensors of equal shape; `negated` subtracts the second."""
        if self._argument(node, 2, "alpha", 1) != 1:
            raise McuCompileError(node_place(node), "add with alpha", "scale the branch inside its convolution")
        left, right = self._source(node, 0), self._source(node, 1)
        if negated:
            right = self._tabulate(node, torch.neg, right)
        if left.seen != right.seen:
            shapes = f"{list(left.seen.extents)} and {list(right.seen.extents)}"
            raise McuCompileError(node_place(node), f"adds {shapes}", "only equal shapes are added, axis by axis")
        op = KernelCall("", OpKind.ADD, (left.tensor, right.tensor), left.shape, left.shape)
        return self._append(node, op, left.seen.axes)

    # -- functions of values, and of two tensors ---------------------------------------------------------------------

    def _tabulate(self, node: fx.Node, function: Elementwise, value: NodeValue) -> NodeValue:
        op = KernelCall("", OpKind.TABLE, (value.tensor,), value.shape, value.shape, function=function)
        return self._append(node, op, value.seen.axes)

    def _multiply(self, node: fx.Node) -> NodeValue:
        """Multiply equal shapes, or an image by a value for each channel."""
        return self._product(node, self._source(node, 0), self._source(node, 1))

    def _product(self, node: fx.Node, left: NodeValue, right: NodeValue) -> NodeValue:
        if left.shape.elements < right.shape.elements:
            left, right = right, left
        kind = OpKind.MULTIPLY
        if left.seen != right.seen:
            kind, each = OpKind.SCALE, Shape(1, 1, left.shape.channels)
            if right.shape != each or left.seen.axes[:1] != right.seen.axes[:1] or any(right.seen.axes[1:]):
                shapes = f"{list(left.seen.extents)} by {list(right.seen.extents)}"
                raise McuCompileError(node_place(node), f"multiplies {shapes}", "give equal shapes, or [N, C, 1, 1]")
        op = KernelCall("", kind, (left.tensor, right.tensor), left.shape, left.shape)
        return self._append(node, op, left.seen.axes)

    def _gate(self, node: fx.Node, dim: object, value: NodeValue) -> NodeValue:
        """Multiply the first half of the channels by a sigmoid of the second."""

        def half(part: int) -> NodeValue:
            return self._choose(node, value, lambda x: x.chunk(2, cast(int, dim))[part])

        halves = half(0), half(1)
        return self._product(node, halves[0], self._tabulate(node, torch.sigmoid, halves[1]))

    # -- selections -------------------------------------------------------------------------------------------------

    def _chosen_from(self, node: fx.Node) -> tuple[NodeValue, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the tensor from which a call selects, and the call; a part of a split is
        selected from the split tensor.
        """
        (source, *_), several = node.all_input_nodes, None
        if not isinstance(self.results[source], torch.Tensor) and source.all_input_nodes:
            source, several = source.all_input_nodes[0], source
        value = self.values.get(source)
        others = [*node.all_input_nodes, *(several.all_input_nodes if several else ())]
        if value is None or any(each in self.values and each is not source for each in others):
            raise McuCompileError(node_place(node), "indexes with a tensor", "index with numbers")

        def call(probe: torch.Tensor) -> torch.Tensor:
            known: dict[fx.Node, object] = {source: probe}
            if several is not None:
                known[several] = self._call(several, known)
            return cast(torch.Tensor, self._call(node, known))

        return value, call

    def _call(self, node: fx.Node, known: Mapping[fx.Node, object]) -> object:
        """Return the result of a call for these values of its inputs; its other arguments stay."""

        def argument(inner: fx.Node) -> Any:
            return known[inner] if inner in known else self.results[inner]

        arguments, keywords = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
        if isinstance(node.target, str):
            return getattr(arguments[0], node.target)(*arguments[1:], **keywords)
        return cast(Callable[..., object], node.target)(*arguments, **keywords)

    def _choose(self, node: fx.Node, value: NodeValue, call: Callable[[torch.Tensor], torch.Tensor]) -> NodeValue:
        choice = read_choice(call, value.seen.extents)
        chosen = None if choice is None else choosing_ops(choice, value.tensor, value.seen)
        if chosen is None:
            raise McuCompileError(
                node_place(node),
                f"what it takes of {list(value.seen.extents)} is not a window of the data or a set of channels",
                "choose channels, or a range of lines or columns; pad with zeros",
            )
        ops, seen = chosen
        tensor = value.tensor
        for op in ops:
            tensor = self._append(node, replace(op, inputs=(tensor,)), ()).tensor
        return NodeValue(tensor, seen)

    def _concatenate(self, node: fx.Node) -> NodeValue:
        """Join tensors end to end along one axis of the graph."""
        parts = self._argument(node, 0, "tensors", ())
        values = [self.values[part] for part in cast(Sequence[fx.Node], parts) if part in self.values]
        position = cast(int, self._argument(node, 1, "dim", 0)) % (len(values[0].seen.axes) + 1) - 1 if values else -1
        axes = [value.seen.axes for value in values]
        if position < 0 or len(values) != len(cast(Sequence[object], parts)):
            raise McuCompileError(
                node_place(node), "joins along the batch, or joins non-tensors", "join along another axis"
            )
        names = {own[position] for own in axes} - {""} or {next(name for name in "CWH" if name not in axes[0])}
        others = {(*own[:position], *own[position + 1 :]) for own in axes}
        (name, *more) = sorted(names)
        if more or len(others) > 1 or name not in ("C", "H", "W"):
            shapes = " and ".join(str(list(value.seen.extents)) for value in values)
            raise McuCompileError(node_place(node), f"joins {shapes}", "join along one axis that all of them have")
        joined = values[0]
        for value in values[1:]:
            joined = self._join(node, joined, value, name, position)
        return joined

    def _join(self, node: fx.Node, left: NodeValue, right: NodeValue, name: str, position: int) -> NodeValue:
        field = {"C": "channels", "H": "height", "W": "width"}[name]
        shape = replace(left.shape, **{field: extent(left.shape, name) + extent(right.shape, name)})
        op = KernelCall("", OpKind.CONCAT, (left.tensor, right.tensor), left.shape, shape)
        axes = left.seen.axes
        return self._append(node, op, (*axes[:position], name, *axes[position + 1 :]))

    def _upsample(self, node: fx.Node, mode: str, value: NodeValue) -> NodeValue:
        """Repeat every pixel a whole number of times."""
        dimensions = len(value.seen.axes) - 1
        names = self._image(node, value, dimensions)
        before, after = [extent(value.shape, name) for name in names], self._result_shape(node)[1:]
        if not mode.startswith("nearest") or any(new % old for new, old in zip(after, before, strict=True)):
            raise McuCompileError(
                node_place(node),
                f"{mode} upsampling of {before} to {list(after)}",
                "use mode='nearest' with a whole-number factor",
            )
        factors = _by_axis(names, [new // old for new, old in zip(after, before, strict=True)], 1)
        source = value.shape
        shape = Shape(source.height * factors[0], source.width * factors[1], source.channels)
        op = KernelCall("", OpKind.UPSAMPLE, (value.tensor,), source, shape, factors)
        return self._append(node, op, ("C", *names))

    # -- pooling ----------------------------------------------------------------------------------------------------

    def _pool_arguments(
        self, node: fx.Node, kind: str, read: Callable[[str, object], object], value: NodeValue
    ) -> NodeValue:
        dimensions, average = 1 if "1d" in kind else 2, "avg" in kind
        names = self._image(node, value, dimensions)
        windows = _numbers(read("kernel_size", None), dimensions)
        stride_argument = read("stride", None)
        strides = windows if stride_argument in (None, ()) else _numbers(stride_argument, dimensions)
        margins = _numbers(read("padding", 0), dimensions)
        if read("ceil_mode", False) or read("dilation", 1) not in (1, (1,), (1, 1)) or read("return_indices", False):
            raise McuCompileError(node_place(node), "ceil_mode, dilation or indices", "pool without them")
        if average and (
            read("divisor_override", None) is not None or (not read("count_include_pad", True) and any(margins))
        ):
            raise McuCompileError(node_place(node), "a divisor other than the window", "use count_include_pad=True")
        kernel, stride, padding = (_by_axis(names, *what) for what in ((windows, 1), (strides, 1), (margins, 0)))
        if padding[0] * 2 > kernel[0] or padding[1] * 2 > kernel[1]:
            raise McuCompileError(node_place(node), f"padding {padding} over half the window {kernel}", "pad less")
        out = _out_shape(value.shape, kernel, stride, padding, value.shape.channels)
        pool = OpKind.AVERAGE_POOL if average else OpKind.MAX_POOL
        op = KernelCall("", pool, (value.tensor,), value.shape, out, kernel, stride, padding)
        return self._append(node, op, ("C", *names))

    def _pool_module(self, node: fx.Node, module: nn.Module, value: NodeValue) -> NodeValue:
        average = isinstance(module, nn.AvgPool1d | nn.AvgPool2d)
        kind = f"{'avg' if average else 'max'}{'1d' if isinstance(module, nn.MaxPool1d | nn.AvgPool1d) else '2d'}"
        return self._pool_arguments(node, kind, lambda key, default: getattr(module, key, default), value)

    def _pool_function(self, node: fx.Node, name: str, value: NodeValue) -> NodeValue:
        order = ["kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
        if "avg" not in name:
            order = ["kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"]

        def read(key: str, default: object) -> object:
            return self._argument(node, order.index(key) + 1, key, default) if key in order else default

        return self._pool_arguments(node, name, read, value)

    def _adaptive_average(self, node: fx.Node, size: object, dimensions: int, value: NodeValue) -> NodeValue:
        """Average to a size that divides the input's size: over adjacent windows of equal size."""
        names = self._image(node, value, dimensions)
        wanted = self._result_shape(node)[1:]
        before = [extent(value.shape, name) for name in names]
        if any(old % new for old, new in zip(before, wanted, strict=True)):
            raise McuCompileError(
                node_place(node),
                f"adaptive pooling of {before} to {size}",
                "pool to 1 or to a divisor, or use AvgPool2d",
            )
        windows = [old // new for old, new in zip(before, wanted, strict=True)]
        return self._average(node, _by_axis(names, windows, 1), ("C", *names), value)

    def _average(self, node: fx.Node, window: tuple[int, int], axes: Sequence[str], value: NodeValue) -> NodeValue:
        """Average over adjacent windows; averages over one axis and then the other become one op over both."""
        if window == (1, 1):
            return NodeValue(value.tensor, TorchAxes.of(value.shape, axes))
        source, before = value.shape, self.ops.get(value.tensor)
        shape = Shape(source.height // window[0], source.width // window[1], source.channels)
        joined = before is not None and self._averages_other_axis(before, window) and self._alone(node)
        if before is not None and joined:
            window = (before.kernel[0] * window[0], before.kernel[1] * window[1])
        stride = (1, 1) if (shape.height, shape.width) == (1, 1) else window
        if before is not None and joined:
            self._rewrite(replace(before, out_shape=shape, kernel=window, stride=stride))
            return NodeValue(before.name, TorchAxes.of(shape, axes))
        op = KernelCall("", OpKind.AVERAGE_POOL, (value.tensor,), source, shape, window, stride)
        return self._append(node, op, axes)

    @staticmethod
    def _averages_other_axis(op: KernelCall, window: tuple[int, int]) -> bool:
        plain = op.kind is OpKind.AVERAGE_POOL and op.clamp is Clamp.NONE and op.padding == (0, 0)
        return plain and op.kernel == op.stride and all(1 in pair for pair in zip(op.kernel, window, strict=True))

    def _mean(self, node: fx.Node, value: NodeValue) -> NodeValue:
        argument = self._argument(node, 1, "dim", node.kwargs.get("axis"))
        axes = (argument,) if isinstance(argument, int) else tuple(cast(Sequence[int], argument or ()))
        rank = len(value.seen.axes) + 1
        positions = {axis % rank for axis in axes}
        names = "".join(value.seen.axes[position - 1] for position in positions if position)
        if not positions or 0 in positions or "C" in names:
            raise McuCompileError(node_place(node), f"mean over axes {sorted(axes)}", "average over the spatial axes")
        window = tuple(extent(value.shape, name) if name in names else 1 for name in "HW")
        left = [
            "" if position in positions else axis
            for position, axis in enumerate(value.seen.axes, 1)
            if position not in positions or self._argument(node, 2, "keepdim", False)
        ]
        return self._average(node, cast(tuple[int, int], window), left, value)


__all__ = ["INPUT", "WEIGHTED", "NodeValue", "import_module"]
