"""Weights of the module out of the codes of a board, and back: whatever the layer, its norm and its layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.layers import LayerTables
from port_agent.mcu.project_weights import take_weights, write_layers
from port_agent.mcu.protocol.board_model import read_model
from port_planner.mcu import CompiledModel, compile_model
from port_planner.mcu.autodiff import LayerUpdate, SparseScheme
from port_planner.mcu.emit import parameter_image
from port_planner.mcu.quantize import run_float
from tests.planner.mcu.networks import Build, recurrent, transposed


class Layers(nn.Module):
    """Norms with and without weights, before and behind, and layers whose axes are not the board's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.norm = nn.BatchNorm2d(2), nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.each, self.plain = nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6, affine=False)
        self.along, self.head = nn.Conv1d(6, 4, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.each(self.norm(self.wide(self.first(x))).relu()))
        logits: torch.Tensor = self.head(self.along(x.mean(3)).transpose(1, 2).flatten(1))
        return logits


DATA = np.random.default_rng(1).normal(size=(16, 2, 8, 7)).astype(np.float32)


def compiled(scheme: SparseScheme | None = None, q88: bool = False) -> tuple[nn.Module, CompiledModel]:
    torch.manual_seed(1)
    module = Layers().train()
    with torch.no_grad():
        for _ in range(20):
            module(torch.from_numpy(DATA))
    return module.eval(), compile_model(module, DATA, name="layers", scheme=scheme, q88=q88)


def tables(model: CompiledModel, folder: Path) -> LayerTables:
    model.write(folder)
    write_layers(folder, model)
    return LayerTables(read_model(folder))


def learnt(model: CompiledModel) -> bytes:
    """Return parameters as if a training had changed all of them."""
    image = np.frombuffer(parameter_image(model.quantized, model.memory, model.scheme), np.uint8).copy()
    codes = image[model.memory.parameters.bias_bytes :][: model.memory.parameters.weight_bytes].view(np.int8)
    codes[:] = np.clip(codes.astype(int) + np.random.default_rng(2).integers(-9, 9, len(codes)), -127, 127)
    biases = image[: model.memory.parameters.bias_bytes].view("<i4")
    biases += np.random.default_rng(3).integers(-99, 99, len(biases)).astype("<i4")
    return image.tobytes()


HALF = SparseScheme({"wide": LayerUpdate(True, 3), "each": LayerUpdate(True), "head": LayerUpdate(rows=1)})


@pytest.mark.parametrize("scheme", [None, HALF], ids=["all", "some"])
def test_the_module_computes_with_the_weights_of_the_board(scheme: SparseScheme | None, tmp_path: Path) -> None:
    module, model = compiled(scheme)
    parameters, table = learnt(model), tables(model, tmp_path)
    state = table.state_dict(parameters)
    module.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    codes = take_weights(model, table.code_tensors(parameters))
    with torch.no_grad():
        given = module(torch.from_numpy(DATA))
        graph = codes.quantized.graph
        expected = run_float(graph, torch.from_numpy(DATA))[graph.ops[-1].name].flatten(1)
    tolerance = 1e-4 if scheme is None else 0.05  # frozen layers keep the module's own weights, not their codes
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)
    for source in (state, table.code_tensors(parameters)):
        again = take_weights(model, source)
        assert parameter_image(again.quantized, again.memory, again.scheme) == parameters


@pytest.mark.parametrize("build", [transposed, recurrent])
def test_layers_of_other_layouts_and_names_come_back(build: Build, tmp_path: Path) -> None:
    """Transposed in groups, with a batch norm behind, and along one axis of an image; the gates of recurrent layers."""
    module, data = build(12)
    model = compile_model(module, data)
    parameters, table = learnt(model), tables(model, tmp_path)
    state = table.state_dict(parameters)
    module.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    graph = take_weights(model, table.code_tensors(parameters)).quantized.graph
    with torch.no_grad():
        expected = run_float(graph, torch.from_numpy(data))[graph.ops[-1].name].flatten(1)
        torch.testing.assert_close(module(torch.from_numpy(data)), expected, rtol=1e-4, atol=1e-4)
    again = take_weights(model, state)
    assert parameter_image(again.quantized, again.memory, again.scheme) == parameters


