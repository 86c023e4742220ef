"""A step that trains a large table of embeddings, of which one row gets no gradient."""

import torch
from torch import nn
from torch.nn import functional

from tests.planner.tiling.adapted_step import CLASSES, WIDTH, adapted_batch


class Reader(nn.Module):
    """A trained table of embeddings with a row that gets no gradient, read once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH, padding_idx=207)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(ids)).mean(1))


def reader() -> Reader:
    """Return the model from a fixed seed."""
    torch.manual_seed(0)
    return Reader()


def reader_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return functional.cross_entropy(model(ids), labels)


def reader_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, many of them twice, rows at the edges of blocks and the one without a
    gradient among them, and labels.
    """
    ids, labels = adapted_batch(seed)
    ids[1:] %= 211
    ids[0, :8] = torch.tensor([0, 191, 192, 207, 208, 383, 384, CLASSES - 1])
    return ids, labels[:, 0] % 8
