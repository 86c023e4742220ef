"""Weights that a project is compiled with: those of its module, or none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.layers import Arrays, LayerTables
from port_agent.mcu.project_weights import read_weights, take_weights, write_layers
from port_agent.mcu.protocol.board_model import read_model
from port_planner.mcu import CompiledModel, SparseScheme, compile_model
from port_planner.mcu.autodiff import LayerUpdate
from port_planner.mcu.compile import with_growth
from port_planner.mcu.emit import parameter_image


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    model = compile_model(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), data)
    model.write(tmp_path)
    write_layers(tmp_path, model)
    image = parameter_image(model.quantized, model.memory, model.scheme)
    state = LayerTables(read_model(tmp_path)).state_dict(image)
    assert take_weights(model, state).sha256 == model.sha256
    for changed, message in (
        (
            {"2.weight": np.zeros((3, 9), np.float32)},
            r"2\.weight has shape \[3, 9\], but in the project's module \[3, 4\]",
        ),
        ({"2.weight": state["2.weight"].T}, r"2\.weight has shape \[4, 3\]"),
        ({"2.bias": state["2.bias"][:1]}, r"2\.bias has shape \[1\]"),
        ({"0.weight": np.full((4, 6), np.nan, np.float32)}, r"0\.weight has 24 values that are NaN"),
        ({"2.bias": np.array([0, np.inf, 0], np.float32)}, r"2\.bias has 1 values that are NaN, infinite"),
        ({"2.bias": np.full(3, 1e9, np.float32)}, "biases of layer 2 are larger than"),
        ({"3.weight": np.zeros(3, np.float32)}, r"the weights have 3\.weight, which the project's module does not"),
    ):
        with pytest.raises(BoardJobError, match=message):
            take_weights(model, state | changed)
    with pytest.raises(BoardJobError, match=r"the weights lack 0\.bias, 0\.weight"):
        take_weights(model, {name: values for name, values in state.items() if not name.startswith("0")})
    with pytest.raises(BoardJobError, match=r"the weights lack 2\.bias"):
        take_weights(model, {name: values for name, values in state.items() if name != "2.bias"})


@pytest.mark.parametrize("codes", [False, True])
def test_what_is_not_trained_is_exported_as_it_was_given(codes: bool, tmp_path: Path) -> None:
    """The weights of a file, not those that the project's module had: of frozen layers, of
    biases alone, of inference.
    """
    torch.manual_seed(0)
    data = np.random.default_rng(1).normal(size=(40, 2, 6, 6)).astype(np.float32)

    def make() -> nn.Sequential:
        module = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)
        )
        module.forward(torch.from_numpy(data))
        return module.eval()

    module, other = make(), make()
    with torch.no_grad():
        for mine, its in zip(module.parameters(), other.parameters(), strict=True):
            its.copy_(0.8 * mine.flip(0))
    given = {name: tensor.numpy() for name, tensor in other.state_dict().items()}
    for scheme in (SparseScheme({}), SparseScheme({"3": LayerUpdate(True, 0), "5": LayerUpdate(True, 3)})):
        if codes:
            given = _exported(take_weights(compile_model(module, data), given), tmp_path, codes=True)
        model = take_weights(compile_model(module, data, scheme=scheme), given)
        again = {name: torch.from_numpy(values) for name, values in _exported(model, tmp_path, codes=False).items()}
        probe = make()
        probe.load_state_dict(again)
        with torch.no_grad():
            found, wanted = probe(torch.from_numpy(data)), other(torch.from_numpy(data))
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.02


def _exported(model: CompiledModel, folder: Path, codes: bool) -> Arrays:
    model.write(folder)
    write_layers(folder, model)
    tables, image = LayerTables(read_model(folder)), parameter_image(model.quantized, model.memory, model.scheme)
    return tables.code_tensors(image) if codes else tables.state_dict(image)


def test_weights_of_16_bits_are_read_as_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    narrow = {name: tensor.bfloat16() for name, tensor in module.state_dict().items()}
    save_file(narrow, tmp_path / "narrow.safetensors")
    found = take_weights(compile_model(module, data), read_weights(tmp_path / "narrow.safetensors"))
    module.load_state_dict(narrow)
    for op in found.quantized.ops:
        wanted = module.get_parameter(f"{op.op.name}.weight").detach().numpy()
        assert op.op.weight is not None and (op.op.weight.reshape(wanted.shape) == wanted).all()


def test_weights_beyond_the_range_of_the_model_are_refused_and_fit_where_they_may_grow() -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    model = compile_model(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), data)
    state = dict(model.quantized.graph.state)
    larger = state | {"2.weight": 3 * state["2.weight"]}
    with pytest.raises(
        BoardJobError, match=r"weights of layer 2 are up to 2\.4 times the largest .* a larger --growth"
    ):
        take_weights(model, larger)
    (*_, last) = take_weights(with_growth(model, data, 4.0), larger).quantized.ops
    assert last.weight is not None and last.weight_scale is not None
    real = last.weight.reshape(3, 4) * last.weight_scale[:, None]
    assert np.abs(real - larger["2.weight"]).max() <= 0.501 * last.weight_scale.max()


def test_a_value_that_is_in_no_layer_of_the_board_is_refused() -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    model = compile_model(nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 3)).eval(), data)
    state = dict(model.quantized.graph.state)
    take_weights(model, state)
    with pytest.raises(BoardJobError, match=r"1\.weight differs from that of the project's module"):
        take_weights(model, state | {"1.weight": np.full(1, 0.1, np.float32)})


def test_a_file_that_is_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BoardJobError, match=r"cannot read .*; give a \.safetensors file"):
        read_weights(tmp_path / "none.safetensors")
