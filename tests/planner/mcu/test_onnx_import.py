"""ONNX files become what ONNX's own reference evaluator says that they are, or are refused by node."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn

from port_planner.mcu import compile_model, read_onnx
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import McuCompileError, OpKind
from port_planner.mcu.onnx_import import _OPERATORS

SHAPE = (3, 8, 8)
RANDOM = np.random.default_rng(1)
SAMPLES = RANDOM.standard_normal((5, *SHAPE)).astype(np.float32)


def values(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


class OnnxFile:
    """Writes files of one input "x" and one output "y"; nodes are (operator, inputs, output, attributes)."""

    def __init__(self, path: Path) -> None:
        self.onnx = pytest.importorskip("onnx")
        self.path = path

    def node(self, kind: str, inputs: str, output: str, **attributes: Any) -> Any:
        return self.onnx.helper.make_node(kind, inputs.split(" "), [output], name=f"the {kind}", **attributes)

    def write(
        self,
        nodes: Sequence[Any],
        constants: Mapping[str, ArrayLike],
        shape: Sequence[int] = SHAPE,
        batch: int | str = "batch",
        opset: int = 13,
    ) -> Path:
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        arrays = {name: np.asarray(each) for name, each in constants.items()}
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("x", kind, [batch, *shape])],
            [helper.make_tensor_value_info("y", kind, ["batch", "classes"])],
            [self.onnx.numpy_helper.from_array(each, name) for name, each in arrays.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 8
        self.onnx.save(model, self.path)
        return self.path

    def before_a_head(
        self, kind: str, inputs: str = "x", constants: Mapping[str, ArrayLike] = {}, **attributes: Any
    ) -> Path:
        """Write an operator on [3, 8, 8], whose outputs are averaged to its channels and go into a linear layer."""
        opset = attributes.pop("opset", 13)
        nodes = [
            self.node(kind, inputs, "middle", **attributes),
            self.node("GlobalAveragePool", "middle", "mean"),
            self.node("Flatten", "mean", "flat"),
            self.node("Gemm", "flat head.weight head.bias", "y", transB=1),
        ]
        return self.write(nodes, {"head.weight": values(2, 3), "head.bias": values(2), **constants}, opset=opset)


@pytest.fixture
def file(tmp_path: Path) -> OnnxFile:
    return OnnxFile(tmp_path / "net.onnx")


def test_a_file_compiles_to_the_bits_of_the_module_that_it_was_made_of(file: OnnxFile) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(F.max_pool2d(F.relu(self.body(x)), 2).flatten(1))
            return logits

    module = Small()
    weights = {name: each.numpy() for name, each in module.state_dict().items()}
    nodes = [
        file.node("Conv", "x body.0.weight body.0.bias", "a", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        file.node("Relu", "a", "b"),
        file.node("MaxPool", "b", "c", kernel_shape=[2, 2], strides=[2, 2]),
        file.node("Flatten", "c", "d"),
        file.node("Gemm", "d head.weight head.bias", "y", transB=1),
    ]
    network = read_onnx(file.write(nodes, weights), SAMPLES)
    assert {name: each.tolist() for name, each in network.state_dict().items()} == {
        name: each.tolist() for name, each in module.state_dict().items()
    }
    assert compile_model(network, SAMPLES).sha256 == compile_model(module, SAMPLES).sha256


def test_a_file_as_tensorflow_exports_it(file: OnnxFile) -> None:
    """Padding of one side, biases added behind, transposed weights, a shape for a batch of 1, and
    shapes that are computed.
    """
    nodes = [
        file.node("Conv", "x k", "a", auto_pad="SAME_UPPER", strides=[2, 2]),
        file.node("Add", "a kb", "b"),
        file.node("Clip", "b zero six", "c"),
        file.node("Shape", "c", "sizes"),
        file.node("Slice", "sizes none one", "size"),
        file.node("Concat", "size rest", "target", axis=0),
        file.node("Reshape", "c target", "d"),
        file.node("MatMul", "d w", "e"),
        file.node("Add", "wb e", "y"),
    ]
    constants = {"k": values(4, 3, 3, 3), "kb": values(1, 4, 1, 1), "w": values(64, 3), "wb": values(3)}
    numbers: dict[str, ArrayLike] = {"zero": np.float32(0), "six": np.float32(6), "none": [0], "one": [1], "rest": [-1]}
    network = read_onnx(file.write(nodes, {**constants, **numbers}, batch=1), SAMPLES)
    graph = import_module(network, SHAPE, samples=torch.from_numpy(SAMPLES))
    assert [op.kind for op in graph.ops] == [OpKind.DEPTHWISE, OpKind.CONV, OpKind.CLASSIFIER]
    padded = F.pad(torch.from_numpy(SAMPLES), (0, 1, 0, 1))
    images = F.conv2d(padded, torch.from_numpy(constants["k"]), torch.from_numpy(constants["kb"]).reshape(-1), 2)
    wanted = F.relu6(images).flatten(1) @ torch.from_numpy(constants["w"]) + torch.from_numpy(constants["wb"])
    with torch.no_grad():
        torch.testing.assert_close(network(torch.from_numpy(SAMPLES)), wanted)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("AveragePool", {"kernel_shape": [2, 2]}),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
        ("Celu", {"alpha": 0.5}),
        ("Clip", {"min": -0.5, "max": 0.5, "opset": 8}),
        ("Clip", {"min": 0.0, "opset": 8}),
        ("Dropout", {}),
        ("Elu", {"alpha": 0.5}),
        ("Gelu", {"approximate": "tanh", "opset": 20}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 1 / 6}),
        ("HardSwish", {"opset": 14}),
        ("Identity", {}),
        ("LeakyRelu", {}),
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Mish", {"opset": 18}),
        ("Neg", {}),
        ("Selu", {}),
        ("Sigmoid", {}),
        ("Softplus", {}),
        ("Tanh", {}),
        ("Transpose", {"perm": [0, 1, 3, 2]}),
    ],
)
def test_operators_without_constants(file: OnnxFile, kind: str, attributes: Mapping[str, Any]) -> None:
    network = read_onnx(file.before_a_head(kind, **attributes), SAMPLES)
    assert import_module(network, SHAPE, samples=torch.from_numpy(SAMPLES)).classes == 2


@pytest.mark.parametrize(
    ("kind", "inputs", "constants", "attributes"),
    [
        ("Add", "x c", {"c": np.float32(2)}, {}),
        ("BatchNormalization", "x s b m v", {"s": values(3), "b": values(3), "m": values(3), "v": values(3) ** 2}, {"opset": 15}),
        ("Concat", "x x", {}, {"axis": 2}),
        ("ConvTranspose", "x c", {"c": values(3, 3, 2, 2)}, {"strides": [2, 2]}),
        ("ConvTranspose", "x c b", {"c": values(3, 3, 3, 2), "b": values(3)}, {"strides": [2, 1], "pads": [1, 0, 1, 0], "output_padding": [1, 0]}),
        ("ConvTranspose", "x c", {"c": values(3, 1, 2, 3)}, {"group": 3, "dilations": [2, 1]}),
        ("Div", "c x", {"c": np.float32(2)}, {}),
        ("PRelu", "x c", {"c": np.full((1, 1, 1), 0.3, np.float32)}, {}),
        ("Pad", "x c", {"c": [0, 0, 1, 0, 0, 0, 2, 3]}, {}),
        ("Pow", "x c", {"c": np.float32(2)}, {}),
        ("Resize", "x  c", {"c": np.array([1, 1, 2, 3], np.float32)}, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        ("Slice", "x a b c d", {"a": [1], "b": [9999], "c": [-1], "d": [2]}, {}),
        ("Sub", "c x", {"c": np.array([2], np.float32)}, {}),
    ],
)  # fmt: skip
def test_operators_with_constants(
    file: OnnxFile, kind: str, inputs: str, constants: Mapping[str, ArrayLike], attributes: Mapping[str, Any]
) -> None:
    samples = np.abs(SAMPLES) + 1 if kind == "Div" else SAMPLES
    path = file.before_a_head(kind, inputs, constants, **attributes)
    assert import_module(read_onnx(path, samples), SHAPE, samples=torch.from_numpy(samples)).classes == 2


@pytest.mark.parametrize(
    ("kind", "inputs", "constants", "attributes", "said"),
    [
        ("Erf", "x", {}, {}, r"^the Erf \(Erf\): no kernel for this operator"),
        ("BatchNormalization", "x c c c c", {"c": np.ones(3, np.float32)}, {}, "opset 13 has no batch norm .*; export it with 14"),
        ("ConvTranspose", "x c", {"c": values(3, 3, 2, 2)}, {"pads": [1, 1, 0, 0]}, r"^the ConvTranspose .*: padding \[1, 1\] before and \[0, 0\] behind"),
        ("ConvTranspose", "x c", {"c": values(3, 3, 2, 2)}, {"output_shape": [9, 9]}, "attribute output_shape is not known here"),
        ("MaxPool", "x", {}, {"kernel_shape": [3, 3], "ceil_mode": 1}, r"^the MaxPool .*: ceil_mode is 1; export it with ceil_mode 0"),
        ("MaxPool", "x", {}, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}, r"padding \[0, 0\] before and \[1, 1\] behind"),
        ("Mul", "x c", {"c": values(3, 1, 1)}, {}, r"^the Mul \(Mul\): a constant of shape \[3, 1, 1\]"),
        ("PRelu", "x c", {"c": values(3, 1, 1)}, {}, "a slope for each channel"),
        ("Pad", "x c", {"c": [0, 0, 1, 1, 0, 0, 1, 1]}, {"mode": "reflect"}, "mode is reflect"),
        ("ReduceMean", "x", {}, {"axes": [0]}, r"^the ReduceMean .*: its shape is \[5, 3, 8, 8\], and \[1, 3, 8, 8\] here"),
        ("Selu", "x", {}, {"gamma": 3.0}, r"^the Selu \(Selu\): ONNX's reference differs here, by .* of values up to"),
        ("Slice", "x a b c d", {"a": [7], "b": [-99], "c": [3], "d": [-1]}, {}, r"steps \[-1\]"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_node(
    file: OnnxFile, kind: str, inputs: str, constants: Mapping[str, ArrayLike], attributes: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(McuCompileError, match=said):
        read_onnx(file.before_a_head(kind, inputs, constants, **attributes), SAMPLES)


def test_what_the_importer_refuses_is_named_after_its_node(file: OnnxFile) -> None:
    path = file.before_a_head("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    with pytest.raises(McuCompileError, match="avg_pool2d in the AveragePool: a divisor other than the window"):
        import_module(read_onnx(path, SAMPLES), SHAPE)


def test_an_operator_read_as_another_one_is_refused_by_its_node(
    file: OnnxFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_OPERATORS, "Tanh", _OPERATORS["Softsign"])
    with pytest.raises(McuCompileError, match=r"^the Tanh \(Tanh\): ONNX's reference differs here"):
        read_onnx(file.before_a_head("Tanh"), SAMPLES)


def test_an_attribute_that_is_not_read_is_refused(file: OnnxFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_OPERATORS, "LeakyRelu", _OPERATORS["Relu"])
    with pytest.raises(McuCompileError, match=r"^the LeakyRelu \(LeakyRelu\): attribute alpha is not known here"):
        read_onnx(file.before_a_head("LeakyRelu", alpha=0.5), SAMPLES)


def test_weights_that_two_layers_share_are_not_trained_apart(file: OnnxFile) -> None:
    nodes = [
        file.node("Conv", "x k.weight", "a", pads=[1, 1, 1, 1]),
        file.node("Identity", "k.weight", "again"),
        file.node("Conv", "a again", "b", pads=[1, 1, 1, 1]),
        file.node("Flatten", "b", "c"),
        file.node("Gemm", "c h.weight", "y", transB=1),
    ]
    path = file.write(nodes, {"k.weight": values(3, 3, 3, 3), "h.weight": values(2, 192)})
    with pytest.raises(McuCompileError, match="uses the weights of k here as well"):
        compile_model(read_onnx(path, SAMPLES), SAMPLES)


def test_a_weight_named_as_something_of_a_module_gets_another_path(file: OnnxFile) -> None:
    nodes = [
        file.node("Gemm", "x forward.weight", "a", transB=1),
        file.node("Gemm", "a graph.0.weight", "b", transB=1),
        file.node("Gemm", "b head.0.weight", "y", transB=1),
    ]
    path = file.write(
        nodes, {"forward.weight": values(4, 6), "graph.0.weight": values(4, 4), "head.0.weight": values(2, 4)}, (6,)
    )
    network = read_onnx(path, values(4, 6))
    assert list(network.state_dict()) == ["forward_2.weight", "graph_0_2.weight", "head.0.weight"]


def test_a_branch_is_not_taken_for_a_constant(file: OnnxFile) -> None:
    helper, kind = file.onnx.helper, file.onnx.TensorProto.FLOAT
    branch = helper.make_graph(
        [file.node("Relu", "x", "inner")], "branch", [], [helper.make_tensor_value_info("inner", kind, [1, 6])]
    )
    nodes = [
        file.node("If", "flag", "a", then_branch=branch, else_branch=branch),
        file.node("Gemm", "a w.weight", "y", transB=1),
    ]
    path = file.write(nodes, {"flag": np.array(True), "w.weight": values(2, 6)}, (6,))
    with pytest.raises(McuCompileError, match=r"^the If \(If\): no kernel for this operator"):
        read_onnx(path, values(1, 6))


def test_files_that_are_no_model_are_refused(file: OnnxFile, tmp_path: Path) -> None:
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"not a model")
    for path in (junk, tmp_path / "absent.onnx"):
        with pytest.raises(McuCompileError, match=rf"^{path}: cannot be read as ONNX"):
            read_onnx(path, SAMPLES)
    with pytest.raises(McuCompileError, match=r"reference evaluator refuses samples of shape \[5\]"):
        read_onnx(file.write([file.node("Gemm", "x w", "y")], {"w": values(6, 2)}, (6,)), values(4, 5))


def test_without_the_package_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(McuCompileError, match=r"the package onnx is not installed; pip install 'port-agent\[onnx\]'"):
        read_onnx(tmp_path / "net.onnx", SAMPLES)
