"""Reference models for tests, benchmarks and the simulator, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU6,
) -> nn.Sequential:
    """Return convolution, batch norm and activation, as MobileNet stacks them."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, activation()) if activation else nn.Sequential(*layers)


class DigitsNet(nn.Module):
    """8x8 grey digits; 2,432 weights at width 16, which a 16 KiB Cortex-M0 can train."""

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        wide = 2 * width
        self.features = nn.Sequential(
            conv(1, width, 3, activation=nn.ReLU),
            conv(width, width, 3, 2, width, nn.ReLU),
            conv(width, wide, 1, activation=nn.ReLU),
            conv(wide, wide, 3, 1, wide, nn.ReLU),
            conv(wide, wide, 1, activation=nn.ReLU),
        )
        self.head = nn.Linear(wide, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of [N, 1, 8, 8]."""
        logits: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


class CameraNet(nn.Module):
    """80x80x3 images, 4.6 M multiply-accumulates: a Cortex-M4F's size."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        blocks = [(16, 24, 1), (24, 48, 2), (48, 96, 2), (96, 96, 1), (96, 96, 1)]
        layers: list[nn.Module] = [conv(3, 16, 3, 2, activation=nn.ReLU)]
        for inputs, outputs, stride in blocks:
            layers += [conv(inputs, inputs, 3, stride, inputs, nn.ReLU), conv(inputs, outputs, 1, activation=nn.ReLU)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(96, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of [N, 3, 80, 80]."""
        logits: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, and the input added where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, kernel: int = 3) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = [conv(inputs, hidden, 1)] if expansion != 1 else []
        layers += [conv(hidden, hidden, kernel, stride, hidden), conv(hidden, outputs, 1, activation=None)]
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        logits: torch.Tensor = x + self.conv(x) if self.residual else self.conv(x)
        return logits


def _width(channels: int, width: float, divisor: int = 8) -> int:
    rounded = max(divisor, int(channels * width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels * width else rounded


class MobileNetV2(nn.Module):
    """MobileNetV2 (arXiv 1801.04381) with a width multiplier; the paper's table 2."""

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, classes: int = 10, width: float = 0.35, last: int = 1280) -> None:
        super().__init__()
        channels = _width(32, width)
        blocks: list[nn.Module] = [conv(3, channels, 3, 2)]
        for expansion, base, repeats, stride in self.STAGES:
            for index in range(repeats):
                outputs = _width(base, width)
                blocks.append(InvertedResidual(channels, outputs, stride if index == 0 else 1, expansion))
                channels = outputs
        blocks.append(conv(channels, last, 1))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of [N, 3, H, W]."""
        x = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class StreamNet(nn.Module):
    """1-D convolutions over a sensor stream or over keyword features: [N, channels, time]."""

    def __init__(self, channels: int, classes: int, widths: Sequence[int] = (16, 24, 32, 48), kernel: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv1d(channels, widths[0], kernel, 2, kernel // 2, bias=False),
            nn.BatchNorm1d(widths[0]),
            nn.ReLU(),
        ]
        for inputs, outputs in pairwise(widths):
            layers += [
                nn.Conv1d(inputs, inputs, kernel, 2, kernel // 2, groups=inputs, bias=False),
                nn.BatchNorm1d(inputs),
                nn.ReLU(),
            ]
            layers += [nn.Conv1d(inputs, outputs, 1, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of [N, channels, time]."""
        logits: torch.Tensor = self.head(self.features(x).mean(2))
        return logits
