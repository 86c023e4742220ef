"""Importing modules as they are written, and refusing what has no kernel with the layer's name and a remedy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "does not end in a linear layer"),
        (nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(216, 2)), "groups 3"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2), nn.Flatten(), nn.Linear(64, 2)), "dilation"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 2)), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 2)), "flatten or pool"),
        (nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), "10 features"),
        (Branch(), "also read without it"),
    ],
)
def test_what_has_no_kernel_is_refused_with_a_remedy(module: nn.Module, problem: str) -> None:
    with pytest.raises(McuCompileError, match=problem):
        import_module(module, (3, 8, 8))
