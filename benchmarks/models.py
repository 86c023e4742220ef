"""The models that exactness, fit and planning are measured on: real architectures, random weights, made-up batches.

Each entry gives a model, a loss function `loss_fn(model, *batch)` and batches. `small=True` shrinks width, depth and
resolution for tests; the architecture and its operators stay.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from port_planner.job_sources import load_job

Batch = tuple[torch.Tensor, ...]

CASES = {"resnet18": ("sgd", 32), "resnet50": ("sgd", 8), "bert": ("adamw", 8), "gpt2": ("adamw", 2)}
"""Optimizer and batch size of each model, as in the targets."""

DEMO = "demo"
"""The shipped example, of one size."""
RESNET101 = "resnet101"
"""A model that other planners report: deeper than ResNet-50, with the same architecture."""
DEMO_SCRIPT = Path(__file__).resolve().parents[1] / "examples/shakespeare/train.py"


@dataclass(frozen=True)
class Workload:
    """A model with its loss and a maker of batches: `batch(i)` gives the i-th."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Batch]


def workload(name: str, *, small: bool = False, batch_size: int | None = None, size: int | None = None) -> Workload:
    """Return the workload of this name, built from a fixed seed."""
    torch.manual_seed(0)
    return {**WORKLOADS, DEMO: _demo, RESNET101: _resnet101}[name](small, batch_size, size)


def case_of(name: str) -> tuple[str, int]:
    """Return optimizer and batch size of a model of `CASES` or of ResNet-101, or those of the demo's own script."""
    return {**CASES, DEMO: ("adamw", 24), RESNET101: CASES["resnet50"]}[name]


def make_optimizer(name: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a case: "adamw" or "sgd" with momentum."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# -- convolutional networks


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def _images(n: int, size: int, classes: int) -> Callable[[int], Batch]:
    def batch(i: int) -> Batch:
        g = torch.Generator().manual_seed(1000 + i)
        return torch.randn(n, 3, size, size, generator=g), torch.randint(0, classes, (n,), generator=g)

    return batch


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.down = _shortcut(inplanes, planes, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * 4)
        self.relu = nn.ReLU(inplace=True)
        self.down = _shortcut(inplanes, planes * 4, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def _shortcut(inplanes: int, planes: int, stride: int) -> nn.Module | None:
    if stride == 1 and inplanes == planes:
        return None
    return nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))


