"""The compiler's float graph: what a PyTorch model becomes before it is quantised.

A tensor is one sample, [height][width][channel]; a sensor stream has height 1. Batch norm is already folded in, and an
activation function is the `clamp` of the op that feeds it, so every op here is one kernel of the firmware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from port_planner.base.errors import PortError

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float32]
Elementwise = Callable[["torch.Tensor"], "torch.Tensor"]
"""A function that acts on each value of a tensor independently."""


class McuCompileError(PortError):
    """Raised for a model or a scheme that cannot be compiled for a microcontroller, with the layer and the remedy."""

    def __init__(self, layer: str, problem: str, remedy: str) -> None:
        super().__init__(f"{layer}: {problem}; {remedy}")
        self.layer = layer
        self.problem = problem
        self.remedy = remedy


class OpKind(IntEnum):
    """Kernels of the firmware; the numbers are those of `enum port_op_kind`."""

    CONV = 1
    DEPTHWISE = 2
    ADD = 3
    AVERAGE_POOL = 4
    MAX_POOL = 5
    CLASSIFIER = 6
    GROUPED = 7
    TABLE = 8
    CONCAT = 9
    UPSAMPLE = 10
    MULTIPLY = 11
    SCALE = 12
    TRANSPOSED = 13
    GRU = 14


class Loss(Enum):
    """How a sample is judged; the names are those of `enum port_loss_kind`."""

    CROSS_ENTROPY = "cross_entropy"
    """Cross-entropy of the softmax of the outputs; a sample has a label."""
    MSE = "mse"
    """The mean of the squared differences; a sample has a target for each output."""


WEIGHTED = frozenset({OpKind.CONV, OpKind.DEPTHWISE, OpKind.CLASSIFIER, OpKind.GROUPED, OpKind.TRANSPOSED, OpKind.GRU})
PRODUCTS = frozenset({OpKind.MULTIPLY, OpKind.SCALE})
TWO_INPUTS = frozenset({OpKind.ADD, OpKind.CONCAT}) | PRODUCTS
UNDIVIDED = frozenset({OpKind.DEPTHWISE, OpKind.GRU})
"""Kinds whose weights are trained as a whole or not at all."""
GATES = 3
"""The gates of a recurrent unit, in torch's order: reset, update, new."""


