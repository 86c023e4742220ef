"""Kinds of networks that people put on boards: each written as they write it, small enough to compile in a second.

Some need operators for which the compiler has no kernel: these must be refused, never become another network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

Body = Callable[[Any, torch.Tensor], Any]
Shape = tuple[int, ...]
IMAGE, SMALL, GREY, STREAM, ROW = (3, 16, 16), (3, 9, 7), (1, 12, 12), (6, 32), (20,)
CLASSES = 4


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """One network: its name, the shape of a sample, and what makes the module."""

    name: str
    shape: Shape
    make: Callable[[], nn.Module]


class Written(nn.Module):
    """Named layers, with a separate forward function."""

    def __init__(self, body: Body, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def block(i: int, o: int, kernel: int = 3, act: nn.Module | None = None, **of: Any) -> nn.Sequential:
    """Return convolution, batch norm and an activation function, the size kept."""
    reach = of.get("dilation", 1) * (kernel - 1) // 2
    return nn.Sequential(nn.Conv2d(i, o, kernel, padding=reach, bias=False, **of), nn.BatchNorm2d(o), act or nn.ReLU())


def stream(i: int, o: int, kernel: int = 3, act: nn.Module | None = None, **of: Any) -> nn.Sequential:
    """Return the same as `block`, for a stream of samples."""
    reach = of.get("dilation", 1) * (kernel - 1) // 2
    return nn.Sequential(nn.Conv1d(i, o, kernel, padding=reach, bias=False, **of), nn.BatchNorm1d(o), act or nn.ReLU())


def pooled(channels: int) -> list[nn.Module]:
    """Return global average pooling and a head."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def pooled_stream(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def image(body: Body, channels: int, **layers: nn.Module) -> Callable[[], nn.Module]:
    """Return what makes a network of a stem of eight channels, a body, global average pooling and a head."""
    return lambda: Written(
        lambda m, x: m.head(body(m, m.stem(x)).mean((2, 3))),
        stem=block(3, 8, stride=2),
        head=nn.Linear(channels, CLASSES),
        **layers,
    )


def along(body: Body, channels: int, **layers: nn.Module) -> Callable[[], nn.Module]:
    """Return the same as `image`, for a stream."""
    return lambda: Written(
        lambda m, x: m.head(body(m, m.stem(x)).mean(2)), stem=stream(6, 8), head=nn.Linear(channels, CLASSES), **layers
    )


