"""Importing modules as they are written, and refusing what has no kernel with the layer's name and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from port_planner.mcu.autodiff import full_scheme, last_layers, training_program
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Clamp, Graph, McuCompileError, OpKind, Shape
from port_planner.mcu.quantize import run_float
from port_planner.mcu.zoo import CameraNet, DigitsNet, MobileNetV2


class McunetBlock(nn.Module):
    """MCUNet's and ProxylessNAS's block, as its repository writes it: optional parts and a shortcut module."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        wide = channels * 4
        self.mobile_inverted_conv = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mobile_inverted_conv is None:
            return x
        if self.shortcut is None:
            return self.mobile_inverted_conv(x)
        return self.mobile_inverted_conv(x) + self.shortcut(x)


class Mcunet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_conv = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.ModuleList([McunetBlock(8, 5), McunetBlock(8, 7)])
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_conv(x)
        for block in self.blocks:
            x = block(x)
        x = x.mean(3).mean(2)
        return self.classifier(x)


def imports_exactly(module: nn.Module, shape: tuple[int, ...]) -> Graph:
    module.eval()
    graph = import_module(module, shape)
    data = torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(
            run_float(graph, data)[graph.ops[-1].name].flatten(1), module(data), rtol=1e-4, atol=1e-5
        )
    return graph


@pytest.mark.parametrize(
    ("module", "shape"),
    [(DigitsNet(), (1, 8, 8)), (CameraNet(), (3, 48, 48)), (MobileNetV2(), (3, 64, 64)), (Mcunet(), (3, 32, 32))],
)
def test_known_models_import(module: nn.Module, shape: tuple[int, ...]) -> None:
    imports_exactly(module, shape)


def test_mcunet_keeps_its_residuals_and_large_kernels() -> None:
    graph = imports_exactly(Mcunet(), (3, 32, 32))
    kinds = [op.kind for op in graph.ops]
    assert kinds.count(OpKind.ADD) == 2
    assert [op.kernel for op in graph.ops if op.kind is OpKind.DEPTHWISE] == [(5, 5), (7, 7)]
    assert kinds.count(OpKind.AVERAGE_POOL) == 1


def test_a_layer_that_is_used_twice_is_not_trained() -> None:
    module = Steps(lambda m, x: m.b(m.a(m.a(x).relu()).mean((2, 3))), conv2(4), HEAD)
    graph = imports_exactly(module, (4, 8, 8))
    assert [op.shares for op in graph.ops] == ["", "a", "", ""]
    with pytest.raises(McuCompileError, match="a_2: the module uses the weights of a here as well"):
        training_program(graph, full_scheme(graph))
    training_program(graph, last_layers(graph, 1))


def test_functional_style_imports() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding="same")
            self.fc = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu6(self.conv(x))
            x = F.max_pool2d(x, 2)
            x = F.avg_pool2d(F.dropout(x, 0.1, self.training), kernel_size=2, stride=2)
            return self.fc(x.view(x.size(0), -1))

    class Shaped(Functional):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.avg_pool2d(F.max_pool2d(F.relu6(self.conv(x)), 2), kernel_size=2, stride=2)
            return self.fc(x.reshape(x.shape[0], -1))

    for module in (Functional(), Shaped()):
        graph = imports_exactly(module, (3, 8, 8))
        assert [op.kind for op in graph.ops] == [OpKind.CONV, OpKind.MAX_POOL, OpKind.AVERAGE_POOL, OpKind.CLASSIFIER]
        assert graph.ops[0].clamp is Clamp.RELU6