class NamedArgument(nn.Module):
    """Layers that have two names, and a weight that an unused layer has as well: one tensor each in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.features = nn.Sequential(self.conv, nn.BatchNorm2d(4), nn.ReLU())
        self.norm, self.head, self.unused = self.features[1], nn.Linear(4, 3), nn.Linear(4, 3)
        self.unused.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


def test_a_tensor_of_several_names_is_exported_under_all_of_them(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = NamedArgument()
    module(torch.from_numpy(DATA))
    given = module.state_dict(keep_vars=True)
    model = compile_model(module.eval(), DATA)
    assert all(tensor is given[name] for name, tensor in module.state_dict(keep_vars=True).items())  # left as it was
    parameters, table = learnt(model), tables(model, tmp_path)
    state = table.state_dict(parameters)
    module.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    with torch.no_grad():
        for name, tensor in module.state_dict().items():  # whichever of its names was loaded last
            np.testing.assert_array_equal(tensor.numpy(), state[name])
        graph = take_weights(model, table.code_tensors(parameters)).quantized.graph
        expected = run_float(graph, torch.from_numpy(DATA))[graph.ops[-1].name].flatten(1)
        torch.testing.assert_close(module(torch.from_numpy(DATA)), expected, rtol=1e-4, atol=1e-4)
    once = {name: values for name, values in state.items() if name not in ("conv.weight", "norm.bias", "head.weight")}
    for source in (state, once):
        again = take_weights(model, source)
        assert parameter_image(again.quantized, again.memory, again.scheme) == parameters
    with pytest.raises(BoardJobError, match=r"conv\.bias and features\.0\.bias are one tensor"):
        take_weights(model, state | {"conv.bias": state["conv.bias"] + 1})


def test_low_bytes_are_parts_of_a_code(tmp_path: Path) -> None:
    _, model = compiled(q88=True)
    parameters, table = learnt(model), tables(model, tmp_path)
    exact, codes = table.state_dict(parameters), table.code_tensors(parameters)
    low = (codes["head.weight_low"].astype(np.float32) - 128) / 256
    values = (codes["head.weight"] + low) * codes["head.weight_scale"][:, None]
    np.testing.assert_array_equal(values, exact["head.weight"])


def test_a_bias_without_a_place_in_the_module_is_not_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = compile_model(nn.Sequential(nn.Linear(7, 2, bias=False)).eval(), DATA[:, 0, 0])
    table, start = tables(model, tmp_path), parameter_image(model.quantized, model.memory, model.scheme)
    assert len(start) == 16 and set(table.state_dict(start)) == {"0.weight"}  # 14 weights and no bias


def test_low_bytes_come_back_to_the_bit(tmp_path: Path) -> None:
    _, model = compiled(q88=True)
    table = tables(model, tmp_path)
    parameters = bytearray(learnt(model))
    for layer in table.layers:
        low = layer.low_offset or 0
        parameters[low : low + layer.trained_bytes] = np.random.default_rng(4).bytes(layer.trained_bytes)
    for source in (table.state_dict(bytes(parameters)), table.code_tensors(bytes(parameters))):
        again = take_weights(model, source)
        assert parameter_image(again.quantized, again.memory, again.scheme) == parameters


def test_a_model_without_its_layers_is_compiled_again(tmp_path: Path) -> None:
    _, model = compiled()
    tables(model, tmp_path)
    (tmp_path / "layers.safetensors").unlink()
    with pytest.raises(BoardJobError, match="compile the model again"):
        LayerTables(read_model(tmp_path))
