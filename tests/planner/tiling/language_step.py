"""A small language model's step, with what is hard to cut: a loss head, attention with
dropout, labels that are ignored.
"""

import functools

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import Capture, capture_step
from tests.agent.exactness import OPTIMIZERS

CLASSES, ROWS, LENGTH, WIDTH, HEADS = 1100, 8, 32, 64, 4


class Language(nn.Module):
    """One block of attention by plain operators, a GELU between products, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.drop, self.odd = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        q, k, v = (t.view(*ids.shape, HEADS, -1).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        weights = self.drop((q @ k.transpose(-2, -1) * 0.25).softmax(-1))
        h = h + self.odd((weights @ v).transpose(1, 2).reshape(h.shape))
        return self.head(self.norm(h + self.down(functional.gelu(self.up(h)))))


def language_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the labels that are not ignored."""
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def language_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [rows, length], every fifth label to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    return ids, labels


def language_model() -> Language:
    """Return the model from a fixed seed."""
    torch.manual_seed(0)
    return Language()


@functools.cache
def language_step() -> Capture:
    """Return the capture of its step with AdamW."""
    model = language_model()
    return capture_step(model, language_loss, OPTIMIZERS["adamw"](model.parameters()), language_batch(0))