def _activation(act: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(block(3, 8, act=act()), nn.MaxPool2d(2), block(8, 12, act=act()), *pooled(12))


def _shuffled(m: Any, x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return m.a(x).view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def _gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(m.a(x)) * torch.sigmoid(m.b(x))


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k = m.a(x), m.b(x)
    return (q.transpose(1, 2) @ k).softmax(-1) @ x.transpose(1, 2)


def _squeezed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.b(m.a(x.mean((2, 3))).relu()).sigmoid().unsqueeze(-1).unsqueeze(-1)


def _inverted(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(m.a(x))
    return x + m.d(y * m.c(y))


def _gate(channels: int, inner: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(channels, inner, 1),
        nn.ReLU(),
        nn.Conv2d(inner, channels, 1),
        nn.Hardsigmoid(),
    )


def _recurrent(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Written(
        lambda m, x: m.head(m.cell(x.transpose(1, 2))[0][:, -1]),
        cell=kind(6, 8, batch_first=True),
        head=nn.Linear(8, CLASSES),
    )


def _mirrored() -> nn.Module:
    """Return a decoder whose weight is the transpose of the encoder's, in the same memory."""
    tied = nn.Sequential(
        nn.Linear(20, 12, bias=False), nn.ReLU(), nn.Linear(12, 20, bias=False), nn.Linear(20, CLASSES)
    )
    tied[2].register_parameter("weight", nn.Parameter(tied[0].get_parameter("weight").detach().t()))
    return tied


def _channels_last(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def _hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, inputs, result: 0.5 * result)
    return layer


def _sequential(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


ACTIVATIONS = (
    nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU,
    nn.Softplus, nn.Softsign, nn.Mish, nn.Hardtanh, nn.LogSigmoid, nn.PReLU, nn.GLU, nn.Softmax2d, nn.Hardshrink,
)  # fmt: skip

KINDS: tuple[NetworkKind, ...] = (
    NetworkKind("linear", ROW, lambda: nn.Sequential(nn.Linear(20, CLASSES))),
    NetworkKind("mlp", ROW, lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))),
    NetworkKind("mlp batch norm", ROW, lambda: nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, CLASSES))),
    NetworkKind("mlp tanh", ROW, lambda: nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, CLASSES), nn.Softmax(1))),
    NetworkKind("mlp residual", ROW, lambda: Written(lambda m, x: m.head(x + m.b(m.a(x).relu())), a=nn.Linear(20, 12), b=nn.Linear(12, 20), head=nn.Linear(20, CLASSES))),
    NetworkKind("mlp highway", ROW, lambda: Written(lambda m, x: m.head(m.a(x).sigmoid() * x), a=nn.Linear(20, 20), head=nn.Linear(20, CLASSES))),
    NetworkKind("mlp of images", GREY, lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, CLASSES))),
    NetworkKind("mlp layer norm", ROW, lambda: nn.Sequential(nn.Linear(20, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES))),
    NetworkKind("mlp sine", ROW, lambda: Written(lambda m, x: m.head(torch.sin(m.a(x))), a=nn.Linear(20, 16), head=nn.Linear(16, CLASSES))),
    NetworkKind("mlp wide and deep", ROW, lambda: Written(lambda m, x: m.head(torch.cat([x, m.a(x).relu()], 1)), a=nn.Linear(20, 12), head=nn.Linear(32, CLASSES))),
    NetworkKind("regression", ROW, lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))),
    NetworkKind("binary sigmoid", ROW, lambda: nn.Sequential(nn.Linear(20, 1), nn.Sigmoid())),
    NetworkKind("lenet", GREY, lambda: nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, CLASSES))),
    NetworkKind("vgg", IMAGE, lambda: nn.Sequential(block(3, 8), block(8, 8), nn.MaxPool2d(2), block(8, 12), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, CLASSES))),
    NetworkKind("vgg small", SMALL, lambda: nn.Sequential(block(3, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, CLASSES))),
    NetworkKind("all convolutional", IMAGE, lambda: nn.Sequential(block(3, 8, stride=2), block(8, 8, stride=2), nn.Conv2d(8, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
    NetworkKind("overlapping pools", IMAGE, lambda: nn.Sequential(block(3, 8), nn.MaxPool2d(3, 2, 1), block(8, 8), nn.AvgPool2d(3, 2, 1), *pooled(8))),
    NetworkKind("ceil pool", SMALL, lambda: nn.Sequential(block(3, 8), nn.MaxPool2d(2, ceil_mode=True), *pooled(8))),
    NetworkKind("adaptive pool 2", IMAGE, lambda: nn.Sequential(block(3, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))),
    NetworkKind("adaptive pool 3", IMAGE, lambda: nn.Sequential(block(3, 8), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, CLASSES))),
    NetworkKind("adaptive max", IMAGE, lambda: nn.Sequential(block(3, 8), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))),
    NetworkKind("max over time", STREAM, lambda: Written(lambda m, x: m.head(m.a(x).max(2).values), a=stream(6, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("input norm", IMAGE, lambda: nn.Sequential(nn.BatchNorm2d(3), block(3, 8, stride=2), *pooled(8))),
    NetworkKind("input scaled", IMAGE, lambda: Written(lambda m, x: m.a((x - 0.5) / 0.25), a=nn.Sequential(block(3, 8, stride=2), *pooled(8)))),
    NetworkKind("norm after flatten", GREY, lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, CLASSES))),
    NetworkKind("group norm", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), *pooled(8))),
    NetworkKind("instance norm", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), *pooled(8))),
    NetworkKind("relu before norm", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), *pooled(8))),
    NetworkKind("resnet", IMAGE, image(lambda m, x: (x + m.b(m.a(x))).relu(), 8, a=block(8, 8), b=block(8, 8, act=nn.Identity()))),
    NetworkKind("resnet projection", IMAGE, image(lambda m, x: (m.c(x) + m.b(m.a(x))).relu(), 12, a=block(8, 12, stride=2), b=block(12, 12, act=nn.Identity()), c=nn.Conv2d(8, 12, 1, 2))),
    NetworkKind("resnet preactivated", IMAGE, image(lambda m, x: x + m.b(m.a(x.relu()).relu()), 8, a=nn.Conv2d(8, 8, 3, padding=1), b=nn.Conv2d(8, 8, 3, padding=1))),
    NetworkKind("resnext", IMAGE, image(lambda m, x: (x + m.c(m.b(m.a(x)))).relu(), 8, a=block(8, 16, 1), b=block(16, 16, groups=4), c=nn.Conv2d(16, 8, 1))),
    NetworkKind("residual in place", IMAGE, image(lambda m, x: m.b(x).add_(m.a(x)).relu_(), 8, a=block(8, 8), b=nn.Conv2d(8, 8, 1))),
    NetworkKind("residual scaled", IMAGE, image(lambda m, x: x + 0.1 * m.a(x), 8, a=block(8, 8))),
    NetworkKind("residual subtracted", IMAGE, image(lambda m, x: x - m.a(x), 8, a=block(8, 8))),
    NetworkKind("residual broadcast", IMAGE, image(lambda m, x: x + m.a(x).mean((2, 3), True), 8, a=block(8, 8))),
    NetworkKind("densenet", IMAGE, image(lambda m, x: torch.cat([y := torch.cat([x, m.a(x)], 1), m.b(y)], 1), 16, a=block(8, 4), b=block(12, 4))),
    NetworkKind("squeezenet fire", IMAGE, image(lambda m, x: torch.cat([m.b(y := m.a(x)), m.c(y)], 1), 16, a=block(8, 4, 1), b=block(4, 8, 1), c=block(4, 8))),
    NetworkKind("inception", IMAGE, image(lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x), F.max_pool2d(x, 3, 1, 1)], 1), 20, a=block(8, 4, 1), b=block(8, 4), c=block(8, 4, 5))),
    NetworkKind("mobilenet", IMAGE, image(lambda m, x: m.b(m.a(x)), 16, a=block(8, 8, groups=8), b=block(8, 16, 1))),
    NetworkKind("mobilenet 2", IMAGE, image(lambda m, x: x + m.c(m.b(m.a(x))), 8, a=block(8, 24, 1, nn.ReLU6()), b=block(24, 24, act=nn.ReLU6(), groups=24), c=block(24, 8, 1, nn.Identity()))),
    NetworkKind("mobilenet 3", IMAGE, image(_inverted, 8, a=block(8, 16, 1, nn.Hardswish()), b=block(16, 16, 5, nn.Hardswish(), groups=16), c=_gate(16, 4), d=block(16, 8, 1, nn.Identity()))),
    NetworkKind("efficientnet", IMAGE, image(_inverted, 8, a=block(8, 16, 1, nn.SiLU()), b=block(16, 16, act=nn.SiLU(), groups=16), c=nn.Sequential(_gate(16, 4)), d=block(16, 8, 1, nn.Identity()))),
    NetworkKind("squeeze and excite", IMAGE, image(_squeezed, 8, a=nn.Linear(8, 4), b=nn.Linear(4, 8))),
    NetworkKind("spatial attention", IMAGE, image(lambda m, x: x * m.a(x).sigmoid(), 8, a=nn.Conv2d(8, 1, 3, padding=1))),
    NetworkKind("channel mean attention", IMAGE, image(lambda m, x: x * x.mean(1, True).sigmoid(), 8)),
    NetworkKind("shufflenet", IMAGE, image(_shuffled, 8, a=block(8, 8, 1, groups=2))),
    NetworkKind("shufflenet 2 split", IMAGE, image(lambda m, x: torch.cat([x.chunk(2, 1)[0], m.a(x.chunk(2, 1)[1])], 1), 8, a=block(4, 4))),
    NetworkKind("pixel shuffle", IMAGE, image(lambda m, x: F.pixel_shuffle(x, 2), 2)),
    NetworkKind("ghostnet", IMAGE, image(lambda m, x: torch.cat([y := m.a(x), m.b(y)], 1), 16, a=block(8, 8, 1), b=block(8, 8, groups=8))),
    NetworkKind("mixnet", IMAGE, image(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), 16, a=block(8, 8, 3, groups=8), b=block(8, 8, 7, groups=8))),
    NetworkKind("channel multiplier", IMAGE, image(lambda m, x: m.a(x), 24, a=block(8, 24, groups=8))),
    NetworkKind("atrous pyramid", IMAGE, image(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), 16, a=block(8, 8, dilation=2), b=block(8, 8, dilation=3))),
    NetworkKind("asymmetric", IMAGE, image(lambda m, x: m.b(m.a(x)), 8, a=nn.Conv2d(8, 8, (1, 5), padding=(0, 2)), b=nn.Conv2d(8, 8, (5, 1), padding=(2, 0)))),
    NetworkKind("convnext", IMAGE, image(lambda m, x: x + m.b(F.gelu(m.a(x))), 8, a=nn.Conv2d(8, 8, 7, padding=3, groups=8), b=nn.Conv2d(8, 8, 1))),
    NetworkKind("convnext layer norm", IMAGE, image(lambda m, x: m.a(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 8, a=nn.LayerNorm(8))),
    NetworkKind("u-net", IMAGE, image(lambda m, x: torch.cat([x, F.interpolate(m.a(F.max_pool2d(x, 2)), scale_factor=2)], 1), 16, a=block(8, 8))),
    NetworkKind("feature pyramid", IMAGE, image(lambda m, x: x + F.interpolate(m.a(x), scale_factor=2.0, mode="nearest"), 8, a=block(8, 8, stride=2))),
    NetworkKind("bilinear", IMAGE, image(lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"), 8)),
    NetworkKind("transposed", IMAGE, image(lambda m, x: m.a(x), 8, a=nn.ConvTranspose2d(8, 8, 2, 2))),
    NetworkKind("transposed in groups", IMAGE, image(lambda m, x: m.a(x), 4, a=nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, 4, dilation=2))),
    NetworkKind("transposed to a size", IMAGE, image(lambda m, x: m.a(x, output_size=[16, 16]), 8, a=nn.ConvTranspose2d(8, 8, 3, 2, 1))),
    NetworkKind("transposed on swapped axes", IMAGE, image(lambda m, x: m.a(x.transpose(2, 3)), 8, a=nn.ConvTranspose2d(8, 8, (3, 2), (1, 2)))),
    NetworkKind("transposed and batch norm", IMAGE, image(lambda m, x: m.b(m.a(x)).relu(), 8, a=nn.ConvTranspose2d(8, 8, 2, 2, bias=False), b=nn.BatchNorm2d(8))),
    NetworkKind("transposed twice", IMAGE, image(lambda m, x: m.a(m.a(x)), 8, a=nn.ConvTranspose2d(8, 8, 2, 2))),
    NetworkKind("stream upsampled by transposed", STREAM, along(lambda m, x: m.a(x).relu(), 5, a=nn.ConvTranspose1d(8, 5, 7, 4, 3, 2))),
    NetworkKind("decoder of features", ROW, lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 6, 3, 3), nn.ReLU(), nn.ConvTranspose2d(6, 1, 2, 2), nn.Flatten())),
    NetworkKind("decoder of a stream", ROW, lambda: nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Unflatten(1, (4, 6)), nn.ConvTranspose1d(4, 2, 4, 2, 1), nn.Flatten(), nn.Linear(24, CLASSES))),
    NetworkKind("padded pixels", IMAGE, image(lambda m, x: m.b(m.a(x).relu()), 8, a=nn.Conv2d(8, 8, 1, padding=1), b=nn.Conv2d(8, 8, 1, padding=(0, 2)))),
    NetworkKind("reflect padding", IMAGE, image(lambda m, x: m.a(x), 8, a=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"))),
    NetworkKind("explicit padding", IMAGE, image(lambda m, x: m.a(F.pad(x, (0, 1, 0, 1))), 8, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("local response", IMAGE, image(lambda m, x: m.a(x), 8, a=nn.LocalResponseNorm(2))),
    NetworkKind("layer used twice", IMAGE, image(lambda m, x: m.a(m.a(x)), 8, a=block(8, 8))),
    NetworkKind("two heads", IMAGE, lambda: Written(lambda m, x: (m.a(x), m.b(x)), a=nn.Sequential(nn.Flatten(), nn.Linear(768, 2)), b=nn.Sequential(nn.Flatten(), nn.Linear(768, 2)))),
    NetworkKind("autoencoder", GREY, lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 144))),
    NetworkKind("vision transformer", IMAGE, lambda: Written(lambda m, x: m.head(m.b(m.a(x).flatten(2).transpose(1, 2)).mean(1)), a=nn.Conv2d(3, 8, 4, 4), b=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), head=nn.Linear(8, CLASSES))),
    NetworkKind("mlp mixer", IMAGE, lambda: Written(lambda m, x: m.head(m.b(m.a(x).flatten(2)).mean(2)), a=nn.Conv2d(3, 8, 4, 4), b=nn.Linear(16, 16), head=nn.Linear(8, CLASSES))),
    NetworkKind("stream", STREAM, lambda: nn.Sequential(stream(6, 8), nn.MaxPool1d(2), stream(8, 12), *pooled_stream(12))),
    NetworkKind("stream separable", STREAM, along(lambda m, x: m.b(m.a(x)), 12, a=stream(8, 8, groups=8), b=stream(8, 12, 1))),
    NetworkKind("stream dilated", STREAM, along(lambda m, x: m.c(m.b(m.a(x))), 8, a=stream(8, 8, dilation=2), b=stream(8, 8, dilation=4), c=stream(8, 8, dilation=8))),
    NetworkKind("tcn causal", STREAM, along(lambda m, x: (m.a(x)[:, :, :-4] + x).relu(), 8, a=nn.Conv1d(8, 8, 3, padding=4, dilation=2))),
    NetworkKind("wavenet gate", STREAM, along(_gated, 8, a=nn.Conv1d(8, 8, 3, padding=2, dilation=2), b=nn.Conv1d(8, 8, 3, padding=2, dilation=2))),
    NetworkKind("stream residual", STREAM, along(lambda m, x: (x + m.a(x)).relu(), 8, a=stream(8, 8, act=nn.Identity()))),
    NetworkKind("stream as image", STREAM, lambda: Written(lambda m, x: m.a(x.unsqueeze(1)), a=nn.Sequential(nn.Conv2d(1, 8, (6, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(240, CLASSES)))),
    NetworkKind("stream transposed", STREAM, lambda: Written(lambda m, x: m.head(m.a(x.transpose(1, 2)).relu().mean(1)), a=nn.Linear(6, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("stream both means", STREAM, along(lambda m, x: torch.cat([x, m.a(x)], 1), 16, a=stream(8, 8))),
    NetworkKind("stream statistics", STREAM, along(lambda m, x: torch.cat([x, (x - x.mean(2, True)) ** 2], 1), 16)),
    NetworkKind("stream attention", STREAM, lambda: Written(lambda m, x: m.head(_attention(m, x).mean(1)), a=nn.Conv1d(6, 6, 1), b=nn.Conv1d(6, 6, 1), head=nn.Linear(6, CLASSES))),
    NetworkKind("stream spectrogram", STREAM, lambda: Written(lambda m, x: m.head(torch.log(m.a(x).abs() + 1).mean(2)), a=nn.Conv1d(6, 8, 8, 4), head=nn.Linear(8, CLASSES))),
    NetworkKind("gru", STREAM, _recurrent(nn.GRU)),
    NetworkKind("gru, last state", (12, 6), lambda: Written(lambda m, x: m.head(m.cell(x)[1][-1]), cell=nn.GRU(6, 8, batch_first=True), head=nn.Linear(8, CLASSES))),
    NetworkKind("gru of columns, twice", (1, 10, 12), lambda: Written(lambda m, x: m.head(m.b(m.a(m.stem(x).permute(0, 3, 1, 2).flatten(2))[0])[0].mean(1)), stem=block(1, 4, stride=2), a=nn.GRU(20, 8, batch_first=True), b=nn.GRU(8, 8, batch_first=True), head=nn.Linear(8, CLASSES))),
    NetworkKind("gru, two directions", (12, 6), lambda: Written(lambda m, x: m.head(m.cell(x)[0].mean(1)), cell=nn.GRU(6, 4, batch_first=True, bidirectional=True), head=nn.Linear(8, CLASSES))),
    NetworkKind("lstm", STREAM, _recurrent(nn.LSTM)),
    NetworkKind("rnn", STREAM, _recurrent(nn.RNN)),
    NetworkKind("keyword depthwise", (1, 20, 10), lambda: nn.Sequential(nn.Conv2d(1, 8, (10, 4), (2, 2), (5, 1), bias=False), nn.BatchNorm2d(8), nn.ReLU(), block(8, 8, groups=8), block(8, 8, 1), *pooled(8))),
    NetworkKind("person stem", (1, 24, 24), lambda: nn.Sequential(block(1, 8, stride=2), block(8, 8, groups=8), block(8, 16, 1), block(16, 16, groups=16, stride=2), block(16, 24, 1), *pooled(24))),
    NetworkKind("control flow", ROW, lambda: Written(lambda m, x: m.head(x if float(x.sum()) > 0 else -x), head=nn.Linear(20, CLASSES))),
    NetworkKind("free parameter", ROW, lambda: Written(lambda m, x: m.head(x * m.head.bias.sum()), head=nn.Linear(20, CLASSES))),
    NetworkKind("no bias", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES, bias=False))),
    NetworkKind("frozen stem", IMAGE, lambda: nn.Sequential(block(3, 8).requires_grad_(False), block(8, 8), *pooled(8))),
    NetworkKind("weight norm", IMAGE, lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), *pooled(8))),
    NetworkKind("pruned", IMAGE, lambda: nn.Sequential(prune.l1_unstructured(nn.Conv2d(3, 8, 3), "weight", 0.5), nn.ReLU(), *pooled(8))),
    NetworkKind("names of a dictionary", IMAGE, image(lambda m, x: m.a["a_b"](m.a["a-b"](x)), 8, a=nn.ModuleDict({"a-b": block(8, 8), "a_b": block(8, 8)}))),
    NetworkKind("average of a size", IMAGE, lambda: Written(lambda m, x: m.head(F.avg_pool2d(y := m.a(x), y.size()[2:]).view(x.size(0), -1)), a=block(3, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("maximum of a size", IMAGE, lambda: Written(lambda m, x: m.head(F.max_pool2d(y := m.a(x), y.shape[-1]).flatten(1)), a=block(3, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("cropped skip", IMAGE, image(lambda m, x: m.a(x) + x[:, :, 1:-1, 1:-1], 8, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("lines skipped", IMAGE, image(lambda m, x: torch.cat([x[:, :, ::2, ::2], x[:, :, 1::2, 1::2]], 1), 16)),
    NetworkKind("channels padded", IMAGE, image(lambda m, x: m.a(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)), 12, a=block(8, 12, stride=2))),
    NetworkKind("channels shuffled", IMAGE, image(lambda m, x: m.b(m.c(m.a(x))), 8, a=block(8, 8, 1, groups=2), b=block(8, 8, groups=8), c=nn.ChannelShuffle(2))),
    NetworkKind("causal", STREAM, along(lambda m, x: m.a(F.pad(x, (4, 0))).relu() + x, 8, a=nn.Conv1d(8, 8, 3, dilation=2))),
    NetworkKind("difference in time", STREAM, along(lambda m, x: torch.cat([x[:, :, 1:], x[:, :, 1:] - x[:, :, :-1]], 1), 16)),
    NetworkKind("last step", STREAM, lambda: Written(lambda m, x: m.head(m.a(x)[:, :, -1]), a=stream(6, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("gated convolution", STREAM, along(lambda m, x: F.glu(m.a(x), 1), 8, a=nn.Conv1d(8, 16, 3, padding=1))),
    NetworkKind("hand-written swish", IMAGE, image(lambda m, x: (y := m.a(x)) * torch.sigmoid(1.7 * y), 8, a=nn.Conv2d(8, 8, 1))),
    NetworkKind("hand-written hard swish", IMAGE, image(lambda m, x: (y := m.a(x)) * F.relu6(y + 3) / 6, 8, a=nn.Conv2d(8, 8, 1))),
    NetworkKind("changed in place and read", IMAGE, image(lambda m, x: (y := m.a(x)) + y.relu_(), 8, a=nn.Conv2d(8, 8, 1))),
    NetworkKind("dropout left on", IMAGE, image(lambda m, x: F.dropout(m.a(x), 0.3), 8, a=nn.Conv2d(8, 8, 1))),
    NetworkKind("wide padding", IMAGE, image(lambda m, x: m.a(x), 8, a=nn.Conv2d(8, 8, 3, padding=5))),
    NetworkKind("sparse stride", IMAGE, image(lambda m, x: m.a(x), 8, a=nn.Conv2d(8, 8, 2, 3, 1, groups=8))),
    NetworkKind("image transposed", SMALL, lambda: Written(lambda m, x: m.head(m.b(m.a(x).transpose(2, 3)).mean((2, 3))), a=block(3, 8), b=nn.Conv2d(8, 8, (1, 3)), head=nn.Linear(8, CLASSES))),
    NetworkKind("flattened columns first", SMALL, lambda: Written(lambda m, x: m.head(m.a(x).permute(0, 3, 1, 2).flatten(1)), a=nn.Conv2d(3, 2, 3), head=nn.Linear(70, CLASSES))),
    NetworkKind("log softmax", ROW, lambda: nn.Sequential(nn.Linear(20, CLASSES), nn.LogSoftmax(1))),
    NetworkKind("temperature", ROW, lambda: Written(lambda m, x: m.head(x) / 2.0, head=nn.Linear(20, CLASSES))),
    NetworkKind("outputs sliced", ROW, lambda: Written(lambda m, x: m.head(x)[:, 1:], head=nn.Linear(20, CLASSES))),
    NetworkKind("quarters of an image", IMAGE, lambda: Written(lambda m, x: m.head(torch.cat([m.a(x[:, :, :8, :8]), m.b(x[:, :, 8:, 8:])], 1).relu().mean((2, 3))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3), head=nn.Linear(8, CLASSES))),
    NetworkKind("rectified twice", IMAGE, image(lambda m, x: torch.cat([y := m.a(x), -y], 1).relu(), 16, a=nn.Conv2d(8, 8, 3, padding=1))),
    NetworkKind("cropped by padding", IMAGE, image(lambda m, x: m.a(F.pad(x, (-2, -1, -1, -2))), 8, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("padded with minus one", IMAGE, image(lambda m, x: m.a(F.pad(x, (1, 1, 1, 1), value=-1.0)), 8, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("channels by a list", IMAGE, image(lambda m, x: m.a(x)[:, [3, 1, 2, 0]], 4, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("dilated to the same size", GREY, lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding="same", dilation=2), nn.ReLU(), *pooled(8))),
    NetworkKind("wide kernel, long stride", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, (1, 7), (1, 3), (0, 2)), nn.ReLU(), *pooled(8))),
    NetworkKind("adaptive pool of one axis", GREY, lambda: nn.Sequential(block(1, 8), nn.AdaptiveAvgPool2d((None, 1)), nn.Flatten(), nn.Linear(96, CLASSES))),
    NetworkKind("padding counted in pools", GREY, lambda: nn.Sequential(block(1, 8), nn.AvgPool2d(3, 2, 1, count_include_pad=False), *pooled(8))),
    NetworkKind("normed twice", IMAGE, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8, eps=1.0), nn.ReLU(), *pooled(8))),
    NetworkKind("channels last in memory", IMAGE, lambda: _channels_last(nn.Sequential(block(3, 8), block(8, 8), *pooled(8)))),
    NetworkKind("steps before channels", STREAM, lambda: Written(lambda m, x: m.head(m.a(x).transpose(1, 2).flatten(1)), a=nn.Conv1d(6, 8, 3, padding=1), head=nn.Linear(256, CLASSES))),
    NetworkKind("transposed weight", ROW, _mirrored),
    NetworkKind("weights in double", ROW, lambda: Written(lambda m, x: m.head(x.double()).float(), head=nn.Linear(20, CLASSES).double())),
    NetworkKind("einsum", IMAGE, image(lambda m, x: torch.einsum("bchw,cd->bdhw", x, m.a.weight), 8, a=nn.Linear(8, 8))),
    NetworkKind("maximum of pairs", ROW, lambda: Written(lambda m, x: m.head(m.a(x).view(-1, 8, 2).max(2).values), a=nn.Linear(20, 16), head=nn.Linear(8, CLASSES))),
    NetworkKind("chosen by sign", IMAGE, image(lambda m, x: torch.where((y := m.a(x)) > 0, y, 0.1 * y), 8, a=nn.Conv2d(8, 8, 3))),
    NetworkKind("patches by unfold", IMAGE, lambda: Written(lambda m, x: m.head(m.a(F.unfold(x, 4, stride=4).transpose(1, 2)).mean(1)), a=nn.Linear(48, 8), head=nn.Linear(8, CLASSES))),
    NetworkKind("detached branch", ROW, lambda: Written(lambda m, x: m.head((y := m.a(x)).detach() + m.b(y)), a=nn.Linear(20, 12), b=nn.Linear(12, 12), head=nn.Linear(12, CLASSES))),
    NetworkKind("forward hook", IMAGE, lambda: nn.Sequential(_hooked(nn.Conv2d(3, 8, 3)), nn.ReLU(), *pooled(8))),
    NetworkKind("softmax over samples", ROW, lambda: nn.Sequential(nn.Linear(20, CLASSES), nn.Softmax(0))),
    *(NetworkKind(f"activation {act.__name__}", IMAGE, _activation(act)) for act in ACTIVATIONS),
)  # fmt: skip
"""More than the 87 with which the compiler was tried first: those, and one for every activation function
of torch that people use.
"""


def random_kind(seed: int) -> NetworkKind:
    """Return a network of random layers, with shortcuts, gates and concatenations."""
    choose = random.Random(seed)
    size, channels = choose.choice((8, 12, 16)), choose.choice((1, 2, 3))
    shape = (channels, size, choose.choice((size, size - 1, 5)))
    recipe = [choose.choice(STEPS) for _ in range(choose.randint(2, 6))]

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return RandomNetwork(shape, recipe, seed)

    return NetworkKind(f"random {seed}", shape, make)


STEPS = (
    "conv",
    "grouped",
    "depthwise",
    "dilated",
    "pool",
    "norm",
    "function",
    "residual",
    "join",
    "gate",
    "upsample",
    "square",
)


class RandomNetwork(nn.Module):
    """The steps of a recipe, one after the other; each step's result depends on its input when the network is built."""

    def __init__(self, shape: Shape, recipe: list[str], seed: int) -> None:
        super().__init__()
        self.recipe, choose, channels = recipe, random.Random(seed), 6
        self.stem = nn.Conv2d(shape[0], channels, 3, padding=1)
        self.layers = nn.ModuleList()
        self.functions: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for step in recipe:
            layer, channels = _layer(step, channels, choose)
            self.layers.append(layer)
            self.functions.append(
                choose.choice((torch.tanh, F.silu, F.hardswish, torch.relu, lambda x: 0.5 - x, torch.abs))
            )
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for step, layer, function in zip(self.recipe, self.layers, self.functions, strict=True):
            x = self._step(step, layer, function, x)
        return self.head(x.mean((2, 3)))

    @staticmethod
    def _step(
        step: str, layer: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        match step:
            case "function":
                return function(x)
            case "residual":
                return function(x + layer(x))
            case "join":
                return torch.cat([x, function(layer(x))], 1)
            case "gate":
                return x * layer(x).sigmoid()
            case "square":
                return function(x) * x
        return function(layer(x)) if step in ("conv", "grouped") else layer(x)


def _layer(step: str, channels: int, choose: random.Random) -> tuple[nn.Module, int]:
    """Return the layer of a step and the channels behind it."""
    wide = choose.choice((4, 6, 8))
    layers: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "conv": (lambda: nn.Conv2d(channels, wide, 3, choose.choice((1, 2)), 1), wide),
        "grouped": (lambda: nn.Conv2d(channels, 2 * channels, 3, 1, 1, 1, channels // 2), 2 * channels),
        "depthwise": (lambda: block(channels, channels, 3, groups=channels), channels),
        "dilated": (lambda: nn.Conv2d(channels, wide, 3, 1, 2, 2), wide),
        "pool": (lambda: nn.MaxPool2d(3, 2, 1) if wide > 4 else nn.AvgPool2d(3, 1, 1), channels),
        "norm": (lambda: nn.BatchNorm2d(channels), channels),
        "residual": (lambda: nn.Conv2d(channels, channels, 3, padding=1), channels),
        "join": (lambda: nn.Conv2d(channels, wide, 1), channels + wide),
        "gate": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1)), channels),
        "upsample": (lambda: nn.Upsample(scale_factor=2), channels),
    }
    make, after = layers.get(step, (nn.Identity, channels))
    return make(), after


def all_kinds(randoms: int = 60) -> tuple[NetworkKind, ...]:
    """Return the written kinds and that many random ones."""
    return (*KINDS, *(random_kind(seed) for seed in range(randoms)))
