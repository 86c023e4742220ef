"""A recorded step with every operator that trusts its backward pass to be called by autograd."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Op, Phase, Ref, Role, StepGraph, Storage, Value


class Everything(nn.Module):
    """Every operator that trusts its backward pass to be called by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.same_words = nn.Embedding(11, 8, scale_grad_by_freq=True)
        self.bags = nn.EmbeddingBag(11, 16, mode="sum")
        self.shared = nn.EmbeddingBag(11, 16, mode="sum").requires_grad_(False)
        self.shares = nn.Parameter(torch.rand(3, 8))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3))
        self.norm, self.frozen, self.layer = nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.LayerNorm(8)

    def train(self, mode: bool = True) -> "Everything":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(tokens) + self.same_words(tokens)).unsqueeze(1)  # n, 1, 8, 8
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = functional.pad(x, (2, 1, 1, 2), mode="reflect")
        x = self.frozen(self.norm(self.conv(x)))
        x = functional.max_pool2d(x, 2, stride=1) + functional.adaptive_max_pool2d(x, 8)
        x = functional.interpolate(x, scale_factor=1.5, mode="bilinear")
        x = functional.pad(functional.avg_pool2d(x, 3), (1, 0, 0, 1), mode="replicate")
        grid = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(len(x), 5, 5, 2)
        x = functional.grid_sample(x, grid, align_corners=False)
        x = functional.adaptive_avg_pool2d(x.unfold(2, 3, 2).sum(-1) + x.unfold(-2, 3, 2).sum(-1), 2)
        bags = self.bags(tokens.flip(1)) + self.shared(tokens.roll(1), per_sample_weights=self.shares)
        return functional.gelu(x.flatten(1)) + bags


def of_volumes(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of what operators on volumes make of x (n, 1, 4, 4, 4)."""
    x = functional.pad(functional.pad(x, (1,) * 6, mode="reflect"), (1,) * 6, mode="replicate")
    x = functional.interpolate(x, scale_factor=1.5, mode="trilinear")
    grid = torch.linspace(-1, 1, 5).view(1, 5, 1, 1, 1).expand(len(x), 5, 5, 5, 3)
    x = functional.grid_sample(x, grid, align_corners=False)
    drawn = torch.full((len(x), 1, 3), 0.5)
    x = functional.adaptive_max_pool3d(x, 3) + functional.fractional_max_pool3d(x, 2, 3, _random_samples=drawn)
    return functional.fractional_max_pool2d(x[..., 0], 2, 2, _random_samples=drawn[..., :2]).mean()


def of_rows(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a loss of rows of numbers (n, k) that is a sum of margins and distances."""
    margins = functional.multi_margin_loss(x, labels) + functional.multilabel_margin_loss(
        x, labels[:, None].expand_as(x) % 2
    )
    return margins + torch.cdist(x, 2 * x).mean() + functional.pdist(x).mean()


def loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    pixels = logits.view(len(logits), 4, 2, 2)
    frames, lengths = pixels.flatten(2).permute(2, 0, 1).log_softmax(-1), torch.full((len(logits),), 4)
    spoken = functional.ctc_loss(frames, labels[:, None] % 3 + 1, lengths, torch.ones_like(labels))
    return (
        spoken
        + of_volumes(logits.tile(4).view(-1, 1, 4, 4, 4))
        + of_rows(logits, labels)
        + functional.cross_entropy(logits, labels)
        + functional.cross_entropy(pixels, labels[:, None, None].expand(-1, 2, 2) % 4)
    )


def recorded_step() -> StepGraph:
    """Return the step of `Everything`, as it is recorded."""
    torch.manual_seed(0)
    model = Everything()
    batch = (torch.randint(0, 11, (3, 8)), torch.randint(0, 16, (3,)))
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).graphs["step"]


def place(graph: StepGraph, name: str) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.name.partition("::")[2].partition(".")[0] == name)


def changed(graph: StepGraph, name: str, change: Callable[[Op], Op]) -> StepGraph:
    """Return the graph with the first call of `name` changed."""
    i = place(graph, name)
    return replace(graph, ops=(*graph.ops[:i], change(graph.ops[i]), *graph.ops[i + 1 :]))


INDICES = {
    "max_pool2d_with_indices_backward": 7, "adaptive_max_pool2d_backward": 2, "nll_loss_backward": 2, "nll_loss2d_backward": 2,
    "embedding_dense_backward": 1, "_ctc_loss_backward": 2, "adaptive_max_pool3d_backward": 2, "fractional_max_pool2d_backward": 4,
    "fractional_max_pool3d_backward": 4, "_embedding_bag_backward": 1, "_embedding_bag_per_sample_weights_backward": 2,
}  # fmt: skip
"""Place of the argument whose values nobody checks."""


def made_of(
    name: str, before: Sequence[tuple[int, ...]], numbers: tuple[float, ...], last: tuple[int, ...]
) -> StepGraph:
    """Return a graph of one operator that takes float tensors of these shapes, numbers, and one tensor more."""
    shapes = [*before, last, last]
    storages = tuple(Storage(4 * math.prod(shape), Role.BATCH, f"t{i}") for i, shape in enumerate(shapes))
    values = tuple(
        Value(i, "float32", shape, tuple(math.prod(shape[k + 1 :]) for k in range(len(shape))), 0)
        for i, shape in enumerate(shapes)
    )
    count = len(before)
    op = Op(name, (*map(Ref, range(count)), *numbers, Ref(count)), (), (count + 1,), (), Phase.BACKWARD)
    return StepGraph(storages, values, (op,), tuple(range(count + 1)), count + 1)
