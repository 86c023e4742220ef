"""Files of TensorFlow Lite become what LiteRT's interpreter says that they are, or are refused by operator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from port_planner.mcu import compile_model, read_tflite
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import McuCompileError

RANDOM = np.random.default_rng(1)
SAMPLES = RANDOM.standard_normal((4, 3, 9, 8)).astype(np.float32)
INT8 = (0.05, -3)
"""Scale and zero point of tensors."""
SAME, VALID = 0, 1


class TfliteFile:
    """Writes files; tensors are numbers, the first is the input of 9 x 8 pixels and three channels."""

    def __init__(self, path: Path, is_int8: bool = False) -> None:
        self.schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
        self.flatbuffers = pytest.importorskip("flatbuffers")
        self.path, self.is_int8 = path, is_int8
        self.tensors: list[Any] = []
        self.buffers = [self.schema.BufferT()]
        self.operators: list[Any] = []
        self.codes: list[Any] = []
        self.tensor(1, 9, 8, 3)

    def tensor(self, *shape: int, quantised: tuple[float, int] = INT8) -> int:
        made = self.schema.TensorT()
        made.name, made.shape, made.buffer = f"tensor {len(self.tensors)}", list(shape), 0
        made.type = self.schema.TensorType.FLOAT32
        if self.is_int8:
            made.type, made.quantization = self.schema.TensorType.INT8, self.format([quantised[0]], [quantised[1]])
        self.tensors.append(made)
        return len(self.tensors) - 1

    def format(self, scales: Sequence[float], zeros: Sequence[int], axis: int = 0) -> Any:
        made = self.schema.QuantizationParametersT()
        made.scale, made.zeroPoint, made.quantizedDimension = list(scales), list(zeros), axis
        return made

    def constant(self, values: NDArray[Any], kind: str, form: Any = None) -> int:
        index = self.tensor(*values.shape)
        made, data = self.tensors[index], self.schema.BufferT()
        data.data = list(values.tobytes())
        made.type, made.quantization, made.buffer = getattr(self.schema.TensorType, kind), form, len(self.buffers)
        self.buffers.append(data)
        return index

    def numbers(self, *values: int) -> int:
        return self.constant(np.array(values, np.int32), "INT32")

    def weights(self, weight: NDArray[Any], bias: NDArray[Any], axis: int = 0) -> list[int]:
        """Return a weight and its bias; in int8, with a scale for each channel."""
        if not self.is_int8:
            return [self.constant(each.astype(np.float32), "FLOAT32") for each in (weight, bias)]
        scales = np.abs(np.moveaxis(weight, axis, 0).reshape(len(bias), -1)).max(1) / 127
        along = [1] * weight.ndim
        along[axis] = -1
        codes, zeros = np.round(weight / scales.reshape(along)).astype(np.int8), [0] * len(bias)
        sums = scales * INT8[0]
        whole = np.round(bias / sums).astype(np.int32)
        return [
            self.constant(codes, "INT8", self.format(scales.tolist(), zeros, axis)),
            self.constant(whole, "INT32", self.format(sums.tolist(), zeros)),
        ]

    def operator(self, kind: str, inputs: Sequence[int], output: int, options: str = "", **values: Any) -> int:
        code, made = self.schema.OperatorCodeT(), self.schema.OperatorT()
        number = getattr(self.schema.BuiltinOperator, kind)
        code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), 1
        made.opcodeIndex, made.inputs, made.outputs = len(self.codes), list(inputs), [output]
        if options:
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
            made.builtinOptions = getattr(self.schema, f"{options}T")()
            for name, value in values.items():
                setattr(made.builtinOptions, name, value)
        self.codes.append(code)
        self.operators.append(made)
        return output

    def convolution(self, source: int, shape: Sequence[int], weights: Sequence[int], **options: Any) -> int:
        chosen = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1, "padding": SAME} | options
        return self.operator("CONV_2D", [source, *weights], self.tensor(*shape), "Conv2DOptions", **chosen)

    def head(self, source: int, features: int) -> Path:
        """Write the file with a linear layer of two outputs behind a tensor of features."""
        weights = self.weights(values(2, features) / 3, values(2))
        options = {"fusedActivationFunction": 0, "weightsFormat": 0}
        made = self.tensor(1, 2)
        return self.write(
            self.operator("FULLY_CONNECTED", [source, *weights], made, "FullyConnectedOptions", **options)
        )

    def averaged(self, source: int, channels: int) -> Path:
        """Write the file with the mean over the pixels and a linear layer behind a tensor."""
        mean = self.operator(
            "MEAN", [source, self.numbers(1, 2)], self.tensor(1, channels), "ReducerOptions", keepDims=False
        )
        return self.head(mean, channels)

    def write(self, result: int) -> Path:
        model, graph = self.schema.ModelT(), self.schema.SubGraphT()
        graph.tensors, graph.operators, graph.inputs, graph.outputs = self.tensors, self.operators, [0], [result]
        model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], self.codes, self.buffers
        builder = self.flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), b"TFL3")
        self.path.write_bytes(bytes(builder.Output()))
        return self.path


def values(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=[False, True], ids=["float", "int8"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> TfliteFile:
    return TfliteFile(tmp_path / "net.tflite", request.param)


def test_a_network_is_the_layers_that_it_was_made_of(file: TfliteFile) -> None:
    """SAME padding of one side, a depthwise convolution with two outputs a channel, a flattened image, a softmax."""
    first, bias, each, own, last, end = (
        values(4, 3, 3, 3) / 3,
        values(4),
        values(1, 3, 3, 8) / 3,
        values(8),
        values(2, 48) / 7,
        values(2),
    )
    made = file.convolution(0, [1, 5, 4, 4], file.weights(first, bias), strideH=2, strideW=2, fusedActivationFunction=1)
    made = file.operator(
        "DEPTHWISE_CONV_2D",
        [made, *file.weights(each, own, 3)],
        file.tensor(1, 3, 2, 8),
        "DepthwiseConv2DOptions",
        strideH=1,
        strideW=1,
        dilationHFactor=1,
        dilationWFactor=1,
        padding=VALID,
        depthMultiplier=2,
        fusedActivationFunction=0,
    )
    size = file.operator(
        "SHAPE", [made], file.numbers(0, 0, 0, 0), "ShapeOptions", outType=file.schema.TensorType.INT32
    )
    file.tensors[size].buffer = 0  # computed, and not read: the result's shape is in the file
    made = file.operator("RESHAPE", [made, file.numbers(1, 48)], file.tensor(1, 48))
    made = file.operator(
        "FULLY_CONNECTED", [made, *file.weights(last, end)], file.tensor(1, 2), "FullyConnectedOptions"
    )
    made = file.operator("SOFTMAX", [made], file.tensor(1, 2, quantised=(1 / 256, -128)), "SoftmaxOptions", beta=1.0)
    network = read_tflite(file.write(made), SAMPLES)
    images = F.pad(torch.from_numpy(SAMPLES), (0, 1, 1, 1))
    images = F.conv2d(images, torch.from_numpy(first).permute(0, 3, 1, 2), torch.from_numpy(bias), 2).relu()
    images = F.conv2d(images, torch.from_numpy(each).permute(3, 0, 1, 2), torch.from_numpy(own), groups=4)
    wanted = F.linear(images.permute(0, 2, 3, 1).flatten(1), torch.from_numpy(last), torch.from_numpy(end)).softmax(1)
    with torch.no_grad():
        found = network(torch.from_numpy(SAMPLES))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 if file.is_int8 else 1e-5)
    model = compile_model(network, SAMPLES)
    assert model.quantized.graph.classes == 2 and len(model.quantized.graph.weighted()) == 3


@pytest.mark.parametrize(
    ("kind", "options", "chosen"),
    [
        ("RELU", "", {}),
        ("RELU6", "", {}),
        ("LOGISTIC", "", {}),
        ("TANH", "", {}),
        ("HARD_SWISH", "", {}),
        ("LEAKY_RELU", "LeakyReluOptions", {"alpha": 0.25}),
    ],
)
def test_functions_of_each_value(file: TfliteFile, kind: str, options: str, chosen: dict[str, float]) -> None:
    form = {"LOGISTIC": (1 / 256, -128), "TANH": (1 / 128, 0)}.get(kind, INT8)
    made = file.operator(kind, [0], file.tensor(1, 9, 8, 3, quantised=form), options, **chosen)
    network = read_tflite(file.averaged(made, 3), SAMPLES)
    assert import_module(network, SAMPLES.shape[1:], samples=torch.from_numpy(SAMPLES)).classes == 2


def test_pools_sums_joins_and_padding(file: TfliteFile) -> None:
    pool = {"filterHeight": 3, "filterWidth": 2, "strideH": 3, "strideW": 2, "padding": VALID}
    most = file.operator("MAX_POOL_2D", [0], file.tensor(1, 3, 4, 3), "Pool2DOptions", **pool)
    mean = file.operator("AVERAGE_POOL_2D", [0], file.tensor(1, 3, 4, 3), "Pool2DOptions", **pool)
    both = file.operator("ADD", [most, mean], file.tensor(1, 3, 4, 3), "AddOptions", fusedActivationFunction=3)
    less = file.operator("SUB", [both, mean], file.tensor(1, 3, 4, 3), "SubOptions")
    joined = file.operator("CONCATENATION", [less, most], file.tensor(1, 3, 4, 6), "ConcatenationOptions", axis=3)
    product = file.operator("MUL", [joined, joined], file.tensor(1, 3, 4, 6, quantised=(0.2, -10)), "MulOptions")
    sides = file.constant(np.array([[0, 0], [1, 0], [0, 2], [0, 0]], np.int32), "INT32")
    padded = file.operator("PAD", [product, sides], file.tensor(1, 4, 6, 6, quantised=(0.2, -10)))
    network = read_tflite(file.averaged(padded, 6), SAMPLES)
    assert import_module(network, SAMPLES.shape[1:], samples=torch.from_numpy(SAMPLES)).classes == 2


@pytest.mark.parametrize("first", ["RESHAPE", "TRANSPOSE"])
def test_a_view_in_front_is_left_out_and_samples_are_images(file: TfliteFile, first: str) -> None:
    """As converters write them: a flat input, or PyTorch's channels first."""
    file.tensors[0].shape = [1, 216] if first == "RESHAPE" else [1, 3, 9, 8]
    target = file.numbers(1, 9, 8, 3) if first == "RESHAPE" else file.numbers(0, 2, 3, 1)
    image = file.operator(first, [0, target], file.tensor(1, 9, 8, 3))
    weight, bias = values(4, 3, 3, 3) / 3, values(4)
    network = read_tflite(file.averaged(file.convolution(image, [1, 9, 8, 4], file.weights(weight, bias)), 4), SAMPLES)
    layers = dict(network.named_children())
    assert [type(layer).__name__ for layer in layers.values()] == ["Conv2d", "Linear"]
    convolved = F.conv2d(
        torch.from_numpy(SAMPLES), torch.from_numpy(weight).permute(0, 3, 1, 2), torch.from_numpy(bias), padding=1
    )
    with torch.no_grad():
        found, wanted = network(torch.from_numpy(SAMPLES)), [*layers.values()][1](convolved.mean((2, 3)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 if file.is_int8 else 1e-5)
    assert compile_model(network, SAMPLES).quantized.graph.classes == 2


def test_what_is_not_known_is_refused_by_operator(tmp_path: Path) -> None:
    def refuse(said: str, kind: str, options: str = "", **chosen: int) -> None:
        file = TfliteFile(tmp_path / "net.tflite")
        made = file.operator(kind, [0], file.tensor(1, 9, 8, 3), options, **chosen)
        with pytest.raises(McuCompileError, match=said):
            read_tflite(file.averaged(made, 3), SAMPLES)

    refuse(r"^operator 0 \(SIN\): no kernel for this operator", "SIN")
    same = {"filterHeight": 3, "filterWidth": 3, "strideH": 1, "strideW": 1, "padding": SAME}
    refuse("pool without padding", "AVERAGE_POOL_2D", "Pool2DOptions", **same)
    refuse("activation function 4", "MAX_POOL_2D", "Pool2DOptions", **same, fusedActivationFunction=4)
    with pytest.raises(McuCompileError, match="is not a file of TensorFlow Lite"):
        read_tflite(Path(__file__), SAMPLES)
    (tmp_path / "cut.tflite").write_bytes((tmp_path / "net.tflite").read_bytes()[:300])
    with pytest.raises(McuCompileError, match=r"cannot be read as \.tflite"):
        read_tflite(tmp_path / "cut.tflite", SAMPLES)
    with pytest.raises(McuCompileError, match="cannot be read"):
        read_tflite(tmp_path / "none.tflite", SAMPLES)
    file = TfliteFile(tmp_path / "net.tflite")
    with pytest.raises(McuCompileError, match="interpreter refuses it, or samples of shape"):
        read_tflite(file.averaged(0, 3), SAMPLES.transpose(0, 2, 3, 1))


def test_another_network_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from port_planner.mcu import tflite_import

    monkeypatch.setattr(
        tflite_import, "_OPERATORS", {**tflite_import._OPERATORS, "RELU": tflite_import._OPERATORS["TANH"]}
    )
    for is_int8 in (False, True):
        file = TfliteFile(tmp_path / "net.tflite", is_int8)
        path = file.averaged(file.operator("RELU", [0], file.tensor(1, 9, 8, 3)), 3)
        with pytest.raises(McuCompileError, match=r"^operator 0 \(RELU\): LiteRT's interpreter differs here, by"):
            read_tflite(path, SAMPLES)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(McuCompileError, match=r"pip install 'port-agent\[tflite\]'"):
        read_tflite(tmp_path / "net.tflite", SAMPLES)