def test_a_stream_is_an_image_of_height_one() -> None:
    module = nn.Sequential(
        nn.Conv1d(6, 8, 5, 2, 2), nn.ReLU(), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    graph = imports_exactly(module, (6, 40))
    assert graph.ops[0].kernel == (1, 5)
    assert graph.ops[0].out_shape == Shape(1, 20, 8)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.fc((y + torch.relu(y)).mean((2, 3)))


class Steps(nn.Module):
    """Layers `a` to `e`, and a forward that a test writes."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        for name, layer in zip("abcde", layers, strict=False):
            setattr(self, name, layer)
        self.steps = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(self, x)


def conv2(channels: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 3, padding=1)


AXIS: Any = {"axis": (2, 3)}
IMAGE, COLUMN, STREAM = (3, 8, 6), (3, 8, 1), (3, 8)
NORM, CONV = nn.BatchNorm2d(4), nn.Conv1d(4, 4, 3, padding=1)
WIDE_STREAM = nn.Conv1d(3, 6, 6)
WIDE, PLAIN, HEAD = nn.Conv1d(4, 5, 3, 2), nn.Conv2d(3, 4, 1), nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Branch(), IMAGE),
        (Steps(lambda m, x: m.c((m.b(y := m.a(x)).relu() + y).mean((2, 3))), conv2(), nn.Identity(), HEAD), IMAGE),
        (Steps(lambda m, x: m.c((m.b(y := m.a(x)) + y.relu()).mean((2, 3))), conv2(), nn.Dropout(), HEAD), IMAGE),
        (Steps(lambda m, x: m.c((m.b(y := m.a(x)) + y).mean((2, 3))), conv2(), NORM, HEAD), IMAGE),
        (Steps(lambda m, x: m.c(F.relu6(y := m.b(m.a(x))).add(y.relu()).mean((3, 2))), conv2(), NORM, HEAD), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x).relu()).mean((2, 3))), conv2(), NORM, HEAD), IMAGE),
        (Steps(lambda m, x: m.b((x.relu() + x).flatten(1)), nn.Identity(), nn.Linear(144, 3)), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x).squeeze(3)).mean(2)), conv2(), WIDE, nn.Linear(5, 3)), COLUMN),
        (Steps(lambda m, x: m.c(m.b(m.a(x).mean(3)).mean(2)), conv2(), WIDE, nn.Linear(5, 3)), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x).mean(2)).mean(-1)), conv2(), WIDE, nn.Linear(5, 3)), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x).flatten(2)).mean(2)), conv2(), CONV, HEAD), COLUMN),
        (Steps(lambda m, x: m.b(m.a(x).flatten(2).mean(2)), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.b(m.a(x.unsqueeze(2)).squeeze(2).mean(2)), PLAIN, HEAD), STREAM),
        (Steps(lambda m, x: m.b(m.a(x.unsqueeze(-1)).mean((2, 3))), conv2(), HEAD), STREAM),
        (Steps(lambda m, x: m.b(m.a(x.transpose(2, 3)).flatten(1)), conv2(), nn.Linear(192, 3)), IMAGE),
        (Steps(lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1).flatten(1)), conv2(), nn.Linear(192, 3)), IMAGE),
        (Steps(lambda m, x: m.b(m.a(x).reshape(-1, 4, 48).mean(2)), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x).permute(0, 2, 3, 1)).mean((1, 2))), conv2(), nn.Linear(4, 4), HEAD), IMAGE),
        (Steps(lambda m, x: m.c(m.b(m.a(x)).flatten(1)), conv2(), nn.AdaptiveAvgPool2d(2), nn.Linear(16, 3)), IMAGE),
        (Steps(lambda m, x: m.b((y := m.a(x)).mean((2, 3), True).squeeze() + y.mean((2, 3))), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.b(torch.cat([x, m.a(x), x], 3).flatten(1)), nn.Identity(), nn.Linear(432, 3)), IMAGE),
        (Steps(lambda m, x: m.b(torch.cat((m.a(x), x.relu()), dim=-3).mean((3, 2))), conv2(), nn.Linear(7, 3)), IMAGE),
        (Steps(lambda m, x: m.b(torch.cat([y := m.a(x).mean((2, 3)), y * y], 1)), conv2(), nn.Linear(8, 3)), IMAGE),
        (Steps(lambda m, x: m.b(((y := m.a(x)).mean((2, 3), True).sigmoid() * y).mean((2, 3))), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.b(m.a(x).mul_(0.5).sub(1).neg().mean((2, 3))), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.b(m.c(m.a(x)).mean((2, 3))), conv2(), HEAD, nn.Upsample(scale_factor=3)), IMAGE),
        (Steps(lambda m, x: m.b(m.c(m.a(x)).mean(2)), WIDE_STREAM, nn.Linear(6, 3), nn.Upsample((9,))), STREAM),
        (Steps(lambda m, x: m.b(m.a(m.c(x)).mean(2)), nn.Conv1d(6, 4, 3, 1, "same", 4, 2), HEAD, WIDE_STREAM), STREAM),
        (Steps(lambda m, x: m.b(F.avg_pool2d(y := m.a(x), y.size()[2:]).flatten(1)), conv2(), HEAD), IMAGE),
        (Steps(lambda m, x: m.b(torch.mean(F.max_pool2d(m.a(x), x.shape[-1]), **AXIS)), conv2(), HEAD), IMAGE),
    ],
)
def test_views_second_readers_and_axes_are_those_of_the_module(module: nn.Module, shape: tuple[int, ...]) -> None:
    for inner in module.modules():
        if isinstance(inner, nn.BatchNorm2d) and inner.running_mean is not None:
            nn.init.uniform_(inner.running_mean)
            nn.init.uniform_(inner.weight, 0.5, 2.0)
    imports_exactly(module, shape)


def test_names_of_layers_are_names_in_c() -> None:
    layers = nn.ModuleDict({"a-b": nn.Linear(6, 6), "a_b": nn.Linear(6, 6), "*/ ü": nn.Linear(6, 6)})
    module = Steps(lambda m, x: m.b(m.a["*/ ü"](m.a["a_b"](m.a["a-b"](x)))), layers, nn.Linear(6, 2))
    graph = imports_exactly(module, (6,))
    assert [op.name for op in graph.ops] == ["a_a_b", "a_a_b_2", "a_____", "b"]
    assert [op.origin.layer for op in graph.ops if op.origin] == ["a.a-b", "a.a_b", "a.*/ ü", "b"]


@pytest.mark.parametrize("forward", [lambda m, x: m.a(x[: len(x)]), lambda m, x: m.a(x) if x.sum() > 0 else m.a(-x)])
def test_what_cannot_be_traced_is_refused(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(McuCompileError, match="model: cannot be traced"):
        import_module(Steps(forward, nn.Linear(6, 2)), (6,))


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), r"its shape is \[4, 6, 6\].*; end the model with nn.Flatten"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()),
            "288 outputs do not come from a linear layer, .* at most 256",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()), "reflect padding"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(144, 2)), "1: no kernel for PReLU"),
        (nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Flatten()), r"bilinear upsampling of \[8, 8\]"),
        (nn.Sequential(nn.Upsample(12), nn.Flatten()), r"nearest upsampling of \[8, 8\] to \[12, 12\]"),
        (Steps(lambda m, x: m.a(x.flatten(1))[1][0], nn.LSTM(192, 4)), "a: no kernel for LSTM, which gives several"),
        (Steps(lambda m, x: x.max(1)[0]), "max: no kernel for max_1, which gives several tensors"),
        (Steps(lambda m, x: torch.cat([x, x])), "joins along the batch"),
        (Steps(lambda m, x: torch.cat([x, x.transpose(2, 3)], 1)), r"joins \[3, 8, 8\] and \[3, 8, 8\]"),
        (Steps(lambda m, x: torch.cat([x.flatten(1), m.a(x).flatten(1)], 1), conv2()), "joins"),
        (Steps(lambda m, x: x * m.a(x), nn.Conv2d(3, 1, 1)), r"multiplies \[3, 8, 8\] by \[1, 8, 8\]"),
        (Steps(lambda m, x: x - m.a(x), nn.Conv2d(3, 1, 1)), r"adds \[3, 8, 8\] and \[1, 8, 8\]"),
        (Steps(lambda m, x: x / m.a(x), nn.Conv2d(3, 3, 1)), "no kernel for truediv"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 2)), "flatten or pool"),
        (nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), "torch rejects its inputs .*2x192 and 10x2"),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 2)), "batch norm of a flattened tensor"),
    ],
)
def test_what_has_no_kernel_is_refused_with_a_remedy(module: nn.Module, problem: str) -> None:
    with pytest.raises(McuCompileError, match=problem):
        import_module(module, (3, 8, 8))
