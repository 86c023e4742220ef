"""Small networks that between them use every kernel, with fixed random weights and data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from port_planner.mcu.zoo import StreamNet, conv

Build = Callable[[int], tuple[nn.Module, NDArray[np.float32]]]


class EveryLayer(nn.Module):
    """Every two-dimensional layer kind, odd channel counts, a residual and both poolings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 10, 3, 2)
        self.expand = nn.Sequential(conv(10, 30, 1), conv(30, 30, 3, 1, 30), conv(30, 10, 1, activation=None))
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Conv2d(10, 13, 5, 1, 2)
        self.depthwise = nn.Conv2d(13, 13, 7, 2, 3, groups=13)
        self.average = nn.AvgPool2d(2)
        self.head = nn.Linear(13 * 4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.pool(x + self.expand(x))
        x = self.average(self.depthwise(torch.relu(self.wide(x)))).relu()
        return self.head(x.flatten(1))


class HiddenLinear(nn.Module):
    """Fully connected layers in mid network, over a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(96, 17), nn.ReLU6()
        )
        self.head = nn.Linear(17, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Readers(nn.Module):
    """Values that two layers read, batch norm on its own, and convolutions along one axis of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.alone, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.wide, self.narrow = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.down, self.each, self.head = nn.Conv1d(6, 5, 3, 2), nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.first(x))
        y = self.last((y + self.narrow(self.alone(y).relu())).relu())
        y = self.down(y.mean(3) + y.relu().mean(3))
        return self.head(self.each(y.transpose(1, 2)).relu().mean(1))


class Joins(nn.Module):
    """Groups, dilation, several outputs a channel, functions of values, products, concatenation and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Hardswish(inplace=True))
        self.grouped = nn.Conv2d(6, 9, (3, 2), (1, 2), (2, 1), (2, 1), groups=3)
        self.wide = nn.Conv2d(9, 18, 3, 2, 1, groups=9)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(18, 5, 1), nn.ReLU(), nn.Conv2d(5, 18, 1))
        self.along = nn.Conv1d(18, 18, 3, padding=4, dilation=4, groups=18)
        self.head = nn.Linear(18, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = F.leaky_relu(self.grouped(x), 0.1)
        y = torch.relu(self.wide(y)) + 0.25
        y = y * F.hardsigmoid(self.squeeze(y))
        z = F.interpolate(y, scale_factor=(2.0, 1.0))
        z = torch.cat([z, z * torch.tanh(z), y], 2).relu()
        z = torch.cat((z.mean(3), self.along(y.mean(3)).sigmoid()), -1)
        return self.head((2 * z - 0.5).mean(2))


class Choices(nn.Module):
    """Padding, slices, splits, shuffled channels, gates, differences, and an end that is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.narrow = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1)
        self.shuffle, self.gate, self.slope = nn.ChannelShuffle(2), nn.GLU(1), nn.PReLU()
        self.head = nn.Conv2d(8, 5, (3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(F.pad(x, (2, 1, 0, 1)))
        left, right = (x.chunk(2, 1)[part] for part in (0, 1))
        y = self.shuffle(torch.cat([right, self.narrow(left)], 1))
        y = self.slope(y[:, :, 1:, ::2] - x[:, :, :-1, 1::2])
        y = torch.cat([self.gate(y).relu(), y[:, [5, 0, 7, 0]]], 1)
        return self.head(y).mean((2, 3)) / 2.0


class Transposed(nn.Module):
    """Transposed convolutions: strides, padding of the output, dilation, groups, along one axis, batch
    norm behind, an image out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, 2, 1)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 3, 2, 1, output_padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.grouped = nn.ConvTranspose2d(8, 4, (2, 3), (1, 2), (1, 0), groups=2, dilation=(2, 1))
        self.along, self.each = nn.ConvTranspose1d(4, 5, 4, 3), nn.ConvTranspose2d(4, 4, 3, groups=4)
        self.bottleneck, self.decoder = nn.Linear(9, 30), nn.ConvTranspose2d(5, 2, 2, 2)
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.up(self.stem(x))).relu()
        y = self.along(x.mean(3)).relu()
        code = self.bottleneck(torch.cat([y.mean(2), self.each(x).tanh().mean((2, 3))], 1))
        return self.head(self.decoder(code.view(-1, 5, 2, 3)).tanh().flatten(1))


class Recurrent(nn.Module):
    """Gated recurrent units, over the columns of an image and over states; the mean of the states, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, 2, 1)
        self.columns, self.states = nn.GRU(12, 7, batch_first=True), nn.GRU(7, 5, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu().permute(0, 3, 1, 2).flatten(2)
        states, _ = self.columns(x)
        _, last = self.states(states.relu())
        return self.head(torch.cat([states.mean(1), last[-1]], 1))


def settled(module: nn.Module, data: NDArray[np.float32]) -> nn.Module:
    """Return the module in eval mode with batch norm statistics of the data."""
    module.train()
    with torch.no_grad():
        for _ in range(20):
            module(torch.from_numpy(data))
    return module.eval()


def every_layer(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(3)
    data = np.random.default_rng(3).normal(size=(count, 3, 32, 32)).astype(np.float32)
    return settled(EveryLayer(), data), data


def hidden_linear(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(4)
    data = np.random.default_rng(4).normal(size=(count, 2, 8, 8)).astype(np.float32)
    return settled(HiddenLinear(), data), data


def stream(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(5)
    data = np.random.default_rng(5).normal(size=(count, 6, 50)).astype(np.float32)
    return settled(StreamNet(6, 3, (7, 9, 12)), data), data


def readers(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(6)
    data = np.random.default_rng(6).normal(size=(count, 3, 9, 8)).astype(np.float32)
    return settled(Readers(), data), data


def joins(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(7)
    data = np.random.default_rng(7).normal(size=(count, 3, 16, 14)).astype(np.float32)
    return settled(Joins(), data), data


def choices(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(8)
    data = np.random.default_rng(8).normal(size=(count, 3, 11, 11)).astype(np.float32)
    return Choices().eval(), data


def transposed(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(9)
    data = np.random.default_rng(9).normal(size=(count, 2, 7, 6)).astype(np.float32)
    return settled(Transposed(), data), data


def padded(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    """Return convolutions of single pixels whose padding makes the image larger, and four classes."""
    torch.manual_seed(6)
    data = np.random.default_rng(6).normal(size=(count, 3, 8, 6)).astype(np.float32)
    body = (nn.Conv2d(3, 9, 1, padding=1), nn.ReLU(), nn.Conv2d(9, 8, 1, padding=(0, 2)), nn.AvgPool2d(2))
    return settled(nn.Sequential(*body, nn.Flatten(), nn.Linear(8 * 5 * 6, 4)), data), data


def recurrent(count: int = 12) -> tuple[nn.Module, NDArray[np.float32]]:
    torch.manual_seed(10)
    data = np.random.default_rng(10).normal(size=(count, 2, 8, 9)).astype(np.float32)
    return Recurrent().eval(), data


def bars() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noise, and in every other sample a bright left half; a network that has learnt nothing yet can learn it."""
    labels = np.arange(60) % 2
    data = np.random.default_rng(0).random((60, 1, 8, 8), np.float32) * 0.2
    data[labels == 1, :, :4] += 0.8
    return data, labels


NETWORKS = {"every_layer": every_layer, "hidden_linear": hidden_linear, "stream": stream}
BUILDS = NETWORKS | {
    "readers": readers,
    "joins": joins,
    "choices": choices,
    "transposed": transposed,
    "padded": padded,
    "recurrent": recurrent,
}