class ResNet(nn.Module):
    """The network of He et al. 2015, as torchvision writes it; `cifar` uses the 3x3 stem without pooling."""

    def __init__(self, block: type, layers: list[int], width: int, classes: int, *, cifar: bool) -> None:
        super().__init__()
        stem: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 1, 1, bias=False) if cifar else nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        if not cifar:
            stem.append(nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(*stem)
        inplanes = width
        stages = []
        for i, count in enumerate(layers):
            planes = width * 2**i
            for j in range(count):
                stages.append(block(inplanes, planes, 2 if i and not j else 1))
                inplanes = planes * block.expansion  # type: ignore[attr-defined]
        self.stages = nn.Sequential(*stages)
        self.blocks = list(self.stages)
        self.fc = nn.Linear(inplanes, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(functional.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


def _resnet18(small: bool, n: int | None, size: int | None) -> Workload:
    model = ResNet(_Basic, [1, 1, 1, 1] if small else [2, 2, 2, 2], 8 if small else 64, 10, cifar=True)
    return Workload(model, _classify, _images(n or (4 if small else 32), size or (16 if small else 32), 10))


def _resnet50(small: bool, n: int | None, size: int | None) -> Workload:
    model = ResNet(_Bottleneck, [1, 2, 1, 1] if small else [3, 4, 6, 3], 8 if small else 64, 1000, cifar=False)
    return Workload(model, _classify, _images(n or (2 if small else 8), size or (32 if small else 160), 1000))


def _resnet101(small: bool, n: int | None, size: int | None) -> Workload:
    model = ResNet(_Bottleneck, [1, 1, 3, 1] if small else [3, 4, 23, 3], 8 if small else 64, 1000, cifar=False)
    return Workload(model, _classify, _images(n or (2 if small else 8), size or (32 if small else 160), 1000))


def _vgg16bn(small: bool, n: int | None, size: int | None) -> Workload:
    """Return the network of Simonyan and Zisserman 2014, configuration D with batch norm, with a CIFAR head."""
    layers: list[nn.Module] = []
    channels = 3
    for c in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if c == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        c = c // 16 if small else c
        layers += [nn.Conv2d(channels, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
        channels = c
    head = [nn.Flatten(), nn.Linear(channels, channels), nn.ReLU(), nn.Dropout(), nn.Linear(channels, 10)]
    return Workload(nn.Sequential(*layers, *head), _classify, _images(n or (4 if small else 16), size or 32, 10))


class _Inverted(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = cin * expand
        self.skip = stride == 1 and cin == cout
        self.body = nn.Sequential(
            nn.Conv2d(cin, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, cout, 1, bias=False),
            nn.BatchNorm2d(cout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.skip else self.body(x)


def _mobilenetv2(small: bool, n: int | None, size: int | None) -> Workload:
    """Return the network of Sandler et al. 2018."""
    settings = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    shrink = 4 if small else 1
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32 // shrink, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32 // shrink),
        nn.ReLU6(inplace=True),
    ]
    cin = 32 // shrink
    for expand, c, count, stride in settings:
        for i in range(1 if small else count):
            layers.append(_Inverted(cin, c // shrink, stride if i == 0 else 1, expand))
            cin = c // shrink
    last = 1280 // shrink
    layers += [nn.Conv2d(cin, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, 10)]
    return Workload(
        nn.Sequential(*layers), _classify, _images(n or (2 if small else 8), size or (32 if small else 96), 10)
    )


# -- transformers


def _tokens(n: int, length: int, vocabulary: int, *, labels: int | None = None) -> Callable[[int], Batch]:
    def batch(i: int) -> Batch:
        g = torch.Generator().manual_seed(1000 + i)
        ids = torch.randint(0, vocabulary, (n, length), generator=g)
        if labels is None:
            return (ids,)
        return ids, torch.randint(0, labels, (n,), generator=g)

    return batch


def _language(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _labelled(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss


def _bert(small: bool, n: int | None, size: int | None) -> Workload:
    from transformers import BertConfig, BertForSequenceClassification

    config = (
        BertConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
        if small
        else BertConfig()
    )
    length = size or (16 if small else 128)
    return Workload(
        BertForSequenceClassification(config),
        _labelled,
        _tokens(n or (2 if small else 8), length, config.vocab_size, labels=2),
    )


def _gpt2(small: bool, n: int | None, size: int | None) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=4) if small else GPT2Config()
    return Workload(
        GPT2LMHeadModel(config), _language, _tokens(n or 2, size or (16 if small else 128), config.vocab_size)
    )


def _llama(small: bool, n: int | None, size: int | None) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 if small else 256
    config = LlamaConfig(
        vocab_size=1000 if small else 8000,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Workload(
        LlamaForCausalLM(config), _language, _tokens(n or 2, size or (16 if small else 128), config.vocab_size)
    )


def _vit(small: bool, n: int | None, size: int | None) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    size = size or (32 if small else 224)
    config = ViTConfig(
        hidden_size=48 if small else 192,
        num_hidden_layers=2 if small else 12,
        num_attention_heads=3,
        intermediate_size=96 if small else 768,
        image_size=size,
        patch_size=16,
        hidden_dropout_prob=0.1,
        num_labels=10,  # type: ignore[call-arg]  # the base class takes it
    )

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(pixel_values=x).logits, y)

    return Workload(ViTForImageClassification(config), loss, _images(n or (2 if small else 4), size, 10))


# -- diffusion


def _noise(n: int, channels: int, size: int, context: tuple[int, int] | None) -> Callable[[int], Batch]:
    def batch(i: int) -> Batch:
        g = torch.Generator().manual_seed(1000 + i)
        shape = (n, channels, size, size)
        items = [
            torch.randn(shape, generator=g),
            torch.randint(0, 1000, (n,), generator=g),
            torch.randn(shape, generator=g),
        ]
        if context:
            items.append(torch.randn(n, *context, generator=g))
        return tuple(items)

    return batch


def _unet2d(small: bool, n: int | None, size: int | None) -> Workload:
    from diffusers import UNet2DModel

    w = 16 if small else 64
    model: Any = UNet2DModel(
        sample_size=size or 16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1 if small else 2,
        block_out_channels=(w, w * 2),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )

    def loss(model: nn.Module, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(x, t).sample, noise)

    return Workload(model, loss, _noise(n or 2, 3, size or 16, None))


def _unet2dcondition(small: bool, n: int | None, size: int | None) -> Workload:
    from diffusers import UNet2DConditionModel

    w = 16 if small else 64
    model: Any = UNet2DConditionModel(
        sample_size=size or 16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1 if small else 2,
        block_out_channels=(w, w * 2) if small else (w, w * 2, w * 4, w * 4),
        norm_num_groups=8,
        cross_attention_dim=32 if small else 128,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D",) * (1 if small else 3) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (1 if small else 3),
    )

    def loss(
        model: nn.Module, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        return functional.mse_loss(model(x, t, encoder_hidden_states=context).sample, noise)

    return Workload(model, loss, _noise(n or 2, 4, size or 16, (8, 32 if small else 128)))


def _demo(small: bool, batch_size: int | None, size: int | None) -> Workload:
    """Return the shipped example: a character model on Shakespeare, with its own batches in their order."""
    job = load_job(DEMO_SCRIPT)
    rows = batch_size or job.batch_size
    return Workload(
        job.model,
        lambda model, *batch: job.loss_fn(model, *batch)[0],
        lambda i: tuple(column[i * rows : (i + 1) * rows] for column in job.data),
    )


WORKLOADS: dict[str, Callable[[bool, int | None, int | None], Workload]] = {
    "resnet18": _resnet18,
    "resnet50": _resnet50,
    "vgg16bn": _vgg16bn,
    "mobilenetv2": _mobilenetv2,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
    "unet2d": _unet2d,
    "unet2dcondition": _unet2dcondition,
}
