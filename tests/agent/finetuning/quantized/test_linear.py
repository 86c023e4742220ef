"""Layers on a grid have the bits of plain layers over the decoded weight, forward and backward, in blocks or whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from port_agent import budget
from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.quantized import linear as grid_linear
from port_agent.finetuning.quantized.linear import QuantizedConv1D, QuantizedLinear, encode_weight
from port_agent.intercept.tiles import rows
from port_agent.packing import Quantization
from port_agent.packing.quantized import NF4_LEVELS
from port_planner.exactness.kept_answers import KeptAnswers

each_grid = pytest.mark.parametrize("quantization", Quantization)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def layer_of(quantization: Quantization, weight: torch.Tensor, bias: nn.Parameter | None = None) -> QuantizedLinear:
    return QuantizedLinear(quantization, *encode_weight(quantization, weight), bias, weight.dtype)


class Noted(KeptAnswers):
    """What was compared, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def equal(self, form: object, compare: Callable[[], bool]) -> bool:
        def noted() -> bool:
            self.found.append(compare())
            return self.found[-1]

        return super().equal(form, noted)


@pytest.fixture(autouse=True)
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Nothing is compared yet, and a weight of 640 x 512 is several blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(grid_linear, "BLOCK_BYTES", 128 << 10)
    monkeypatch.setattr(grid_linear, "_equal_in_blocks", noted := Noted())
    return noted


@pytest.mark.slow
@each_grid
@each_dtype
@pytest.mark.parametrize("kind", [QuantizedLinear, QuantizedConv1D])
@pytest.mark.parametrize("shape", [(1, 1, 512), (37, 512), (2, 64, 512)])
def test_the_bits_are_those_of_a_plain_layer(
    shape: tuple[int, ...],
    kind: type[QuantizedLinear | QuantizedConv1D],
    dtype: torch.dtype,
    quantization: Quantization,
    noted: Noted,
) -> None:
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(640, dtype=dtype))
    weight = torch.randn((512, 640) if kind is QuantizedConv1D else (640, 512), dtype=dtype)
    mine = kind(quantization, *encode_weight(quantization, weight), bias, dtype)
    plain: Any = Conv1D(640, 512) if kind is QuantizedConv1D else nn.Linear(512, 640)
    plain.weight, plain.bias = nn.Parameter(mine.decoded(), requires_grad=False), nn.Parameter(bias.detach().clone())
    first = torch.randn(shape, dtype=dtype)
    for _ in range(2):  # compared, then in blocks
        results = []
        for layer in (plain, mine):
            given = first.clone().requires_grad_()
            out = layer(given)
            out.backward(out.detach())
            assert given.grad is not None and layer.bias.grad is not None
            results.append((out.detach(), given.grad, layer.bias.grad))
            layer.bias.grad = None
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(noted.found) == 2


def test_zeros_are_compared_by_numbers_that_stand_for_them(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_linear, "column_blocks", lambda columns, step: [(0, columns // 2)])
    layer = layer_of(Quantization.NF4, torch.randn(256, 512))
    assert torch.equal(layer(torch.zeros(3, 512)), torch.zeros(3, 256)) and noted.found == [False]


def test_where_blocks_would_differ_the_whole_is_multiplied(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(Quantization.NF4, torch.randn(256, 512))
    given = torch.randn(3, 512)
    expected = nn.functional.linear(given, layer.decoded())
    monkeypatch.setattr(
        grid_linear, "column_blocks", lambda columns, step: [(0, columns // 2)]
    )  # leaves half unwritten
    assert torch.equal(layer(given), expected) and torch.equal(layer(given), expected)
    assert noted.found == [False]


@each_grid
@each_dtype
def test_each_weight_is_at_its_nearest_level(dtype: torch.dtype, quantization: Quantization) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 256, dtype=dtype)
    weight[1] = 0
    _, scales = encode_weight(quantization, weight)
    levels = torch.tensor(NF4_LEVELS) if quantization is Quantization.NF4 else torch.arange(-127.0, 128.0)
    values = scales.repeat_interleave(quantization.block, 1)[..., None] * levels
    nearest = (values - weight.float()[..., None]).abs().amin(-1)
    off = (layer_of(quantization, weight.float()).decoded() - weight.float()).abs()
    torch.testing.assert_close(off, nearest, rtol=1e-4, atol=1e-6)
    assert not layer_of(quantization, weight).decoded()[1].any()


@each_grid
def test_a_weight_on_the_grid_stays_where_it_is(quantization: Quantization) -> None:
    once = layer_of(quantization, torch.randn(8, 256)).decoded()
    assert torch.equal(layer_of(quantization, once).decoded(), once)


@each_grid
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(number: float, quantization: Quantization) -> None:
    weight = torch.ones(2, 256)
    weight[1, 3] = number
    with pytest.raises(ValueError, match="infinite or not a number"):
        encode_weight(quantization, weight)


@each_grid
@each_dtype
def test_rows_of_a_weight_in_its_file_are_put_on_the_grid_without_the_others(
    dtype: torch.dtype, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TinyLlama-1.1B in 380 MiB there was no room for one weight of 22 MiB and its copy in 32 bits."""
    monkeypatch.setattr(rows, "TILE_BYTES", 16 << 10)
    monkeypatch.setattr(rows, "AROUND_BYTES", 16 << 10)
    save_file({"weight": torch.randn(512, 512).to(dtype)}, tmp_path / "w.safetensors")
    weight = load_file(tmp_path / "w.safetensors")["weight"]
    expected = encode_weight(quantization, weight)
    with budget(tensors="384K", page_dir=tmp_path).resizing() as b:
        parts = [encode_weight(quantization, weight[first : first + 16]) for first in range(0, 512, 16)]
        assert b.report.mapped_bytes == weight.nbytes and b.report.over_bytes == 0
    for part, whole in zip(zip(*parts, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(part), whole)
