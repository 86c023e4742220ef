"""A language model's step whose embedding is frozen, tied to the head and large; adapters inside are trained."""

import functools

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import Capture, capture_step
from tests.agent.exactness import OPTIMIZERS

CLASSES, ROWS, LENGTH, WIDTH, INNER = 1000, 4, 16, 96, 8


class AdaptedLanguage(nn.Module):
    """An adapter between a frozen embedding and the head that shares its weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, dtype=dtype).requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, INNER, dtype=dtype), nn.Linear(INNER, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.first(self.embed(ids))
        return self.head(torch.tanh(h + self.up(self.down(h))))


def adapted_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all labels."""
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())


def adapted_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [rows, length]; the first and the last class are among the ids."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator) for _ in range(2))
    ids[0, 0], ids[0, 1] = 0, CLASSES - 1
    return ids, labels


def adapted_model(dtype: torch.dtype = torch.float32) -> AdaptedLanguage:
    """Return the model from a fixed seed."""
    torch.manual_seed(0)
    return AdaptedLanguage(dtype)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return what of a model is not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


@functools.cache
def adapted_step(dtype: torch.dtype = torch.float32) -> Capture:
    """Return the capture of its step with AdamW."""
    model = adapted_model(dtype)
    return capture_step(model, adapted_loss, OPTIMIZERS["adamw"](trained(model)), adapted_batch(0))