class Clamp(Enum):
    """The activation function after an op, as the interval that its output is clamped to."""

    NONE = (None, None)
    RELU = (0.0, None)
    RELU6 = (0.0, 6.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Extent of one sample: height, width, channels."""

    height: int
    width: int
    channels: int

    @property
    def elements(self) -> int:
        return self.height * self.width * self.channels

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.channels}"


@dataclass(frozen=True, slots=True)
class LayerOrigin:
    """Where the weights of an op come from in the module: paths of its layers, named as in a state_dict.

    The op's weight is the layer's, reshaped to `extents`, with its axes in `order`, times the scale of the batch norm
    that is folded in. A batch norm by itself has no `layer`. `part` ends the names of weight and bias in layers that
    have several, such as `_hh_l0`. `trains_weight`, `trains_bias`: whether the module itself trains them. It does if it
    has such parameters, they require gradients, and gradients reach them.
    """

    layer: str
    extents: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    norm: str = ""
    norm_eps: float = 0.0
    part: str = ""
    trains_weight: bool = True
    trains_bias: bool = True

    @property
    def weight(self) -> str:
        """The name of the layer's weight in the state_dict."""
        return f"{self.layer}.weight{self.part}"

    @property
    def bias(self) -> str:
        """The name of the layer's bias in the state_dict."""
        return f"{self.layer}.bias{self.part}"


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One kernel call. `inputs` are tensor names.

    The output tensor has the op's own name. `shares` names an earlier op that has the same weights in the module.

    `weight` is [out][kernel_h][kernel_w][in] (classifier: [out][1][1][in]; of groups, in / groups) or, depthwise,
    [kernel_h][kernel_w][channel]. `function`: the function in a table. `fixed`: the weights, 1 or 0, only select and
    are never trained. A gated recurrent unit reads the gates' inputs of each step, [height x width][3 channels], and
    has the weights of the state before it.
    """

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    in_shape: Shape
    out_shape: Shape
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    clamp: Clamp = Clamp.NONE
    weight: FloatArray | None = None
    bias: FloatArray | None = None
    origin: LayerOrigin | None = None
    shares: str = ""
    function: Elementwise | None = None
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    fixed: bool = False

    @property
    def trains_weight(self) -> bool:
        return not self.fixed and (self.origin is None or self.origin.trains_weight)

    @property
    def trains_bias(self) -> bool:
        return not self.fixed and (self.origin is None or self.origin.trains_bias)

    @property
    def fan_in(self) -> int:
        """The channels that one row of weights reads."""
        if self.kind is OpKind.GRU:
            return self.out_shape.channels
        return 1 if self.kind is OpKind.DEPTHWISE else self.in_shape.channels // self.groups

    @property
    def rows(self) -> int:
        """The rows of weights, each with a scale and a bias: one for each output channel,
        and one for each gate of it.
        """
        return self.out_shape.channels * (GATES if self.kind is OpKind.GRU else 1)

    @property
    def macs(self) -> int:
        """The multiply-accumulates of one forward call; padding counts as if it were computed."""
        if self.kind is OpKind.TRANSPOSED:
            taps = self.kernel[0] * self.kernel[1]
            return self.in_shape.elements * taps * (self.out_shape.channels // self.groups)
        if self.kind not in WEIGHTED:
            return 0
        return self.out_shape.height * self.out_shape.width * self.rows * self.kernel[0] * self.kernel[1] * self.fan_in

    @property
    def weight_count(self) -> int:
        return 0 if self.weight is None else int(self.weight.size)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Ops in execution order.

    `input_name` names the sample; the last op is the classifier. `state`: the module's state_dict at its import.
    `same`: its names that stand for one tensor, such as a layer's that is also in a list. `notes`: what was left out on
    purpose, one sentence each.
    """

    name: str
    input_name: str
    input_shape: Shape
    ops: tuple[KernelCall, ...]
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loss: Loss = Loss.CROSS_ENTROPY
    same: tuple[tuple[str, ...], ...] = ()

    def shape(self, tensor: str) -> Shape:
        """Return the shape of a tensor by name."""
        if tensor == self.input_name:
            return self.input_shape
        return self.op(tensor).out_shape

    def op(self, name: str) -> KernelCall:
        """Return the op of that name.

        Raises KeyError for an unknown name.
        """
        for op in self.ops:
            if op.name == name:
                return op
        raise KeyError(name)

    def index(self, name: str) -> int:
        """Return the position of the op of that name."""
        return next(i for i, op in enumerate(self.ops) if op.name == name)

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.ops[-1].out_shape.channels

    @property
    def targets(self) -> int:
        """The number of targets of a sample; 0 if it has a label."""
        return self.classes if self.loss is Loss.MSE else 0

    @property
    def macs(self) -> int:
        return sum(op.macs for op in self.ops)

    def weighted(self) -> tuple[KernelCall, ...]:
        """Return the ops with weights of the module, first layer first."""
        return tuple(op for op in self.ops if op.kind in WEIGHTED and not op.fixed)


def row_bytes(op: KernelCall) -> int:
    """Return the bytes of one row of weights."""
    return op.weight_count // op.rows


def scratch_bytes(op: KernelCall, simd: bool = True) -> int:
    """Return the scratch of an op's forward kernel.

    A SIMD convolution has two im2col columns of int16, padded to four channels; a recurrent unit its state in fp32.
    """
    if op.kind is OpKind.GRU:
        return 4 * op.out_shape.channels
    if op.kind is not OpKind.CONV or not simd:
        return 0
    return 2 * 2 * (-(-row_bytes(op) // 4) * 4)


def verify_mcu_graph(graph: Graph) -> None:
    """Raise McuCompileError unless every op reads existing tensors and fits the tables."""
    known = {graph.input_name: graph.input_shape}
    for op in graph.ops:
        _verify_op(op, known)
        known[op.name] = op.out_shape
    if not graph.ops or graph.ops[-1].kind is not OpKind.CLASSIFIER:
        raise McuCompileError(graph.name, "the model does not end in a linear layer", "end it with nn.Linear")
    if any(op.kind is OpKind.CLASSIFIER for op in graph.ops[:-1]):
        raise McuCompileError(graph.name, "a classifier in the middle of the graph", "give the model one output")


def _elements_read(op: KernelCall, position: int) -> int:
    if position and op.kind is OpKind.CONCAT:
        return op.out_shape.elements - op.in_shape.elements
    return op.in_shape.channels if position and op.kind is OpKind.SCALE else op.in_shape.elements


def _verify_op(op: KernelCall, known: dict[str, Shape]) -> None:
    if len(op.inputs) != (2 if op.kind in TWO_INPUTS else 1):
        raise McuCompileError(op.name, f"{len(op.inputs)} inputs", "this is a defect of the importer")
    for position, name in enumerate(op.inputs):
        if name not in known:
            raise McuCompileError(op.name, f"reads {name} before it is written", "this is a defect of the importer")
        if known[name].elements != _elements_read(op, position):
            raise McuCompileError(op.name, f"reads {known[name]} as {op.in_shape}", "this is a defect of the importer")
    if op.name in known:
        raise McuCompileError(op.name, "two ops have this name", "rename one")
    if max(op.in_shape.channels, op.out_shape.channels, op.in_shape.height, op.in_shape.width) > 65535:
        raise McuCompileError(op.name, f"extent of {op.in_shape} over 65535", "pool before the linear layer")
    if max(*op.kernel, *op.stride, *op.padding, *op.dilation) > 255:
        raise McuCompileError(op.name, f"kernel {op.kernel} over 255", "use a smaller kernel, or pool before it")
    reach = op.kernel[0] * op.kernel[1] * op.fan_in
    if op.kind in WEIGHTED and reach > 32768:
        raise McuCompileError(op.name, f"{reach} products in one sum can overflow 32 bits", "narrow the layer")
